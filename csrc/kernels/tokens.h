// Loads a tile (up to 64 tokens): q and k of a key head, converted, normalised and packed, and the scalars of a value head.
//
// The 4 tokens of a quad share one sweep over the state. Within a quad, with a_t = exp(log_decay_t),
// g_t = product of a up to t inside the quad and D_ts = product of a over s < r <= t:
//
//     u_t = write_t v_t - erase_t ( g_t k_t^T S0 + sum_{s<t} D_ts (k_t.k_s) u_s )
//     o_t = scale ( g_t q_t^T S0 + sum_{s<=t} D_ts (q_t.k_s) u_s )
//     S   = g_3 S0 + sum_s D_3s k_s u_s^T
//
// This is the chunk form with chunks of 4 tokens. Decays are products, never differences of cumulative sums.
#pragma once

#include "convert.h"
#include "rules.h"

namespace efla::EFLA_ISA {

template <class T> struct KeyTile {
  T *k, *q;                  // [64][kRow]
  T* lam;                    // [64] k.k (of the normalised k)
  T *k_inverse, *q_inverse;  // [64] 1/sqrt(k.k + 1e-6), or 1
  T *kk[kQuad], *qk[kQuad];  // [distance][64]: k_t.k_{t-d}, q_t.k_{t-d} inside a quad

  void allocate(Arena& arena) {
    k = arena.allocate<T>(kTile * kRow<T>);
    q = arena.allocate<T>(kTile * kRow<T>);
    lam = arena.allocate<T>(kTile);
    k_inverse = arena.allocate<T>(kTile);
    q_inverse = arena.allocate<T>(kTile);
    for (int d = 0; d < kQuad; ++d) {
      kk[d] = arena.allocate<T>(kTile);
      qk[d] = arena.allocate<T>(kTile);
    }
  }
};

template <class T> EFLA_INLINE T row_dot(const T* a, const T* b, int padded) {
  Vec<T> s{};
  for (int c = 0; c < padded; c += kLanes<T>) s += load(a + c) * load(b + c);
  return sum<T>(s);
}

template <class T> EFLA_INLINE T normalise_row(T* row, int padded) {
  T inverse = T(1) / __builtin_sqrt(row_dot(row, row, padded) + T(1e-6));
  for (int c = 0; c < padded; c += kLanes<T>) store(row + c, load(row + c) * inverse);
  return inverse;
}

// The 20 products inside a quad, as vectors that are not yet summed: k_i.k_j for j <= i, then q_i.k_j.
constexpr int kQuadProducts = 20;

template <class T> EFLA_INLINE void quad_products(const T* k, const T* q, int padded, Vec<T>* out) {
  Vec<T> s[kQuadProducts] = {};
  for (int c = 0; c < padded; c += kLanes<T>) {
    Vec<T> kv[kQuad];
    EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) kv[i] = load(k + i * kRow<T> + c);
    int n = 0;
    EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
      EFLA_UNROLL_FOR (int j = 0; j <= i; ++j) s[n++] += kv[i] * kv[j];
    }
    EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
      Vec<T> qv = load(q + i * kRow<T> + c);
      EFLA_UNROLL_FOR (int j = 0; j <= i; ++j) s[n++] += qv * kv[j];
    }
  }
  EFLA_UNROLL_FOR (int n = 0; n < kQuadProducts; ++n) out[n] = s[n];
}

// Products inside the four quads of a block, summed and stored as [distance][token].
template <class T> inline void block_products(const KeyTile<T>& tile, int first, int padded) {
  constexpr int total = kQuadProducts * kBlock / kQuad;
  static_assert(total % kLanes<T> == 0);
  Vec<T> partial[total];
  T result[total];
  for (int b = 0; b < kBlock / kQuad; ++b) {
    int offset = (first + b * kQuad) * kRow<T>;
    quad_products<T>(tile.k + offset, tile.q + offset, padded, partial + b * kQuadProducts);
  }
  for (int n = 0; n < total; n += kLanes<T>) {
    Vec<T> v[kLanes<T>];
    EFLA_UNROLL_FOR (int i = 0; i < kLanes<T>; ++i) v[i] = partial[n + i];
    store(result + n, sum_each<T>(v));
  }
  const T* r = result;
  for (int b = 0; b < kBlock / kQuad; ++b) {
    int t = first + b * kQuad;
    for (int i = 0; i < kQuad; ++i)
      for (int j = 0; j <= i; ++j) tile.kk[i - j][t + i] = *r++;
    for (int i = 0; i < kQuad; ++i)
      for (int j = 0; j <= i; ++j) tile.qk[i - j][t + i] = *r++;
  }
}

// Tokens [first, first + count) of the sequence; rows up to the next multiple of 16 are zero.
template <class E>
inline void load_keys(const Problem& p, const Task& task, int64_t key_head, int64_t first, int count,
                      const KeyTile<Compute<E>>& tile) {
  using T = Compute<E>;
  int padded = round_up(p.K, 16);
  int rows = round_up(count, kBlock);
  for (int t = 0; t < rows; ++t) {
    T *k = tile.k + t * kRow<T>, *q = tile.q + t * kRow<T>;
    tile.k_inverse[t] = tile.q_inverse[t] = 1;
    if (t >= count) {
      zero_row(k, padded);
      zero_row(q, padded);
      continue;
    }
    int64_t token = task.first_token + first + t;
    load_row(at<const E>(p.k, task.batch, token, key_head), p.K, k, padded);
    load_row(at<const E>(p.q, task.batch, token, key_head), p.K, q, padded);
    if (p.normalise_k) tile.k_inverse[t] = normalise_row(k, padded);
    if (p.normalise_q) tile.q_inverse[t] = normalise_row(q, padded);
  }
  for (int t = 0; t < rows; t += kBlock) block_products<T>(tile, t, padded);
  for (int t = 0; t < rows; t += kLanes<T>) store(tile.lam + t, load(tile.kk[0] + t));
}

