// Splits the row-wise problems and runs them. The split depends on the shape only, never on the number of threads.
#include "rows.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime.h"

namespace efla {
namespace {

constexpr int64_t kMaxParts = 64;
constexpr int64_t kNormRows = 64;             // rows a thread takes at once
constexpr int64_t kGateElements = 8192;       // elements a thread takes at once
constexpr int64_t kProductColumns = 32;       // columns of a product that a thread takes at once
constexpr int64_t kMaxTeam = 64;              // threads
constexpr double kElementsPerThread = 32768;  // with less work, a second thread costs more than it saves

struct Loop {
  void (*body)(const Kernels&, const void*, int64_t);
  const void* problem;
  const Kernels& kernels;
  int64_t count;
  bool alone;  // the caller may itself be one thread of a team
  std::atomic<int64_t> taken[kMaxTeam] = {};
};

// Each thread has its own range, as in torch, whose operations then find the results in the same core's cache. A thread that is
// done with its range goes on with what others have left.
void loop_body(void* argument) {
  Loop& loop = *static_cast<Loop*>(argument);
  const TeamPlace place = loop.alone ? TeamPlace{0, 1} : team_place();
  for (int i = 0; i < place.size; ++i) {
    const int part = (place.number + i) % place.size;
    const int64_t begin = loop.count * part / place.size, end = loop.count * (part + 1) / place.size;
    for (int64_t index; (index = begin + loop.taken[part].fetch_add(1)) < end;)
      loop.body(loop.kernels, loop.problem, index);
  }
}

void run(const void* problem, void (*body)(const Kernels&, const void*, int64_t), int64_t count, double elements,
         int threads) {
  if (!count) return;
  const int64_t useful = std::min({int64_t(elements / kElementsPerThread) + 1, count, int64_t(threads), kMaxTeam});
  Loop loop{body, problem, active_kernels(), count, useful <= 1};
  run_parallel(int(useful), loop_body, &loop);
}

void check(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

int64_t num_tiles(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

int64_t num_blocks(int64_t columns) { return (columns + kProductColumns - 1) / kProductColumns; }

std::vector<int64_t> tile_offsets(const ConvProblem& p) {
  std::vector<int64_t> offset(size_t(p.sequences) + 1);
  for (int64_t n = 0; n < p.sequences; ++n)
    offset[n + 1] = offset[n] + num_tiles(p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens);
  return offset;
}

template <auto kernel> void run_gate(const GateProblem& p, int threads) {
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    const auto& q = *static_cast<const GateProblem*>(problem);
    const int64_t end = (i + 1) * kGateElements;
    (kernels.*kernel)(q, i * kGateElements, end < q.count ? end : q.count);
  };
  run(&p, body, (p.count + kGateElements - 1) / kGateElements, double(p.count), threads);
}

int64_t at_most(int64_t count, int64_t limit) { return count < 1 ? 1 : count < limit ? count : limit; }

}  // namespace

void check_conv(const ConvProblem& p) {
  check(p.width >= 1 && p.width <= kMaxConvWidth, "the convolution's width must be between 1 and 16");
  check(p.batch >= 0 && p.tokens >= 0 && p.channels >= 1, "sizes must not be negative");
  if (!p.cu_seqlens) return check(p.sequences == p.batch, "without cu_seqlens there is one sequence per batch entry");
  check(p.batch == 1 && p.sequences >= 0, "with cu_seqlens the batch size must be 1");
  check(p.cu_seqlens[0] == 0 && p.cu_seqlens[p.sequences] == p.tokens, "cu_seqlens must start at 0 and end at T");
  for (int64_t n = 0; n < p.sequences; ++n)
    check(p.cu_seqlens[n] <= p.cu_seqlens[n + 1], "cu_seqlens must not decrease");
}

int64_t norm_parts(int64_t rows) { return at_most(rows / kNormRows, kMaxParts); }

int64_t conv_parts(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens) {
  int64_t tiles = cu_seqlens ? 0 : sequences * num_tiles(tokens);
  for (int64_t n = 0; cu_seqlens && n < sequences; ++n) tiles += num_tiles(cu_seqlens[n + 1] - cu_seqlens[n]);
  return at_most(tiles, kMaxParts);
}

void run_norm_forward(const NormProblem& p, int threads) {
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    const auto& q = *static_cast<const NormProblem*>(problem);
    const int64_t end = (i + 1) * kNormRows;
    kernels.norm_forward(q, i * kNormRows, end < q.rows ? end : q.rows);
  };
  run(&p, body, (p.rows + kNormRows - 1) / kNormRows, double(p.rows) * p.width, threads);
}

void run_norm_backward(const NormProblem& p, int threads) {
  check(p.parts == norm_parts(p.rows), "parts must be norm_parts(rows)");
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    kernels.norm_backward(*static_cast<const NormProblem*>(problem), i);
  };
  run(&p, body, p.parts, double(p.rows) * p.width, threads);
}

void run_gate_forward(const GateProblem& p, int threads) { run_gate<&Kernels::gate_forward>(p, threads); }

void run_gate_backward(const GateProblem& p, int threads) { run_gate<&Kernels::gate_backward>(p, threads); }

