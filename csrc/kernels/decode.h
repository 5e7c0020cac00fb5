// Decoding: a few tokens and no packing. The state may be updated in place.
//
//     u = write v - a erase (S^T k),   o = scale (a S^T q + (q.k) u),   S = a S + k u^T        a = exp(log_decay)
//
// Columns of S are independent. A slice (up to 128 columns, so that rows of a usual state are read as a whole) is read from
// memory once, goes through all tokens while it is in cache, and is written once. Between tokens it is stored in
// final_state, so several tokens without a final state take the general path (make_plan in plan.cpp).
#pragma once

#include "convert.h"
#include "rules.h"
#include "tokens.h"

namespace efla::EFLA_ISA {

// k, q and scalars of up to 8 slots. The slots are the tokens of one head or, for a single token, neighbouring key heads.
template <class T> struct DecodeTokens {
  alignas(64) T k[kDecodeTokens][kMaxWidth], q[kDecodeTokens][kMaxWidth];
  alignas(64) T lam[kBlock], qk[kBlock], beta[kBlock], log_gate[kBlock], decay[kBlock], erase[kBlock], write[kBlock];
};

template <class E>
EFLA_INLINE void decode_key(const Problem& p, const Task& task, int64_t t, int64_t key_head, int slot,
                            DecodeTokens<Compute<E>>& d) {
  using T = Compute<E>;
  const int padded = round_up(p.K, 16);
  T *k = d.k[slot], *q = d.q[slot];
  load_row(at<const E>(p.k, task.batch, task.first_token + t, key_head), p.K, k, padded);
  load_row(at<const E>(p.q, task.batch, task.first_token + t, key_head), p.K, q, padded);
  if (p.normalise_k) normalise_row<T>(k, padded);
  if (p.normalise_q) normalise_row<T>(q, padded);
  if (facts(p.rule).uses_norm) d.lam[slot] = row_dot<T>(k, k, padded);
  d.qk[slot] = row_dot<T>(q, k, padded);
}

// The tokens of one key head, a slot each.
template <class E>
inline void decode_keys(const Problem& p, const Task& task, int64_t key_head, DecodeTokens<Compute<E>>& d) {
  for (int t = 0; t < kBlock; ++t) d.lam[t] = 0;
  for (int t = 0; t < int(task.length); ++t) decode_key<E>(p, task, t, key_head, t, d);
}

// Vector n of a slice with `count` columns, which are all of its columns if it is `whole`.
template <bool whole, class E> EFLA_INLINE Vec<Compute<E>> load_slice(const E* p, int n, int count) {
  constexpr int lanes = kLanes<Compute<E>>;
  if constexpr (whole) return load_elements(p + n * lanes);
  return n * lanes < count ? load_some(p + n * lanes, count - n * lanes) : Vec<Compute<E>>{};
}

template <bool whole, class E> EFLA_INLINE void store_slice(E* p, int n, int count, Vec<Compute<E>> x) {
  constexpr int lanes = kLanes<Compute<E>>;
  if constexpr (whole) {
    store_elements(p + n * lanes, x);
  } else if (n * lanes < count) {
    store_some(p + n * lanes, x, count - n * lanes);
  }
}

// a * b + c, fused if the instruction set can, whatever branches are around it: the compiler fuses only what it leaves in one
// basic block. `straight`: there are none, and it needs no help.
template <bool straight, class V> EFLA_INLINE V fused(V a, V b, V c) {
  if constexpr (straight) return c + a * b;
  return rounded(c + rounded(a) * b);
}

// One token on a slice of N vectors. With `starts` there is a state `from`, which may equal `to`; `to` is null if no state is
// wanted. The rows are written in reverse: those read last are still in L1. With `next`, each row that is read or written
// prefetches half as many bytes as it has.
template <class E, int N, bool whole, bool starts>
EFLA_INLINE void decode_columns(const DecodeTokens<Compute<E>>& d, int slot, int K, int64_t V, Compute<E> scale,
                                const E* v, E* o, int count, const Compute<E>* from, Compute<E>* to, const char* next) {
  using T = Compute<E>;
  const T *k = d.k[slot], *q = d.q[slot];
  Vec<T> ks[N] = {}, qs[N] = {}, u[N];
  auto prefetch_row = [&]() __attribute__((always_inline)) {
    constexpr int half = N * sizeof(Vec<T>) / 2, bytes = half < 64 ? 64 : half;
    EFLA_UNROLL_FOR (int i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 1, 2);
    next += bytes;
  };
  for (int j = 0; starts && j < K; ++j) {
    const Vec<T> kj = splat<T>(k[j]), qj = splat<T>(q[j]);
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      const Vec<T> s = load_slice<whole>(from + j * V, n, count);
      ks[n] = fused<whole>(kj, s, ks[n]);
      qs[n] = fused<whole>(qj, s, qs[n]);
    }
    if (next) prefetch_row();
  }
  const T a = d.decay[slot], write = d.write[slot], erase = a * d.erase[slot], qk = d.qk[slot];
  EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
    u[n] = fused<false>(splat<T>(-erase), ks[n], rounded(write * load_slice<whole>(v, n, count)));
    store_slice<whole>(o, n, count, scale * fused<false>(splat<T>(qk), u[n], rounded(a * qs[n])));
  }
  for (int j = K - 1; to && j >= 0; --j) {
    const Vec<T> kj = splat<T>(k[j]);
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      Vec<T> s{};
      if constexpr (starts) s = rounded(load_slice<whole>(from + j * V, n, count) * a);
      store_slice<whole>(to + j * V, n, count, fused<whole>(kj, u[n], s));
    }
    if (next) prefetch_row();
  }
}

