// Forward pass of one task, a block of 16 tokens at a time.
//
// Keys and queries of a block are packed once for all value heads and panels of the task. Then each slice of columns of S
// goes through the block's four quads (quad.h). A slice and the packed rows fit in L1.
#include "decode.h"
#include "quad.h"

namespace efla::EFLA_ISA {
namespace {

template <class T> struct ForwardScratch {
  KeyTile<T> keys;
  ScalarTile<T> scalars;
  T* states;  // [value heads of the task][panels of the task][padded_K][32]

  ForwardScratch(Arena& arena, const Plan& plan) {
    keys.allocate(arena);
    scalars.allocate(arena);
    size_t heads = (plan.group + plan.head_parts - 1) / plan.head_parts;
    size_t panels = (plan.panels + plan.column_parts - 1) / plan.column_parts;
    states = arena.allocate<T>(plan.task_key_heads * heads * panels * plan.padded_K * kPanel);
  }
};

// One value head over one block of 16 tokens.
struct HeadBlock {
  int64_t key_head, head, first;
  int count;
};

// What to prefetch during this block's sweeps: the rows of the next one.
template <class E>
inline SweepPrefetch prefetch_next(const Problem& p, const Task& task, const HeadBlock& now, const HeadBlock& next,
                                   int slices) {
  SweepPrefetch prefetch;
  if (next.count < kBlock) return prefetch;
  auto add = [&](const Strided& x, int64_t head) {
    prefetch.row[prefetch.streams] =
        reinterpret_cast<const char*>(at<const E>(x, task.batch, task.first_token + next.first, head));
    prefetch.stride[prefetch.streams++] = x.token * int64_t(sizeof(E));
  };
  add(p.v, next.head);
  add(p.o, next.head);
  if (next.key_head != now.key_head || next.first != now.first) {
    add(p.k, next.key_head);
    add(p.q, next.key_head);
  }
  const int width = p.K > p.V ? p.K : p.V;
  prefetch.lines = ((width * int(sizeof(E)) + 63) / 64 + slices - 1) / slices;
  return prefetch;
}

// The share of the prefetching that one quad and slice do.
template <class E>
EFLA_INLINE SweepPrefetch prefetch_share(const Problem& p, const SweepPrefetch& prefetch, int t, int slice) {
  SweepPrefetch share = prefetch;
  const int offset = slice * prefetch.lines * 64;
  if (offset >= (p.K > p.V ? p.K : p.V) * int(sizeof(E))) share.lines = 0;
  EFLA_UNROLL_FOR (int i = 0; i < 4; ++i) share.row[i] += i < prefetch.streams ? t * prefetch.stride[i] + offset : 0;
  return share;
}

// One value head over one block and one slice of N vectors, which begins `column` columns after the task's first.
template <class E, bool erases, int N>
inline void run_slice(const Problem& p, const Plan& plan, const Task& task, const HeadBlock& now,
                      const SweepPrefetch& prefetch, const ForwardScratch<Compute<E>>& s, Compute<E>* S, int column) {
  using T = Compute<E>;
  constexpr int width = N * kLanes<T>;
  const int64_t panel = int64_t(plan.padded_K) * kPanel;
  const int first_column = task.panel_begin * kPanel + column, valid = p.V - first_column;
  const E* v = at<const E>(p.v, task.batch, task.first_token + now.first, now.head) + first_column;
  E* o = at<E>(p.o, task.batch, task.first_token + now.first, now.head) + first_column;
  T* slice = S + column / kPanel * panel + column % kPanel;
  alignas(64) T pending[kQuad * width];
  for (int t = 0; t < now.count; t += kQuad, v += kQuad * p.v.token, o += kQuad * p.o.token) {
    const int tokens = now.count - t;
    const SweepPrefetch share = prefetch_share<E>(p, prefetch, t, column / kSliceWidth<T>);
    if (valid >= width && tokens >= kQuad) {
      read_quad<E, N, erases, true, true>(s.keys, s.scalars, t, kQuad, p.K, v, p.v.token, valid, o, p.o.token, nullptr,
                                          slice, panel, pending, share);
    } else {
      read_quad<E, N, erases, true, false>(s.keys, s.scalars, t, tokens, p.K, v, p.v.token, valid, o, p.o.token,
                                           nullptr, slice, panel, pending, share);
    }
    write_quad<T, N>(s.keys, s.scalars, t, p.K, pending, slice, slice, panel);
  }
}

// One value head over one block, all columns of the task.
template <class E, bool erases>
inline void run_head_block(const Problem& p, const Plan& plan, const Task& task, const HeadBlock& now,
                           const HeadBlock& next, const ForwardScratch<Compute<E>>& s, Compute<E>* S) {
  using T = Compute<E>;
  const int end = task.panel_end * kPanel < p.V ? task.panel_end * kPanel : p.V;
  const int slices = (end - task.panel_begin * kPanel + kSliceWidth<T> - 1) / kSliceWidth<T>;
  const SweepPrefetch prefetch = prefetch_next<E>(p, task, now, next, slices);
  for_slices<T>(round_up(end, kSliceWidth<T> < kPanel ? kSliceWidth<T> : kPanel) - task.panel_begin * kPanel,
                [&]<int N>(int column) { run_slice<E, erases, N>(p, plan, task, now, prefetch, s, S, column); });
}

template <class E>
void forward_task(const Problem& p, const Plan& plan, const Task& task, void* memory, unsigned* status) {
  using T = Compute<E>;
  Arena arena{static_cast<char*>(memory)};
  ForwardScratch<T> s(arena, plan);
  const int panels = task.panel_end - task.panel_begin, num_heads = int(task.key_end - task.key_begin) * task.heads;
  const size_t panel_size = size_t(plan.padded_K) * kPanel, state_size = panel_size * panels;
  const size_t memory_state = size_t(p.K) * p.V;
  const bool erases = facts(p.rule).has_erase;
  auto head_block = [&](int index, int64_t first) {
    if (index == num_heads) index = 0, first += kBlock;
    const int64_t key_head = task.key_begin + index / task.heads, left = task.length - first;
    return HeadBlock{key_head, key_head * plan.group + task.head_offset + index % task.heads, first,
                     int(left < 0        ? 0
                         : left < kBlock ? left
                                         : kBlock)};
  };

  for (int i = 0; i < num_heads; ++i) {
    const T* initial = static_cast<const T*>(p.initial_state);
    if (initial) initial += (task.sequence * p.value_heads + head_block(i, 0).head) * memory_state;
    load_panels(initial, p.K, p.V, plan.padded_K, task.panel_begin, task.panel_end, s.states + i * state_size);
  }
  for (int64_t first = 0; first < task.length; first += kBlock) {
    for (int i = 0; i < num_heads; ++i) {
      const HeadBlock now = head_block(i, first), next = head_block(i + 1, first);
      T* S = s.states + i * state_size;
      if (i % task.heads == 0) load_keys<E>(p, task, now.key_head, first, now.count, s.keys);
      if (first && first % kTile == 0 && p.boundary_states) {
        int64_t boundary = (plan.boundary_offset[task.sequence] + first / kTile - 1) * p.value_heads + now.head;
        copy_vectors(static_cast<T*>(p.boundary_states) + (boundary * plan.panels + task.panel_begin) * panel_size, S,
                     state_size);
      }
      load_scalars<T>(p, task, first, now.count, kBlock, now.head, s.keys.lam, s.scalars, status);
      prepare_quads<T>(s.keys, s.scalars, kBlock, T(p.scale));
      if (erases) {
        run_head_block<E, true>(p, plan, task, now, next, s, S);
      } else {
        run_head_block<E, false>(p, plan, task, now, next, s, S);
      }
    }
  }
  if (!p.final_state) return;
  for (int i = 0; i < num_heads; ++i) {
    T* final_state =
        static_cast<T*>(p.final_state) + (task.sequence * p.value_heads + head_block(i, 0).head) * memory_state;
    store_panels(final_state, p.K, p.V, plan.padded_K, task.panel_begin, task.panel_end, s.states + i * state_size);
  }
}

}  // namespace

size_t forward_scratch(const Problem& p, const Plan& plan) {
  Arena arena{nullptr};
  if (p.dtype == Dtype::float64) {
    ForwardScratch<double> s(arena, plan);
  } else {
    ForwardScratch<float> s(arena, plan);
  }
  return arena.used;
}

void forward(const Problem& p, const Plan& plan, const Task& task, void* scratch, unsigned* status) {
  with_elements(p.dtype, [&]<class E>(E) { forward_task<E>(p, plan, task, scratch, status); });
}

void decode(const Problem& p, const Plan& plan, const Task& task, unsigned* status) {
  with_elements(p.dtype, [&]<class E>(E) { decode_task<E>(p, plan, task, status); });
}

}  // namespace efla::EFLA_ISA
