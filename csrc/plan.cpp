// Splits a problem into tasks, gives each thread its scratch memory and runs the tasks.
//
// Results are bit-identical for any number of threads: the parts of the backward pass depend on the shape only, and partial
// sums are added in a fixed order.
#include "plan.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime.h"

namespace efla {
namespace {

constexpr int64_t kWantedTasks = 8;  // split heads and columns until there are this many (forward: at most)
constexpr int kMaxTaskKeyHeads = 8;  // see Plan::task_key_heads
static_assert(kMaxTaskKeyHeads <= kDecodeTokens);  // decoding has a slot for each (decode.h)
constexpr double kCachedBytes = 1 << 20;           // states of a thread that a usual L2 cache keeps from token to token
constexpr double kFlopsPerThread = 300e3;          // with less work, a second thread costs more than it saves
constexpr size_t kHugeBytes = size_t(8) << 20;     // smaller outputs keep their pages

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

size_t element_bytes(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }
size_t compute_bytes(Dtype dtype) { return dtype == Dtype::float64 ? 8 : 4; }

// Asks for huge pages for a large piece of memory that is about to be written for the first time: with small ones, faults take
// up to half of a call whose outputs have hundreds of megabytes.
void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 65536;  // no system has larger ordinary ones
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  if (memory && bytes >= kHugeBytes) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

Buffer allocate(size_t bytes) {
  Buffer memory(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
  if (!memory) throw std::bad_alloc();
  prefer_huge_pages(memory.get(), bytes);
  return memory;
}

void check(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

int64_t sequence_length(const Problem& p, int64_t n) {
  return p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens;
}

template <class T, class F> bool any_scalar(const Problem& p, const Strided& s, F is_outside) {
  for (int64_t b = 0; s.data && b < p.batch; ++b)
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t h = 0; h < p.value_heads; ++h)
        if (is_outside(static_cast<const T*>(s.data)[b * s.batch + t * s.token + h * s.head])) return true;
  return false;
}

template <class T> unsigned domain_status(const Problem& p) {
  const bool negative = any_scalar<T>(p, p.beta, [](T beta) { return beta < 0; });
  const bool positive = any_scalar<T>(p, p.log_gate, [](T log_gate) { return log_gate > 0; });
  return (negative ? kNegativeBeta : 0) | (positive ? kPositiveLogGate : 0);
}

int64_t num_boundaries(int64_t length) { return length > 0 ? (length - 1) / kTile : 0; }

struct PlanWithOffsets {
  Plan plan;
  std::vector<int64_t> offsets;
};

void make_plan(const Problem& p, bool backward, PlanWithOffsets& out) {
  Plan& plan = out.plan;
  plan.group = int(p.value_heads / p.key_heads);
  plan.panels = (p.V + kPanel - 1) / kPanel;
  plan.padded_K = (p.K + 15) / 16 * 16;
  const int64_t pairs = p.sequences * p.key_heads;
  const int64_t threads = p.threads > 1 ? p.threads : 1;
  int64_t wanted = pairs > 0 ? (kWantedTasks + pairs - 1) / pairs : 1;
  // Every part packs the keys again. Forward sums nothing over parts, so it takes as few as give each thread equal work.
  if (!backward) wanted = std::min(wanted, threads / std::gcd(pairs, threads));
  plan.head_parts = int(wanted < plan.group ? wanted : plan.group);
  const int64_t columns = (wanted + plan.head_parts - 1) / plan.head_parts;
  plan.column_parts = int(columns < plan.panels ? columns : plan.panels);
  const int64_t parts = int64_t(plan.head_parts) * plan.column_parts;

  int64_t longest = 0;
  for (int64_t n = 0; n < p.sequences && (p.cu_seqlens || n == 0); ++n) {
    const int64_t length = sequence_length(p, n);
    longest = length > longest ? length : longest;
  }
  plan.decode = !backward && longest <= (p.final_state ? kDecodeTokens : 1);
  // As many key heads per task as leave every thread a task and, in decoding, as many as every other thread.
  auto suits = [&](int key_heads) {
    const int64_t tasks = pairs * parts / key_heads;
    return key_heads <= kMaxTaskKeyHeads && p.key_heads % key_heads == 0 && tasks >= threads &&
           (!plan.decode || tasks % threads == 0);
  };
  while (suits(2 * plan.task_key_heads)) plan.task_key_heads *= 2;
  const double state_bytes = double(pairs) * plan.group * p.K * p.V * double(compute_bytes(p.dtype));
  plan.prefetch_states =
      plan.decode && p.initial_state && p.initial_state == p.final_state && state_bytes / threads > kCachedBytes;
  plan.tasks = pairs * parts / plan.task_key_heads;
  if (backward || p.boundary_states) {
    out.offsets.resize(size_t(p.sequences) + 1);
    for (int64_t n = 0; n < p.sequences; ++n)
      out.offsets[n + 1] = out.offsets[n] + num_boundaries(sequence_length(p, n));
    plan.boundary_offset = out.offsets.data();
  }
}

Task make_task(const Problem& p, const Plan& plan, int64_t index) {
  Task t;
  const int parts = plan.head_parts * plan.column_parts;
  t.part = int(index % parts);
  const int head_part = t.part / plan.column_parts;
  t.column_part = t.part % plan.column_parts;
  const int64_t ranges = p.key_heads / plan.task_key_heads, range = index / parts;  // of key heads
  t.key_begin = range % ranges * plan.task_key_heads;
  t.key_end = t.key_begin + plan.task_key_heads;
  t.sequence = range / ranges;
  t.batch = p.cu_seqlens ? 0 : t.sequence;
  t.first_token = p.cu_seqlens ? p.cu_seqlens[t.sequence] : 0;
  t.length = sequence_length(p, t.sequence);
  t.head_offset = plan.group * head_part / plan.head_parts;
  t.heads = plan.group * (head_part + 1) / plan.head_parts - t.head_offset;
  t.panel_begin = plan.panels * t.column_part / plan.column_parts;
  t.panel_end = plan.panels * (t.column_part + 1) / plan.column_parts;
  return t;
}

// Shared by the threads of one call.
struct Work {
  enum Kind { forward, decode, backward, reduce } kind;
  const Kernels& kernels;
  const Problem& p;
  const Plan& plan;
  size_t scratch_bytes;
  int64_t count;
  bool alone = false;
  char* scratch = nullptr;  // scratch_bytes for each thread
  std::atomic<int64_t> next{0};
  std::atomic<unsigned> status{0};

  Work(Kind kind, const Kernels& kernels, const Problem& p, const Plan& plan, size_t scratch_bytes, int64_t count)
      : kind(kind), kernels(kernels), p(p), plan(plan), scratch_bytes(scratch_bytes), count(count) {}
};

constexpr int64_t kReduceRows = 64;

// In decoding, each thread takes the same heads at every call, so that their states stay in its cache.
void decode_body(void* argument) {
  Work& w = *static_cast<Work*>(argument);
  unsigned status = 0;
  const TeamPlace place = w.alone ? TeamPlace{0, 1} : team_place();
  const int64_t end = w.count * (place.number + 1) / place.size;
  for (int64_t index = w.count * place.number / place.size; index < end; ++index)
    w.kernels.decode(w.p, w.plan, make_task(w.p, w.plan, index), &status);
  w.status.fetch_or(status);
}

void work_body(void* argument) {
  Work& w = *static_cast<Work*>(argument);
  int64_t index = w.next.fetch_add(1);
  if (index >= w.count) return;
  char* scratch = w.scratch + (w.alone ? 0 : team_place().number) * w.scratch_bytes;
  unsigned status = 0;
  for (; index < w.count; index = w.next.fetch_add(1)) {
    if (w.kind == Work::reduce) {
      const int64_t rows = w.p.batch * w.p.tokens, begin = index * kReduceRows;
      w.kernels.reduce(w.p, w.plan, begin, begin + kReduceRows < rows ? begin + kReduceRows : rows);
      continue;
    }
    const Task task = make_task(w.p, w.plan, index);
    if (w.kind == Work::forward) w.kernels.forward(w.p, w.plan, task, scratch, &status);
    if (w.kind == Work::backward) w.kernels.backward(w.p, w.plan, task, scratch, &status);
  }
  w.status.fetch_or(status);
}

unsigned run(Work& w, double flops) {
  int64_t threads = w.p.threads;
  const int64_t useful = int64_t(flops / kFlopsPerThread) + 1;
  if (threads > useful) threads = useful;
  if (threads > w.count) threads = w.count;
  if (!w.count) return 0;
  w.alone = threads <= 1;  // the caller may itself be one thread of a team
  // The caller allocates for all threads. Memory freed by a worker would return to the system and fault in at every call.
  w.scratch_bytes = (w.scratch_bytes + 63) / 64 * 64;
  Buffer scratch;
  if (w.scratch_bytes) scratch = allocate((w.alone ? 1 : threads) * w.scratch_bytes);
  w.scratch = static_cast<char*>(scratch.get());
  run_parallel(int(threads), w.kind == Work::decode ? decode_body : work_body, &w);
  return w.status;
}

double forward_flops(const Problem& p) { return 6.0 * p.K * p.V * double(p.value_heads) * double(p.batch * p.tokens); }

}  // namespace

void validate(const Problem& p) {
  check(p.K >= 1 && p.K <= kMaxWidth && p.V >= 1 && p.V <= kMaxWidth, "K and V must be between 1 and 256");
  check(p.batch >= 0 && p.tokens >= 0 && p.sequences >= 0, "sizes must not be negative");
  check(p.key_heads >= 1 && p.value_heads >= 1 && p.value_heads % p.key_heads == 0,
        "the number of value heads must be a positive multiple of the number of key heads");
  check(int(p.dtype) >= 0 && int(p.dtype) <= 3, "unknown dtype code");
  check(int(p.rule) >= -1 && int(p.rule) < kRuleCount, "unknown rule id");
  if (!p.cu_seqlens) {
    check(p.sequences == p.batch, "without cu_seqlens there is one sequence per batch entry");
    return;
  }
  check(p.batch == 1, "with cu_seqlens the batch size must be 1");
  check(p.cu_seqlens[0] == 0 && p.cu_seqlens[p.sequences] == p.tokens, "cu_seqlens must start at 0 and end at T");
  for (int64_t n = 0; n < p.sequences; ++n)
    check(p.cu_seqlens[n] <= p.cu_seqlens[n + 1], "cu_seqlens must not decrease");
}

int64_t boundary_size(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t value_heads, int K, int V) {
  int64_t total = 0;
  if (cu_seqlens) {
    for (int64_t n = 0; n < sequences; ++n) total += num_boundaries(cu_seqlens[n + 1] - cu_seqlens[n]);
  } else {
    total = sequences * num_boundaries(tokens);
  }
  return total * value_heads * ((K + 15) / 16 * 16) * ((V + kPanel - 1) / kPanel * kPanel);
}

unsigned run_forward(const Problem& p) {
  validate(p);
  if (p.check_domain && p.final_state && p.final_state == p.initial_state && p.rule != Rule::raw) {
    const unsigned status = p.dtype == Dtype::float64 ? domain_status<double>(p) : domain_status<float>(p);
    if (status) return status;
  }
  PlanWithOffsets planned;
  make_plan(p, false, planned);
  const Plan& plan = planned.plan;
  const size_t rows = size_t(p.batch) * p.tokens;
  prefer_huge_pages(p.o.data, rows * p.value_heads * p.V * element_bytes(p.dtype));
  if (p.boundary_states)
    prefer_huge_pages(
        p.boundary_states,
        size_t(boundary_size(p.cu_seqlens, p.sequences, p.tokens, p.value_heads, p.K, p.V)) * compute_bytes(p.dtype));
  const Kernels& kernels = active_kernels();
  const size_t scratch = plan.decode ? 0 : kernels.forward_scratch(p, plan);
  Work work(plan.decode ? Work::decode : Work::forward, kernels, p, plan, scratch, plan.tasks);
  return run(work, forward_flops(p));
}

unsigned run_backward(const Problem& p) {
  validate(p);
  PlanWithOffsets planned;
  make_plan(p, true, planned);
  Plan& plan = planned.plan;
  const Kernels& kernels = active_kernels();
  const size_t element = compute_bytes(p.dtype);
  const int parts = plan.head_parts * plan.column_parts;
  const size_t tokens = size_t(p.batch) * p.tokens;
  for (void* keys : {p.dq, p.dk}) prefer_huge_pages(keys, tokens * p.key_heads * p.K * element_bytes(p.dtype));
  prefer_huge_pages(p.dv, tokens * p.value_heads * p.V * element_bytes(p.dtype));
  Buffer dq_parts, dk_parts, scalar_parts;
  if (parts > 1) {
    dq_parts = allocate(parts * tokens * p.key_heads * p.K * element);
    dk_parts = allocate(parts * tokens * p.key_heads * p.K * element);
    plan.dq_parts = dq_parts.get();
    plan.dk_parts = dk_parts.get();
  }
  if (plan.column_parts > 1) {
    scalar_parts = allocate(size_t(plan.column_parts) * 3 * tokens * p.value_heads * element);
    plan.scalar_parts = scalar_parts.get();
  }
  Work work(Work::backward, kernels, p, plan, kernels.backward_scratch(p, plan), plan.tasks);
  const unsigned status = run(work, 3 * forward_flops(p));
  if (parts > 1) {
    Work sums(Work::reduce, kernels, p, plan, 0, (int64_t(tokens) + kReduceRows - 1) / kReduceRows);
    run(sums, 1.0 * tokens * p.key_heads * p.K * parts);
  }
  return status;
}

}  // namespace efla