// The tokens of one value head, in the slots from `slot` on. `next_state` is prefetched unless it is null.
template <class E>
inline void decode_head(const Problem& p, const Task& task, const DecodeTokens<Compute<E>>& d, int64_t head,
                        int slot = 0, const Compute<E>* next_state = nullptr) {
  using T = Compute<E>;
  constexpr int lanes = kLanes<T>, wide = EFLA_WIDE_REGISTERS ? 8 : 4;
  const int K = p.K;
  const int64_t V = p.V, state = (task.sequence * p.value_heads + head) * K * V;
  const T* initial = p.initial_state ? static_cast<const T*>(p.initial_state) + state : nullptr;
  T* final_state = p.final_state ? static_cast<T*>(p.final_state) + state : nullptr;
  const int begin = task.panel_begin * kPanel, end = task.panel_end * kPanel < p.V ? task.panel_end * kPanel : p.V;
  const char* next = reinterpret_cast<const char*>(next_state);
  for (int c = begin, count; c < end; c += count) {
    const int left = end - c;
    count = left >= wide * lanes ? wide * lanes : left < 4 * lanes ? left : 4 * lanes;
    const T* from = initial ? initial + c : nullptr;
    T* to = final_state ? final_state + c : nullptr;
    for (int t = 0; t < int(task.length); ++t, from = to) {
      const E* v = at<const E>(p.v, task.batch, task.first_token + t, head) + c;
      E* o = at<E>(p.o, task.batch, task.first_token + t, head) + c;
      auto run = [&]<int N, bool whole>() __attribute__((always_inline)) {
        if (from) {
          decode_columns<E, N, whole, true>(d, slot + t, K, V, T(p.scale), v, o, count, from, to, next);
        } else {
          decode_columns<E, N, whole, false>(d, slot + t, K, V, T(p.scale), v, o, count, from, to, nullptr);
        }
      };
      if (count == wide * lanes) {
        run.template operator()<wide, true>();
      } else if (count == 4 * lanes) {
        run.template operator()<4, true>();
      } else {
        run.template operator()<4, false>();
      }
    }
    if (next) next += count * K * sizeof(T);
  }
  if (task.length == 0 && final_state && final_state != initial)
    for (int64_t j = 0; j < K; ++j)
      for (int64_t i = j * V + begin; i < j * V + end; ++i) final_state[i] = initial ? initial[i] : T(0);
}

// One token: the slots are the task's key heads, so that their scalars are computed together.
template <class E>
inline void decode_token(const Problem& p, const Plan& plan, const Task& task, DecodeTokens<Compute<E>>& d,
                         const ScalarTile<Compute<E>>& s, unsigned* status) {
  using T = Compute<E>;
  const int keys = int(task.key_end - task.key_begin);
  for (int i = 0; i < kBlock; ++i) d.lam[i] = 0;
  for (int i = 0; i < keys; ++i) decode_key<E>(p, task, 0, task.key_begin + i, i, d);
  const T* states = static_cast<const T*>(p.initial_state);
  for (int i = 0; i < task.heads; ++i) {
    const int64_t first = task.key_begin * plan.group + task.head_offset + i;
    load_scalars<T>(p, task, 0, keys, kBlock, first, d.lam, s, status, plan.group);
    for (int slot = 0; slot < keys; ++slot) {
      const int64_t head = first + slot * plan.group, next = task.sequence * p.value_heads + head + plan.group;
      const bool prefetches = plan.prefetch_states && next < p.sequences * p.value_heads;
      decode_head<E>(p, task, d, head, slot, prefetches ? states + next * p.K * p.V : nullptr);
    }
  }
}

template <class E> inline void decode_task(const Problem& p, const Plan& plan, const Task& task, unsigned* status) {
  using T = Compute<E>;
  DecodeTokens<T> d;
  ScalarTile<T> s;
  s.beta = d.beta, s.log_gate = d.log_gate, s.decay = d.decay, s.erase = d.erase, s.write = d.write;
  if (task.length == 1) return decode_token<E>(p, plan, task, d, s, status);
  for (int64_t key_head = task.key_begin; key_head < task.key_end; ++key_head) {
    decode_keys<E>(p, task, key_head, d);
    for (int i = 0; i < task.heads; ++i) {
      const int64_t head = key_head * plan.group + task.head_offset + i;
      load_scalars<T>(p, task, 0, int(task.length), kBlock, head, d.lam, s, status);
      decode_head<E>(p, task, d, head);
    }
  }
}

}  // namespace efla::EFLA_ISA
