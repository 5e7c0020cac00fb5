// Backward pass of one task, tile by tile in reverse.
//
// For each tile and value head: start from the state that the forward pass saved at the tile's boundary, recompute the
// recurrence (quad.h) and keep the rows u_t and the state before every block; go through the blocks in reverse
// (backward_block.h); apply the chain rule of the rule (rules.h) and of the l2-norm.
#include "backward_block.h"
#include "quad.h"

namespace efla::EFLA_ISA {
namespace {

constexpr int kBlocks = kTile / kBlock;

template <class T> struct BackwardScratch {
  KeyTile<T> keys;
  ScalarTile<T> scalars;
  BlockScratch<T> block;
  T *v, *d_o, *x;  // [64][kRow]
  T *dq, *dk;      // [64][kRow], summed over the task's value heads
  T* states;       // [4][panels][padded_K][32]: before each block
  T* spare;        // a slice of a state between the quads of the last block
  T* d_states;     // [value heads of the task][panels][padded_K][32]

  BackwardScratch(Arena& arena, const Plan& plan) {
    keys.allocate(arena);
    scalars.allocate(arena);
    block.allocate(arena);
    T** rows[] = {&v, &d_o, &x, &dq, &dk};
    for (T** a : rows) *a = arena.allocate<T>(kTile * kRow<T>);
    size_t heads = (plan.group + plan.head_parts - 1) / plan.head_parts;
    size_t panels = (plan.panels + plan.column_parts - 1) / plan.column_parts;
    size_t state = panels * plan.padded_K * kPanel;
    states = arena.allocate<T>(state * kBlocks);
    spare = arena.allocate<T>(plan.padded_K * (kSliceWidth<T> > kPanel ? kSliceWidth<T> : kPanel));
    d_states = arena.allocate<T>(state * heads * plan.task_key_heads);
  }
};

// Loads the task's columns of `count` tokens, then zero rows up to a multiple of 16.
template <class E>
inline void load_columns(const Problem& p, const Task& task, const Strided& from, int64_t first, int count,
                         int64_t head, Compute<E>* to) {
  using T = Compute<E>;
  const int begin = task.panel_begin * kPanel, padded = (task.panel_end - task.panel_begin) * kPanel;
  const int width = p.V - begin < padded ? p.V - begin : padded;
  for (int t = 0; t < count; ++t)
    load_row(at<const E>(from, task.batch, task.first_token + first + t, head) + begin, width, to + t * kRow<T>,
             padded);
  for (int t = count; t < round_up(count, kBlock); ++t) zero_row(to + t * kRow<T>, padded);
}

// The block from token t, in a slice of N vectors at column c: rows u_t and, unless `to` is null, the state after the block.
template <class T, bool erases, int N>
inline void recompute_slice(const Problem& p, const BackwardScratch<T>& s, int t, int c, const T* from, T* to,
                            int64_t panel, Prefetcher& prefetcher) {
  alignas(64) T pending[kQuad * N * kLanes<T>];
  T* between = to ? to : s.spare;
  for (int i = 0; i < kBlock; i += kQuad) {
    const int at = (t + i) * kRow<T> + c;
    const T* start = i ? between : from;
    prefetcher.step();
    read_quad<T, N, erases, false, true>(s.keys, s.scalars, t + i, kQuad, p.K, s.v + at, kRow<T>, kMaxWidth, nullptr, 0,
                                         s.x + at, start, panel, pending, SweepPrefetch{});
    if (to || i + kQuad < kBlock) write_quad<T, N>(s.keys, s.scalars, t + i, p.K, pending, start, between, panel);
  }
}

// Computes the states before every block and the rows u_t of the tile.
template <class T, bool erases>
inline void recompute(const Problem& p, const BackwardScratch<T>& s, int rows, int panels, int padded_K,
                      Prefetcher& prefetcher) {
  const int64_t panel = int64_t(padded_K) * kPanel, state_size = panel * panels;
  for (int t = 0; t < rows; t += kBlock) {
    T* before = s.states + t / kBlock * state_size;
    T* after = t + kBlock < rows ? before + state_size : nullptr;
    for_slices<T>(panels * kPanel, [&]<int N>(int c) {
      const int64_t at = c / kPanel * panel + c % kPanel;
      recompute_slice<T, erases, N>(p, s, t, c, before + at, after ? after + at : nullptr, panel, prefetcher);
    });
    for (int i = 0; after && i < panels; ++i)
      for (int j = p.K; j < padded_K; ++j) zero_row(after + i * panel + j * kPanel, kPanel);
  }
}

// Where the gradients of a call's scalars go, dense or null: log_decay, erase and write, or log_gate and beta of a rule.
struct ScalarGradients {
  void* dense[3];
};

EFLA_INLINE ScalarGradients scalar_gradients(const Problem& p) {
  if (p.rule == Rule::raw) return {{p.d_log_decay, p.d_erase, p.d_write}};
  return {{p.d_log_gate, p.d_beta, nullptr}};
}

template <class E> struct Outputs {
  using T = Compute<E>;
  const Problem& p;
  const Plan& plan;
  const Task& task;

  int64_t token(int64_t t) const { return task.batch * p.tokens + task.first_token + t; }
  bool parts() const { return plan.head_parts * plan.column_parts > 1; }

  void scalar(void* dense, int index, int64_t t, int64_t head, T value) const {
    int64_t at = token(t) * p.value_heads + head;
    if (plan.column_parts > 1) {
      int64_t count = p.batch * p.tokens * p.value_heads;
      static_cast<T*>(plan.scalar_parts)[(int64_t(task.column_part) * 3 + index) * count + at] = value;
    } else if (dense) {
      static_cast<T*>(dense)[at] = value;
    }
  }

  void key_row(void* dense, void* part_sums, int64_t t, int64_t key_head, const T* row) const {
    int64_t at = (token(t) * p.key_heads + key_head) * p.K;
    if (parts()) {
      int64_t count = p.batch * p.tokens * p.key_heads * p.K;
      store_row(static_cast<T*>(part_sums) + task.part * count + at, row, p.K);
    } else {
      store_row(static_cast<E*>(dense) + at, row, p.K);
    }
  }

  void value_row(int64_t t, int64_t head, const T* row, T factor) const {
    const int begin = task.panel_begin * kPanel, end = task.panel_end * kPanel < p.V ? task.panel_end * kPanel : p.V;
    E* to = static_cast<E*>(p.dv) + (token(t) * p.value_heads + head) * p.V;
    for (int c = begin; c < end; c += kLanes<T>) store_some(to + c, factor * load(row + c - begin), end - c);
  }
};

// Turns gradients of the coefficients into those of the inputs, and adds the block's dq and dk to the tile's.
template <class E>
inline void finish_block(const Outputs<E>& out, const BackwardScratch<Compute<E>>& s, int64_t first, int t, int count,
                         int64_t head, bool first_head) {
  using T = Compute<E>;
  const Problem& p = out.p;
  const BlockScratch<T>& b = s.block;
  const ScalarGradients to = scalar_gradients(p);
  T d_log_gate[kBlock], d_beta[kBlock];
  T g1[kBlock] = {}, r1[kBlock] = {}, g2[kBlock] = {}, r2[kBlock] = {};
  const bool raw = p.rule == Rule::raw;
  if (!raw) {
    for (int i = 0; i < kBlock; i += kLanes<T>) {
      Vec<T> d_decay = facts(p.rule).has_decay ? load(b.d_decay + i) : Vec<T>{};
      RuleGradient<T> g = rule_backward<T>(p.rule, load(s.scalars.beta + t + i), load(s.scalars.log_gate + t + i),
                                           load(s.keys.lam + t + i), d_decay, load(b.d_erase + i),
                                           load(b.d_erase_scaled + i), load(b.d_write + i));
      store(d_beta + i, g.beta);
      store(d_log_gate + i, g.log_gate);
      store(g1 + i, g.g1);
      store(r1 + i, g.r1);
      store(g2 + i, g.g2);
      store(r2 + i, g.r2);
    }
  }
  const T* scalars[] = {raw ? b.d_decay : d_log_gate, raw ? b.d_erase : d_beta, b.d_write};
  for (int n = 0; n < 3; ++n)
    for (int i = 0; i < kBlock && t + i < count; ++i) out.scalar(to.dense[n], n, first + t + i, head, scalars[n][i]);
  const int padded_K = out.plan.padded_K;
  const bool through_norm = facts(p.rule).uses_norm;
  for (int i = 0; i < kBlock && t + i < count; ++i) {
    out.value_row(first + t + i, head, b.dR + i * kRow<T>, s.scalars.write[t + i]);
    T *dq = s.dq + (t + i) * kRow<T>, *dk = s.dk + (t + i) * kRow<T>;
    const T *dq_block = b.dq + i * kRow<T>, *dk_block = b.dk + i * kRow<T>, *k = s.keys.k + (t + i) * kRow<T>;
    for (int c = 0; c < padded_K; c += kLanes<T>) {
      Vec<T> key = load(dk_block + c), query = load(dq_block + c);
      if (through_norm) key += (2 * g1[i]) * (r1[i] * load(k + c)) + (2 * g2[i]) * (r2[i] * load(k + c));
      store(dk + c, first_head ? key : load(dk + c) + key);
      store(dq + c, first_head ? query : load(dq + c) + query);
    }
  }
}

// row -> inverse * (row - unit (unit . row)): the gradient through unit = x / sqrt(x.x + 1e-6).
template <class T> inline void normalise_backward(T* row, const T* unit, T inverse, int padded) {
  T along = row_dot(row, unit, padded);
  for (int c = 0; c < padded; c += kLanes<T>) store(row + c, inverse * (load(row + c) - along * load(unit + c)));
}

// Gradients of one value head over one tile. dS is the gradient of the state after the tile; it becomes that before it.
template <class E>
inline void backward_head(const Outputs<E>& out, const BackwardScratch<Compute<E>>& s, int64_t first, int count,
                          int64_t head, bool first_head, Compute<E>* dS, Prefetcher& prefetcher, unsigned* status) {
  using T = Compute<E>;
  const Problem& p = out.p;
  const Task& task = out.task;
  const int panels = task.panel_end - task.panel_begin, padded_K = out.plan.padded_K, rows = round_up(count, kBlock);
  const size_t panel_size = size_t(padded_K) * kPanel, state_size = panel_size * panels;
  if (first) {
    int64_t boundary = (out.plan.boundary_offset[task.sequence] + first / kTile - 1) * p.value_heads + head;
    copy_vectors(
        s.states,
        static_cast<const T*>(p.boundary_states) + (boundary * out.plan.panels + task.panel_begin) * panel_size,
        state_size);
  } else {
    const T* initial = static_cast<const T*>(p.initial_state);
    if (initial) initial += (task.sequence * p.value_heads + head) * p.K * p.V;
    load_panels(initial, p.K, p.V, padded_K, task.panel_begin, task.panel_end, s.states);
  }
  load_columns<E>(p, task, p.v, first, count, head, s.v);
  load_columns<E>(p, task, p.d_o, first, count, head, s.d_o);
  load_scalars<T>(p, task, first, count, rows, head, s.keys.lam, s.scalars, status);
  prepare_quads<T>(s.keys, s.scalars, rows, T(p.scale));
  if (facts(p.rule).has_erase) {
    recompute<T, true>(p, s, rows, panels, padded_K, prefetcher);
  } else {
    recompute<T, false>(p, s, rows, panels, padded_K, prefetcher);
  }
  for (int t = rows - kBlock; t >= 0; t -= kBlock) {
    const int row = t * kRow<T>;
    const BlockInput<T> in{s.keys.k + row,
                           s.keys.q + row,
                           s.v + row,
                           s.d_o + row,
                           s.x + row,
                           s.scalars.decay + t,
                           s.scalars.erase + t,
                           s.scalars.write + t,
                           s.keys.lam + t,
                           s.states + (t / kBlock) * state_size,
                           dS,
                           padded_K,
                           panels,
                           T(p.scale),
                           facts(p.rule).has_decay,
                           &prefetcher};
    block_backward<T>(in, s.block);
    finish_block<E>(out, s, first, t, count, head, first_head);
  }
}

// What to prefetch: the rows that the next head or tile reads and writes.
template <class E>
inline Prefetcher next_rows(const Problem& p, const Task& task, int64_t key_head, int64_t head, int64_t first) {
  auto dense = [&](void* data, int64_t heads, int64_t width) {
    return Strided{data, p.tokens * heads * width, heads * width, width};
  };
  const Strided x[Prefetcher::streams] = {p.k, p.q,   dense(p.dq, p.key_heads, p.K),  dense(p.dk, p.key_heads, p.K),
                                          p.v, p.d_o, dense(p.dv, p.value_heads, p.V)};
  Prefetcher prefetcher;
  for (int i = 0; i < Prefetcher::streams; ++i) {
    const bool key = i < 4;
    prefetcher.row[i] =
        reinterpret_cast<const char*>(at<const E>(x[i], task.batch, task.first_token + first, key ? key_head : head));
    prefetcher.stride[i] = x[i].token * int64_t(sizeof(E));
    prefetcher.lines[i] = ((key ? p.K : p.V) * int(sizeof(E)) + 63) / 64;
  }
  prefetcher.rows = kTile;
  return prefetcher;
}

template <class E>
void backward_task(const Problem& p, const Plan& plan, const Task& task, void* memory, unsigned* status) {
  using T = Compute<E>;
  Arena arena{static_cast<char*>(memory)};
  BackwardScratch<T> s(arena, plan);
  const Outputs<E> out{p, plan, task};
  const int panels = task.panel_end - task.panel_begin, padded_K = plan.padded_K;
  const int num_heads = int(task.key_end - task.key_begin) * task.heads;
  const size_t state_size = size_t(padded_K) * kPanel * panels, memory_state = size_t(p.K) * p.V;
  auto key_head_of = [&](int i) { return task.key_begin + i / task.heads; };
  auto head_of = [&](int i) { return key_head_of(i) * plan.group + task.head_offset + i % task.heads; };

  for (int i = 0; i < num_heads; ++i) {
    const T* d_final = static_cast<const T*>(p.d_final_state);
    if (d_final) d_final += (task.sequence * p.value_heads + head_of(i)) * memory_state;
    load_panels(d_final, p.K, p.V, padded_K, task.panel_begin, task.panel_end, s.d_states + i * state_size);
  }
  for (int64_t first = (task.length - 1) / kTile * kTile; task.length && first >= 0; first -= kTile) {
    const int count = int(task.length - first < kTile ? task.length - first : kTile);
    for (int i = 0; i < num_heads; ++i) {
      const int64_t key_head = key_head_of(i);
      const bool first_head = i % task.heads == 0, last_head = (i + 1) % task.heads == 0, last = i + 1 == num_heads;
      Prefetcher prefetcher;
      if (!last && count == kTile) prefetcher = next_rows<E>(p, task, key_head_of(i + 1), head_of(i + 1), first);
      if (last && first) prefetcher = next_rows<E>(p, task, key_head_of(0), head_of(0), first - kTile);
      if (first_head) load_keys<E>(p, task, key_head, first, count, s.keys);
      backward_head<E>(out, s, first, count, head_of(i), first_head, s.d_states + i * state_size, prefetcher, status);
      for (int t = 0; last_head && t < count; ++t) {
        if (p.normalise_q)
          normalise_backward(s.dq + t * kRow<T>, s.keys.q + t * kRow<T>, s.keys.q_inverse[t], padded_K);
        if (p.normalise_k)
          normalise_backward(s.dk + t * kRow<T>, s.keys.k + t * kRow<T>, s.keys.k_inverse[t], padded_K);
        out.key_row(p.dq, plan.dq_parts, first + t, key_head, s.dq + t * kRow<T>);
        out.key_row(p.dk, plan.dk_parts, first + t, key_head, s.dk + t * kRow<T>);
      }
    }
  }
  if (!p.d_initial_state) return;
  for (int i = 0; i < num_heads; ++i) {
    T* to = static_cast<T*>(p.d_initial_state) + (task.sequence * p.value_heads + head_of(i)) * memory_state;
    store_panels(to, p.K, p.V, padded_K, task.panel_begin, task.panel_end, s.d_states + i * state_size);
  }
}

// Adds the parts in a fixed order, for tokens [begin, end) of B * T.
template <class E> void reduce_rows(const Problem& p, const Plan& plan, int64_t begin, int64_t end) {
  using T = Compute<E>;
  const int parts = plan.head_parts * plan.column_parts;
  const int64_t width = p.key_heads * p.K, count = p.batch * p.tokens * width;
  for (int which = 0; which < 2; ++which) {
    const T* from = static_cast<const T*>(which ? plan.dk_parts : plan.dq_parts);
    E* to = static_cast<E*>(which ? p.dk : p.dq);
    for (int64_t i = begin * width; i < end * width; i += kLanes<T>) {
      int left = end * width - i < kLanes<T> ? int(end * width - i) : kLanes<T>;
      Vec<T> total = load_some(from + i, left);
      for (int part = 1; part < parts; ++part) total += load_some(from + part * count + i, left);
      store_some(to + i, total, left);
    }
  }
  if (plan.column_parts == 1) return;
  const int64_t scalars = p.batch * p.tokens * p.value_heads;
  const ScalarGradients to = scalar_gradients(p);
  for (int index = 0; index < 3; ++index) {
    if (!to.dense[index]) continue;
    for (int64_t i = begin * p.value_heads; i < end * p.value_heads; ++i) {
      T total = 0;
      for (int part = 0; part < plan.column_parts; ++part)
        total += static_cast<const T*>(plan.scalar_parts)[(int64_t(part) * 3 + index) * scalars + i];
      static_cast<T*>(to.dense[index])[i] = total;
    }
  }
}

}  // namespace

size_t backward_scratch(const Problem& p, const Plan& plan) {
  Arena arena{nullptr};
  if (p.dtype == Dtype::float64) {
    BackwardScratch<double> s(arena, plan);
  } else {
    BackwardScratch<float> s(arena, plan);
  }
  return arena.used;
}

void backward(const Problem& p, const Plan& plan, const Task& task, void* scratch, unsigned* status) {
  with_elements(p.dtype, [&]<class E>(E) { backward_task<E>(p, plan, task, scratch, status); });
}

void reduce(const Problem& p, const Plan& plan, int64_t begin, int64_t end) {
  with_elements(p.dtype, [&]<class E>(E) { reduce_rows<E>(p, plan, begin, end); });
}

}  // namespace efla::EFLA_ISA