// Scalars of one value head over the tile. Arrays have margins, so that loads may start up to 4 tokens before or after.
template <class T> struct ScalarTile {
  static constexpr int margin = 16, size = kTile + 2 * margin;
  T *beta, *log_gate;        // inputs of a rule
  T *decay, *erase, *write;  // exp(log_decay), erase, write
  T* erase_start;            // erase * g
  T* read_start;             // scale * g
  T* to_end;                 // D from the token to the end of its quad
  T* quad_decay;             // g at the token
  T *kk[kQuad], *qk[kQuad];  // erase * D * k.k and scale * D * q.k, by distance

  void allocate(Arena& arena) {
    T** all[] = {&beta, &log_gate, &decay, &erase, &write, &erase_start, &read_start, &to_end, &quad_decay};
    for (T** a : all) *a = arena.allocate<T>(size) + margin;
    for (int d = 0; d < kQuad; ++d) {
      kk[d] = arena.allocate<T>(size) + margin;
      qk[d] = arena.allocate<T>(size) + margin;
    }
  }
};

// `count` tokens of one head or, with head_step, one token of every head_step-th head.
template <class T>
EFLA_INLINE void gather_scalars(const Strided& s, const Task& task, int64_t first, int count, int64_t head,
                                int64_t head_step, T fallback, T* to) {
  const T* from = s.data ? at<const T>(s, task.batch, task.first_token + first, head) : nullptr;
  const int64_t step = head_step ? head_step * s.head : s.token;
  for (int t = 0; t < count; ++t) to[t] = from ? from[t * step] : fallback;
}

// Loads the inputs of a head and computes (decay, erase, write). Tokens from `count` to `rows` are identity steps.
template <class T>
inline void load_scalars(const Problem& p, const Task& task, int64_t first, int count, int rows, int64_t head,
                         const T* lam, const ScalarTile<T>& s, unsigned* status, int64_t head_step = 0) {
  for (int t = count; t < rows; ++t) s.beta[t] = s.log_gate[t] = s.decay[t] = s.erase[t] = s.write[t] = 0;
  if (p.rule == Rule::raw) {
    gather_scalars<T>(p.log_decay, task, first, count, head, head_step, T(0), s.decay);
    gather_scalars<T>(p.erase, task, first, count, head, head_step, T(0), s.erase);
    gather_scalars<T>(p.write, task, first, count, head, head_step, T(0), s.write);
    for (int t = 0; t < rows; t += kLanes<T>) store(s.decay + t, vexp<T>(load(s.decay + t)));
  } else {
    gather_scalars<T>(p.log_gate, task, first, count, head, head_step, T(0), s.log_gate);
    gather_scalars<T>(p.beta, task, first, count, head, head_step, T(1), s.beta);
    IntVec<T> negative{}, positive{};
    for (int t = 0; t < rows; t += kLanes<T>) {
      Vec<T> beta = load(s.beta + t), log_gate = load(s.log_gate + t);
      negative |= beta < Vec<T>{};
      positive |= log_gate > Vec<T>{};
      Coefficients<T> c = rule_forward<T>(p.rule, beta, log_gate, load(lam + t));
      store(s.decay + t, c.decay);
      store(s.erase + t, c.erase);
      store(s.write + t, c.write);
    }
    for (int i = 0; i < kLanes<T>; ++i)
      *status |= (negative[i] ? kNegativeBeta : 0) | (positive[i] ? kPositiveLogGate : 0);
  }
  for (int t = count; t < rows; ++t) {
    s.decay[t] = 1;
    s.erase[t] = s.write[t] = 0;
  }
}

// The products of decays and scalars that the quads need.
template <class T> inline void prepare_quads(const KeyTile<T>& keys, const ScalarTile<T>& s, int rows, T scale) {
  for (int i = 1; i <= kQuad; ++i) s.decay[-i] = s.decay[rows - 1 + i] = 1;
  const Vec<T> one = splat<T>(1);
  for (int t = 0; t < rows; t += kLanes<T>) {
    IntVec<T> place = (iota<T>() + t) & (kQuad - 1);
    Vec<T> a = load(s.decay + t), e = load(s.erase + t);
    Vec<T> a1 = load(s.decay + t - 1), a2 = load(s.decay + t - 2), a3 = load(s.decay + t - 3);
    Vec<T> d2 = a * a1, d3 = d2 * a2;
    Vec<T> g = place == 0 ? a : place == 1 ? d2 : place == 2 ? d3 : d3 * a3;
    Vec<T> n1 = load(s.decay + t + 1), n2 = n1 * load(s.decay + t + 2), n3 = n2 * load(s.decay + t + 3);
    store(s.to_end + t, place == 3 ? one : place == 2 ? n1 : place == 1 ? n2 : n3);
    store(s.quad_decay + t, g);
    store(s.erase_start + t, e * g);
    store(s.read_start + t, scale * g);
    store(s.kk[1] + t, (e * load(keys.kk[1] + t)) * a);
    store(s.kk[2] + t, (e * load(keys.kk[2] + t)) * d2);
    store(s.kk[3] + t, (e * load(keys.kk[3] + t)) * d3);
    store(s.qk[0] + t, scale * load(keys.qk[0] + t));
    store(s.qk[1] + t, (scale * load(keys.qk[1] + t)) * a);
    store(s.qk[2] + t, (scale * load(keys.qk[2] + t)) * d2);
    store(s.qk[3] + t, (scale * load(keys.qk[3] + t)) * d3);
  }
}

}  // namespace efla::EFLA_ISA
