// Random norms, short convolutions, gates and products at every SIMD level, in buffers exactly as large as their tensors.
//
//     efla_fuzz_rows [cases = 300] [seed = 1]        exits non-zero on a wrong result or one that was not written
//
// Outputs are compared with naive formulas, gradients between levels. tests/native/test_rows.py compares both with torch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "rows.h"
#include "runtime.h"

using namespace efla;

namespace {

std::mt19937_64 rng;
int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

using Buffer = std::vector<float>;
Buffer drawn(int64_t n) {
  Buffer b(static_cast<size_t>(n));
  for (float& x : b) x = std::normal_distribution<float>()(rng);
  return b;
}
Buffer unwritten(int64_t n) { return Buffer(static_cast<size_t>(n), NAN); }

double silu(double x) { return x / (1 + std::exp(-x)); }
double dot(const float* a, const float* b, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += double(a[i]) * b[i];
  return s;
}

// `first` holds the naive results, or those of the first level. The results of all levels must be close to them.
bool agree(const char* what, const Buffer& now, Buffer& first, const std::string& level) {
  if (first.empty()) first = now;
  for (size_t i = 0; i < now.size(); ++i) {
    if (std::fabs(now[i] - first[i]) <= 1e-4f * (1 + std::fabs(first[i]))) continue;  // false for NaN
    std::fprintf(stderr, "%s[%zu] at %s: %g, expected %g\n", what, i, level.c_str(), now[i], first[i]);
    return false;
  }
  return true;
}

bool norm_case() {
  NormProblem p;
  p.rows = pick(0, 200), p.width = int(pick(1, 90)), p.eps = 1e-6, p.factor = pick(0, 1) ? 1.0 / p.width : 1.0;
  p.parts = norm_parts(p.rows);
  const Buffer x = drawn(p.rows * p.width), dy = drawn(p.rows * p.width), weight = drawn(p.width);
  const Buffer gate = drawn(p.rows * p.width);
  const bool weighted = pick(0, 1), gated = pick(0, 1);
  Buffer first[4] = {x};
  for (int64_t i = 0; i < p.rows * p.width; ++i) {
    const float* row = &x[size_t(i / p.width * p.width)];
    first[0][i] *= float((weighted ? weight[i % p.width] : 1) / std::sqrt(p.factor * dot(row, row, p.width) + p.eps));
    if (gated) first[0][i] *= float(silu(gate[i]));
  }
  for (const std::string& level : simd_levels()) {
    set_simd(level);
    Buffer y = unwritten(p.rows * p.width), dx = unwritten(p.rows * p.width), dw = unwritten(p.parts * p.width);
    Buffer dgate = unwritten(p.rows * p.width);
    p.gate = gated ? gate.data() : nullptr, p.dgate = dgate.data();
    p.x = x.data(), p.dy = dy.data(), p.y = y.data(), p.dx = dx.data();
    p.weight = weighted ? weight.data() : nullptr, p.dweight_parts = weighted ? dw.data() : nullptr;
    run_norm_forward(p, int(pick(1, 3)));
    run_norm_backward(p, int(pick(1, 3)));
    if (!agree("y", y, first[0], level) || !agree("dx", dx, first[1], level)) return false;
    if (weighted && !agree("dweight", dw, first[2], level)) return false;
    if (gated && !agree("dgate", dgate, first[3], level)) return false;
  }
  return true;
}

bool conv_case() {
  ConvProblem p;
  const bool packed = pick(0, 1);
  p.silu = pick(0, 1), p.channels = int(pick(1, 300)), p.width = int(pick(1, 7));
  p.batch = packed ? 1 : pick(0, 3), p.tokens = pick(0, 150), p.sequences = packed ? pick(1, 5) : p.batch;
  std::vector<int64_t> boundaries(size_t(p.sequences) + 1, 0);
  for (int64_t n = 1; n <= p.sequences; ++n)
    boundaries[n] = n == p.sequences ? p.tokens : pick(boundaries[n - 1], p.tokens);
  if (packed) p.cu_seqlens = boundaries.data();
  const int64_t stride = p.channels + pick(0, 3);
  p.x_token = pick(0, 3) ? stride : -stride, p.x_batch = p.tokens * stride;
  p.parts = conv_parts(p.cu_seqlens, p.sequences, p.tokens);
  const int64_t size = p.batch * p.tokens * p.channels, held = p.sequences * (p.width - 1) * p.channels;
  const int64_t gap = stride - p.channels, rows = p.batch * p.tokens;
  const int64_t origin = p.x_token < 0 && rows ? (p.tokens - 1) * stride : 0;
  const Buffer x = drawn(rows ? rows * stride - gap : 0), dy = drawn(size), past = drawn(held);
  const Buffer weight = drawn(int64_t(p.width) * p.channels), bias = drawn(p.channels);
  const bool has_past = pick(0, 1) && p.width > 1;
  Buffer first[4] = {unwritten(size)};
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t b = packed ? 0 : n, begin = packed ? boundaries[n] : 0, end = packed ? boundaries[n + 1] : p.tokens;
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < p.channels; ++c) {
        double y = bias[c];
        for (int64_t i = 0; i < p.width; ++i) {
          const int64_t from = t - p.width + 1 + i, held_row = from - begin + p.width - 1;
          if (from >= begin) {
            y += double(weight[i * p.channels + c]) * x[origin + b * p.x_batch + from * p.x_token + c];
          } else if (has_past) {
            y += double(weight[i * p.channels + c]) * past[(n * (p.width - 1) + held_row) * p.channels + c];
          }
        }
        first[0][(b * p.tokens + t) * p.channels + c] = float(p.silu ? silu(y) : y);
      }
  }
  for (const std::string& level : simd_levels()) {
    set_simd(level);
    Buffer y = unwritten(size), dx = unwritten(size), dw = unwritten(p.parts * (p.width + 1) * p.channels);
    Buffer dpast(past.size(), 0.f);  // empty sequences do not write theirs
    p.x = x.data() + origin, p.weight = weight.data();
    p.bias = bias.data(), p.past = has_past ? past.data() : nullptr, p.dpast = has_past ? dpast.data() : nullptr;
    p.y = y.data(), p.dy = dy.data(), p.dx = dx.data(), p.dweight_parts = dw.data();
    run_conv_forward(p, int(pick(1, 3)));
    run_conv_backward(p, int(pick(1, 3)));
    if (!agree("y", y, first[0], level) || !agree("dx", dx, first[1], level)) return false;
    if (!agree("dweight", dw, first[2], level) || !agree("dpast", dpast, first[3], level)) return false;
  }
  return true;
}

