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

template <class T> struct DecodeTokens {
  alignas(64) T k[kDecodeTokens][kMaxWidth], q[kDecodeTokens][kMaxWidth];
  alignas(64) T lam[kBlock], qk[kBlock], beta[kBlock], log_gate[kBlock], decay[kBlock], erase[kBlock], write[kBlock];
};

template <class E>
inline void decode_keys(const Problem& p, const Task& task, int64_t key_head, DecodeTokens<Compute<E>>& d) {
  using T = Compute<E>;
  int padded = round_up(p.K, 16);
  for (int t = 0; t < kBlock; ++t) d.lam[t] = 0;
  for (int t = 0; t < int(task.length); ++t) {
    load_row(at<const E>(p.k, task.batch, task.first_token + t, key_head), p.K, d.k[t], padded);
    load_row(at<const E>(p.q, task.batch, task.first_token + t, key_head), p.K, d.q[t], padded);
    if (p.normalise_k) normalise_row<T>(d.k[t], padded);
    if (p.normalise_q) normalise_row<T>(d.q[t], padded);
    if (facts(p.rule).uses_norm) d.lam[t] = row_dot<T>(d.k[t], d.k[t], padded);
    d.qk[t] = row_dot<T>(d.q[t], d.k[t], padded);
  }
}

// One token on a slice of N vectors. `from` may be null (zero state) and may equal `to`, which is null if no state is wanted.
template <class E, int N>
EFLA_INLINE void decode_columns(const Problem& p, const DecodeTokens<Compute<E>>& d, int t, const E* v, E* o, int count,
                                const Compute<E>* from, Compute<E>* to) {
  using T = Compute<E>;
  constexpr int lanes = kLanes<T>;
  const T *k = d.k[t], *q = d.q[t];
  const bool whole = count >= N * lanes;
  Vec<T> ks[N] = {}, qs[N] = {}, u[N];
  if (from && whole) {
    for (int j = 0; j < p.K; ++j) {
      Vec<T> kj = splat<T>(k[j]), qj = splat<T>(q[j]);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
        Vec<T> s = load(from + int64_t(j) * p.V + n * lanes);
        ks[n] += kj * s;
        qs[n] += qj * s;
      }
    }
  } else if (from) {
    for (int j = 0; j < p.K; ++j)
      for (int n = 0; n < N && count > n * lanes; ++n) {
        Vec<T> s = load_some(from + int64_t(j) * p.V + n * lanes, count - n * lanes);
        ks[n] += k[j] * s;
        qs[n] += q[j] * s;
      }
  }
  const T a = d.decay[t], scale = T(p.scale);
  EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
    int left = count - n * lanes;
    Vec<T> value = left > 0 ? load_some(v + n * lanes, left) : Vec<T>{};
    u[n] = d.write[t] * value - (a * d.erase[t]) * ks[n];
    Vec<T> out = scale * (a * qs[n] + d.qk[t] * u[n]);
    if (left > 0) store_some(o + n * lanes, out, left);
  }
  if (!to) return;
  for (int j = 0; j < p.K; ++j) {
    Vec<T> kj = splat<T>(k[j]);
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      int left = count - n * lanes;
      int64_t offset = int64_t(j) * p.V + n * lanes;
      if (whole) {
        Vec<T> s = from ? load(from + offset) * a : Vec<T>{};
        store(to + offset, s + kj * u[n]);
      } else if (left > 0) {
        Vec<T> s = from ? load_some(from + offset, left) * a : Vec<T>{};
        store_some(to + offset, s + kj * u[n], left);
      }
    }
  }
}

template <class E>
inline void decode_head(const Problem& p, const Task& task, const DecodeTokens<Compute<E>>& d, int64_t head) {
  using T = Compute<E>;
  constexpr int lanes = kLanes<T>, wide = EFLA_WIDE_REGISTERS ? 8 : 4;
  const int64_t state = (task.sequence * p.value_heads + head) * int64_t(p.K) * p.V;
  const T* initial = p.initial_state ? static_cast<const T*>(p.initial_state) + state : nullptr;
  T* final_state = p.final_state ? static_cast<T*>(p.final_state) + state : nullptr;
  const int begin = task.panel_begin * kPanel, end = task.panel_end * kPanel < p.V ? task.panel_end * kPanel : p.V;
  for (int c = begin, count; c < end; c += count) {
    const int left = end - c;
    count = left >= wide * lanes ? wide * lanes : left < 4 * lanes ? left : 4 * lanes;
    const T* from = initial ? initial + c : nullptr;
    T* to = final_state ? final_state + c : nullptr;
    for (int t = 0; t < int(task.length); ++t, from = to) {
      const E* v = at<const E>(p.v, task.batch, task.first_token + t, head) + c;
      E* o = at<E>(p.o, task.batch, task.first_token + t, head) + c;
      if (count == wide * lanes) {
        decode_columns<E, wide>(p, d, t, v, o, count, from, to);
      } else {
        decode_columns<E, 4>(p, d, t, v, o, count, from, to);
      }
    }
  }
  if (task.length == 0 && final_state && final_state != initial)
    for (int64_t j = 0; j < p.K; ++j)
      for (int64_t i = j * p.V + begin; i < j * p.V + end; ++i) final_state[i] = initial ? initial[i] : T(0);
}

template <class E> inline void decode_task(const Problem& p, const Plan& plan, const Task& task, unsigned* status) {
  using T = Compute<E>;
  DecodeTokens<T> d;
  ScalarTile<T> s;
  s.beta = d.beta, s.log_gate = d.log_gate, s.decay = d.decay, s.erase = d.erase, s.write = d.write;
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