void run_mixer_step(const MixerStep& p, int threads) {
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    kernels.mixer_step(*static_cast<const MixerStep*>(problem), i);
  };
  run(&p, body, p.batch * p.key_heads, double(p.batch) * p.value_heads * p.K * p.V, threads);
  if (!p.D) return;
  NormProblem norm;  // over all heads of a token
  norm.dtype = p.dtype, norm.rows = p.batch, norm.width = int(p.value_heads * p.V), norm.factor = 1.0 / norm.width;
  norm.eps = p.eps, norm.x = p.y, norm.weight = p.norm_weight, norm.y = p.y;
  run_norm_forward(norm, threads);
}

void run_products(const ProductsProblem& p, int threads) {
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    const auto& q = *static_cast<const ProductsProblem*>(problem);
    int part = 0;
    for (int64_t blocks; i >= (blocks = num_blocks(q.columns[part])); ++part) i -= blocks;
    const int64_t end = (i + 1) * kProductColumns;
    kernels.products(q, part, i * kProductColumns, end < q.columns[part] ? end : q.columns[part]);
  };
  int64_t blocks = 0, columns = 0;
  for (int part = 0; part < (p.gated ? 1 : p.count); ++part) {
    blocks += num_blocks(p.columns[part]);
    columns += p.columns[part];
  }
  run(&p, body, p.rows ? blocks : 0, double(columns) * double(p.width), threads);
}

void run_block_step(const BlockStep& p, int threads) {
  MixerStep m = p.mixer;
  const int64_t size = m.dtype == Dtype::float64 ? 8 : m.dtype == Dtype::float32 ? 4 : 2;
  const int64_t keys = m.key_heads * m.K, values = m.value_heads * m.V;
  const int64_t columns[6] = {keys, keys, values, m.value_heads, m.value_heads, values};
  static thread_local std::vector<char> scratch;
  const auto padded = [&](int64_t count) { return (m.batch * count * size + 63) / 64 * 64; };
  int64_t bytes = 2 * padded(p.width) + padded(values) + padded(p.inner) + 64;
  for (int64_t count : columns) bytes += padded(count);
  if (int64_t(scratch.size()) < bytes) scratch.resize(size_t(bytes));
  char* free = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const auto take = [&](int64_t count) { return std::exchange(free, free + padded(count)); };
  void *normed = take(p.width), *mixed = take(values), *inner = take(p.inner);
  void* hidden = p.inner ? take(p.width) : p.y;

  NormProblem norm;
  norm.dtype = m.dtype, norm.rows = m.batch, norm.width = int(p.width), norm.factor = 1.0 / double(p.width);
  norm.eps = p.eps, norm.x = p.x, norm.weight = p.norm_weight, norm.y = normed;
  run_norm_forward(norm, threads);

  ProductsProblem in;
  in.dtype = m.dtype, in.rows = m.batch, in.width = p.width, in.x = normed;
  Strided* const targets[6] = {&m.q, &m.k, &m.v, &m.b, &m.a, &m.g};
  for (int i = 0; i < 6; ++i) {
    if (!p.projections[i].data) continue;
    *targets[i] = {take(columns[i]), columns[i], columns[i], 1};
    in.weight[in.count] = p.projections[i], in.columns[in.count] = columns[i], in.y[in.count++] = targets[i]->data;
  }
  run_products(in, threads);
  m.y = mixed;
  run_mixer_step(m, threads);

  const auto add_product = [&](const void* x, int64_t width, Weight weight, const void* residual, void* y) {
    ProductsProblem out;
    out.dtype = m.dtype, out.rows = m.batch, out.width = width, out.x = x, out.residual = residual;
    out.count = 1, out.weight[0] = weight, out.columns[0] = p.width, out.y[0] = y;
    run_products(out, threads);
  };
  add_product(mixed, values, p.o_weight, p.x, hidden);
  if (!p.inner) return;
  norm.eps = p.mlp_eps, norm.x = hidden, norm.weight = p.mlp_norm_weight;
  run_norm_forward(norm, threads);
  ProductsProblem gated;
  gated.dtype = m.dtype, gated.rows = m.batch, gated.width = p.width, gated.x = normed, gated.gated = true;
  gated.count = 2, gated.weight[0] = p.gate_weight, gated.weight[1] = p.up_weight;
  gated.columns[0] = gated.columns[1] = p.inner, gated.y[0] = inner;
  run_products(gated, threads);
  add_product(inner, p.inner, p.down_weight, hidden, p.y);
}

void run_conv_forward(ConvProblem p, int threads) {
  check_conv(p);
  const std::vector<int64_t> offset = tile_offsets(p);
  p.tile_offset = offset.data();
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    kernels.conv_forward(*static_cast<const ConvProblem*>(problem), i);
  };
  run(&p, body, offset.back(), double(p.batch) * p.tokens * p.channels, threads);
}

void run_conv_backward(ConvProblem p, int threads) {
  check_conv(p);
  check(p.parts == conv_parts(p.cu_seqlens, p.sequences, p.tokens), "parts must be conv_parts(cu_seqlens, N, T)");
  const std::vector<int64_t> offset = tile_offsets(p);
  p.tile_offset = offset.data();
  const auto body = [](const Kernels& kernels, const void* problem, int64_t i) {
    kernels.conv_backward(*static_cast<const ConvProblem*>(problem), i);
  };
  run(&p, body, p.parts, 3.0 * p.batch * p.tokens * p.channels, threads);
}

}  // namespace efla