// Inconsistent sizes are refused before anything is read.
bool refused_case() {
  ConvProblem p;
  p.batch = p.sequences = 2, p.tokens = 5, p.channels = 8, p.width = 4;
  std::vector<int64_t> boundaries;
  switch (pick(0, 4)) {
    case 0: p.width = pick(0, 1) ? 0 : 17; break;
    case 1: p.channels = pick(0, 1) ? 0 : -8; break;
    case 2: p.sequences = pick(0, 1) ? 3 : 1; break;
    case 3: boundaries = {0, 2, 5}; break;  // B is not 1
    default: p.batch = 1, boundaries = pick(0, 1) ? std::vector<int64_t>{0, 4, 3, 5} : std::vector<int64_t>{0, 2, 9};
  }
  if (!boundaries.empty()) p.cu_seqlens = boundaries.data(), p.sequences = int64_t(boundaries.size()) - 1;
  for (auto run : {run_conv_forward, run_conv_backward}) {
    try {
      run(p, 1);
    } catch (const std::invalid_argument&) {
      continue;
    }
    std::fprintf(stderr, "NOT REFUSED: a convolution whose sizes do not fit\n");
    return false;
  }
  return true;
}

bool gate_case() {
  GateProblem p;
  p.count = pick(0, 20000);
  const Buffer gate = drawn(p.count), up = drawn(p.count), dy = drawn(p.count);
  Buffer first[3] = {up};
  for (int64_t i = 0; i < p.count; ++i) first[0][i] *= float(silu(gate[i]));
  for (const std::string& level : simd_levels()) {
    set_simd(level);
    Buffer y = unwritten(p.count), dgate = unwritten(p.count), dup = unwritten(p.count);
    p.gate = gate.data(), p.up = up.data(), p.dy = dy.data();
    p.y = y.data(), p.dgate = dgate.data(), p.dup = dup.data();
    run_gate_forward(p, int(pick(1, 3)));
    run_gate_backward(p, int(pick(1, 3)));
    if (!agree("y", y, first[0], level) || !agree("dgate", dgate, first[1], level)) return false;
    if (!agree("dup", dup, first[2], level)) return false;
  }
  return true;
}

// Rounds weights [columns, width] to int8 with a scale for each row, in place, and returns them as the kernel takes them.
std::vector<int8_t> as_int8(Buffer& weights, int64_t width) {
  std::vector<int8_t> bytes;
  for (size_t row = 0; row < weights.size(); row += size_t(width)) {
    const float scale = float(pick(1, 9)) / 127;
    for (int64_t i = 0; i < width; ++i) {
      const float number = std::nearbyint(std::fmin(std::fmax(weights[row + i] / scale, -127.f), 127.f));
      bytes.push_back(int8_t(number)), weights[row + i] = number * scale;
    }
    const auto* scale_bytes = reinterpret_cast<const int8_t*>(&scale);
    bytes.insert(bytes.end(), scale_bytes, scale_bytes + sizeof scale);
  }
  return bytes;
}

bool products_case() {
  ProductsProblem p;
  p.rows = pick(0, 9), p.width = pick(1, 90), p.gated = pick(0, 1), p.count = p.gated ? 2 : int(pick(1, 4));
  const Buffer x = drawn(p.rows * p.width);
  Buffer weights[4], first[4];
  std::vector<int8_t> bytes[4];
  const int64_t columns = pick(1, 80);
  const bool is_int8 = pick(0, 1);
  for (int i = 0; i < p.count; ++i) {
    p.columns[i] = p.gated ? columns : pick(1, 80);
    weights[i] = drawn(p.columns[i] * p.width);
    if (is_int8) bytes[i] = as_int8(weights[i], p.width);
    first[i] = unwritten(p.rows * p.columns[i]);
    for (int64_t j = 0; j < p.rows * p.columns[i]; ++j)
      first[i][j] = float(dot(&x[j / p.columns[i] * p.width], &weights[i][j % p.columns[i] * p.width], p.width));
  }
  for (size_t j = 0; p.gated && j < first[0].size(); ++j) first[0][j] = float(silu(first[0][j]) * first[1][j]);
  for (const std::string& level : simd_levels()) {
    set_simd(level);
    Buffer y[4];
    p.x = x.data();
    for (int i = 0; i < p.count; ++i) {
      y[i] = unwritten(p.rows * p.columns[i]);
      p.weight[i] = is_int8 ? Weight{bytes[i].data(), Dtype::int8} : Weight{weights[i].data(), p.dtype};
      p.y[i] = y[i].data();
    }
    run_products(p, int(pick(1, 3)));
    for (int i = 0; i < (p.gated ? 1 : p.count); ++i)
      if (!agree("product", y[i], first[i], level)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  rng.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  for (int i = 0; i < cases; ++i)
    if (!norm_case() || !conv_case() || !gate_case() || !products_case() || !refused_case()) return 1;
  std::printf("%d norms, convolutions, gates and products at %zu SIMD levels: all agree\n", cases,
              simd_levels().size());
  return 0;
}
