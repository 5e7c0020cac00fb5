// Gradients of one block of 16 tokens in chunk form, from the state S0 before it, dS' after it, and X (the rows u_t).
//
//     D_ij = product of decays over j < t <= i,  g_i = D from the start,  d_i = D to the end,  gC = g of the whole block
//     P    = scale Q K^T . D . Tril                 M = I + StrictTril(diag(erase) K K^T . D)
//     dX   = P^T dO + diag(d) K dS'                 dR = M^-T dX  (back substitution)
//     dS0  = gC dS' + (scale g Q)^T dO - (erase g K)^T dR
//     dV   = write dR,  d_write_i = dR_i . v_i
//     dQ   = scale g dO S0^T + W K                  W = scale (dO X^T) . D . Tril
//     dK   = d X dS'^T - erase g dR S0^T + W^T Q + (B + B^T) K      B_ij = -erase_i D_ij dR_i.x_j, j < i
//     d_erase_i = - sum_{j<i} D_ij (k_i.k_j)(dR_i.x_j) - g_i (k_i^T S0).dR_i
//     d_log_decay_t = sum over every D_ij, g_i, d_j, gC that contains t of (that decay) x (its gradient)
//
// The sum for d_log_decay has no cancelling terms, unlike <dS_t, S_t> + dO_t.o_t - write_t d_write_t, so it is accurate
// where a strong decay makes the gradient tiny.
//
// Tokens are rows (stride kRow) or lanes (16 of them). Products that contract over V broadcast S and keep the tokens in the
// lanes, so S is never transposed.
#pragma once

#include "gemm.h"
#include "tokens.h"

namespace efla::EFLA_ISA {

template <class T> struct BlockScratch {
  T *k_terms, *k_lanes, *q_lanes;  // [K][16], the first as multiply takes it; q_lanes only for log_decay's gradient
  T *kk, *qk;                      // [16][16]: k_i.k_j and q_i.k_j, row i
  T* D;                            // [16][16], zero above the diagonal
  T *P, *minus_M;                  // [16][16]; the second without its diagonal
  T* x_terms;                      // [V][16]
  T* grad_terms;                   // [V][32]: dO, then dR
  T* dR;                           // [16][kRow]
  T *scaled_o, *scaled_r;          // [16][kRow]: scale g dO, -erase g dR
  T* ox_rx;                        // [16][32]: row j: x_j.dO_i, then x_j.dR_i, i in the lanes
  T *W, *B;                        // [16][16]: row j: W_ij, i in the lanes; B + B^T times key_scale
  T* F;                            // [16][16]: row j: B_ij k_i.k_j, i in the lanes
  T* state_grads;                  // [K][32]: dO S0^T, then dR S0^T, tokens in the lanes
  T* end_grads;                    // [K][16]: X dS'^T
  T *dq_lanes, *dk_lanes;          // [K][16]
  T *dq, *dk;                      // [16][kRow]: gradients of the block
  T *from_start, *to_end;          // [16]: g, d
  T *d_decay, *d_erase, *d_write;  // [16]: gradients of log_decay, erase, write
  T *erased, *d_erase_scaled;      // [16]: erase g (k^T S0).dR, and erase * d_erase, finite where d_erase overflows

  void allocate(Arena& arena) {
    constexpr size_t square = kBlock * kBlock, rows = kBlock * kRow<T>, wide = kMaxWidth;
    k_lanes = k_terms = arena.allocate<T>(wide * kBlock);
    if (kTerms<T> > 1) k_lanes = arena.allocate<T>(wide * kBlock);
    q_lanes = arena.allocate<T>(wide * kBlock);
    T** squares[] = {&kk, &qk, &D, &P, &minus_M, &W, &B, &F};
    for (T** a : squares) *a = arena.allocate<T>(square);
    x_terms = arena.allocate<T>(wide * kBlock);
    grad_terms = arena.allocate<T>(wide * 2 * kBlock);
    T** row_blocks[] = {&dR, &scaled_o, &scaled_r, &dq, &dk};
    for (T** a : row_blocks) *a = arena.allocate<T>(rows);
    ox_rx = arena.allocate<T>(2 * square);
    state_grads = arena.allocate<T>(wide * 2 * kBlock);
    end_grads = arena.allocate<T>(wide * kBlock);
    dq_lanes = arena.allocate<T>(wide * kBlock);
    dk_lanes = arena.allocate<T>(wide * kBlock);
    T** vectors[] = {&from_start, &to_end, &d_decay, &d_erase, &d_write, &erased, &d_erase_scaled};
    for (T** a : vectors) *a = arena.allocate<T>(kBlock);
  }
};

// Inputs of a block: rows of stride kRow, scalars of its 16 tokens, states in panels.
template <class T> struct BlockInput {
  const T *k, *q, *v, *d_o, *x;
  const T *decay, *erase, *write, *lam;
  const T* S0;
  T* dS;  // in: dS', out: dS0
  int padded_K, panels;
  T scale;
  bool decays;
  Prefetcher* prefetcher;
};

template <class T> EFLA_INLINE Vec<T> token_lanes(const T* p, int n) { return load(p + n * kLanes<T>); }

// Decay products, k.k, q.k, P and M.
template <class T> inline void block_matrices(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int vectors = kBlock / kLanes<T>;
  constexpr int terms = kTerms<T>;
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  tokens_in_lanes(in.k, s.k_terms, terms * kBlock, in.padded_K);
  for (int j = 0; terms == 2 && j < in.padded_K * kBlock; j += 2 * kLanes<T>) {
    const Vec<T> a = load(s.k_terms + j), b = load(s.k_terms + j + kLanes<T>);
    store(s.k_lanes + j, even_of<T>(a, b, lanes));
    store(s.k_lanes + j + kLanes<T>, odd_of<T>(a, b, lanes));
  }
  token_product<T, kBlock>(in.k, s.k_terms, in.padded_K, s.kk, *in.prefetcher);
  token_product<T, kBlock>(in.q, s.k_terms, in.padded_K, s.qk, *in.prefetcher);
  Vec<T> row[vectors] = {};
  T g = 1;
  for (int i = 0; i < kBlock; ++i) {
    g *= in.decay[i];
    s.from_start[i] = g;
    for (int n = 0; n < vectors; ++n) {
      IntVec<T> lane = iota<T>() + n * kLanes<T>;
      row[n] = lane == i ? splat<T>(1) : row[n] * in.decay[i];
      store(s.D + i * kBlock + n * kLanes<T>, row[n]);
      Vec<T> kk = token_lanes(s.kk + i * kBlock, n), qk = token_lanes(s.qk + i * kBlock, n);
      store(s.P + i * kBlock + n * kLanes<T>, lane <= i ? (in.scale * qk) * row[n] : Vec<T>{});
      store(s.minus_M + i * kBlock + n * kLanes<T>, lane < i ? (-in.erase[i] * kk) * row[n] : Vec<T>{});
    }
  }
  for (int n = 0; n < vectors; ++n) store(s.to_end + n * kLanes<T>, row[n]);
}

// dR = M^-T (P^T dO + diag(d) K dS') in a slice of N vectors at column c, and the scaled copies of dO and dR. A tile of
// tokens takes the tokens after it as a product, then solves its own triangle in registers.
template <class T, int N>
EFLA_INLINE void solve_slice(const BlockInput<T>& in, const BlockScratch<T>& s, int c, Prefetcher& prefetcher) {
  constexpr int M = kTileRows<N>, lanes = kLanes<T>;
  const int64_t panel = int64_t(in.padded_K) * kPanel;
  for (int r = kBlock - M; r >= 0; r -= M) {
    Accumulators<T, M, N> acc;
    clear<T, M, N>(acc);
    prefetcher.step();
    multiply<T, M, N, kRow<T>, 1>(in.k + r * kRow<T>, in.dS + c / kPanel * panel + c % kPanel, kPanel, in.padded_K, acc,
                                  panel);
    EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[i][n] *= s.to_end[r + i];
    multiply<T, M, N, 1, kBlock>(s.P + r * kBlock + r, in.d_o + r * kRow<T> + c, kRow<T>, kBlock - r, acc);
    const int after = r + M;
    multiply<T, M, N, 1, kBlock>(s.minus_M + after * kBlock + r, s.dR + after * kRow<T> + c, kRow<T>, kBlock - after,
                                 acc);
    EFLA_UNROLL_FOR (int i = M - 1; i >= 0; --i) {
      const T erased = -in.erase[r + i] * s.from_start[r + i], read = in.scale * s.from_start[r + i];
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
        const int at = (r + i) * kRow<T> + c + n * lanes;
        EFLA_UNROLL_FOR (int j = 0; j < i; ++j) acc[j][n] += s.minus_M[(r + i) * kBlock + r + j] * acc[i][n];
        store(s.dR + at, acc[i][n]);
        store(s.scaled_r + at, erased * acc[i][n]);
        store(s.scaled_o + at, read * load(in.d_o + at));
      }
    }
  }
}

// A power of two near the norm of the block's longest key, at least 1. With keys of 1e18, erase is 1e-36 and B leaves the
// range of float32 although B K does not. B is stored multiplied by this power, which is exact.
template <class T> inline T key_scale(const BlockScratch<T>& s) {
  T longest = 1;
  for (int i = 0; i < kBlock; ++i) longest = s.kk[i * kBlock + i] > longest ? s.kk[i * kBlock + i] : longest;
  T power = 1;
  for (; power < T(0x1p56) && power * power * 65536 <= longest; power *= 256) {
  }  // longest may be infinite
  return power;
}

// W, B + B^T, F and the part of d_erase inside the block.
template <class T> inline void block_pair_gradients(const BlockInput<T>& in, const BlockScratch<T>& s, int padded_V) {
  constexpr int vectors = kBlock / kLanes<T>;
  token_product<T, 2 * kBlock>(in.x, s.grad_terms, padded_V, s.ox_rx, *in.prefetcher);
  T D_lanes[kBlock * kBlock], B_lanes[kBlock * kBlock];
  const T power = key_scale<T>(s);
  transpose(s.D, kBlock, D_lanes, kBlock, kBlock, kBlock);
  for (int n = 0; n < vectors; ++n) {
    IntVec<T> lane = iota<T>() + n * kLanes<T>;
    Vec<T> d_erase{}, d_scaled{}, erase = token_lanes(in.erase, n);
    for (int j = 0; j < kBlock; ++j) {  // lanes i >= j: D_ij, x_j.dO_i, x_j.dR_i
      Vec<T> D = token_lanes(D_lanes + j * kBlock, n);
      Vec<T> ox = token_lanes(s.ox_rx + j * 2 * kBlock, n), rx = token_lanes(s.ox_rx + j * 2 * kBlock + kBlock, n);
      store(s.W + j * kBlock + n * kLanes<T>, lane >= j ? (in.scale * ox) * D : Vec<T>{});
      Vec<T> rxD = lane > j ? rx * D : Vec<T>{};
      Vec<T> kk = lane > j ? token_lanes(s.kk + j * kBlock, n) : Vec<T>{};  // symmetric, so row j is column j
      d_erase -= rxD * kk;
      d_scaled -= (erase * kk) * rxD;
      store(s.F + j * kBlock + n * kLanes<T>, -((erase * kk) * rxD));
      store(B_lanes + j * kBlock + n * kLanes<T>, -((erase * power) * rxD));
    }
    store(s.d_erase + n * kLanes<T>, d_erase);
    store(s.d_erase_scaled + n * kLanes<T>, d_scaled);
  }
  transpose(B_lanes, kBlock, s.B, kBlock, kBlock, kBlock);
  for (int i = 0; i < kBlock * kBlock; i += kLanes<T>) store(s.B + i, load(s.B + i) + load(B_lanes + i));
}

// What the states add to dQ and dK, with the tokens in the lanes and then as rows; the rest of d_erase.
template <class T> inline void block_state_products(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int lanes = kLanes<T>;
  panel_product<T, 2 * kBlock>(in.S0, in.panels, s.grad_terms, s.state_grads, in.padded_K, *in.prefetcher);
  panel_product<T, kBlock>(in.dS, in.panels, s.x_terms, s.end_grads, in.padded_K, *in.prefetcher);
  for (int c = 0; c < kBlock; c += lanes) {
    const Vec<T> start = load(s.from_start + c), to_end = load(s.to_end + c);
    const Vec<T> read = in.scale * start, erased = load(in.erase + c) * start;
    Vec<T> d_erase{}, d_scaled{};
    for (int j = 0; j < in.padded_K; ++j) {
      const Vec<T> o = load(s.state_grads + j * 2 * kBlock + c), r = load(s.state_grads + j * 2 * kBlock + kBlock + c);
      const Vec<T> k = load(s.k_lanes + j * kBlock + c);
      d_erase += r * k;
      d_scaled += (erased * k) * r;
      store(s.dq_lanes + j * kBlock + c, read * o);
      store(s.dk_lanes + j * kBlock + c, to_end * load(s.end_grads + j * kBlock + c) - erased * r);
    }
    store(s.d_erase + c, load(s.d_erase + c) - start * d_erase);
    store(s.erased + c, d_scaled);
    store(s.d_erase_scaled + c, load(s.d_erase_scaled + c) - d_scaled);
  }
  transpose(s.dq_lanes, kBlock, s.dq, kRow<T>, in.padded_K, kBlock);
  transpose(s.dk_lanes, kBlock, s.dk, kRow<T>, in.padded_K, kBlock);
}

// What the block's own tokens add: dQ += W K, dK += W^T Q + (B + B^T) K. W is triangular.
template <class T> inline void block_key_gradients(const BlockInput<T>& in, const BlockScratch<T>& s) {
  const T unscale = T(1) / key_scale<T>(s);
  for_slices<T>(in.padded_K, [&]<int N>(int c) {
    constexpr int M = kTileRows<N>;
    for (int r = 0; r < kBlock; r += M) {
      Accumulators<T, M, N> acc;
      auto add = [&](T* rows) __attribute__((always_inline)) {
        EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
            T* to = rows + (r + i) * kRow<T> + c + n * kLanes<T>;
            store(to, load(to) + acc[i][n]);
          }
      };
      clear<T, M, N>(acc);
      multiply<T, M, N, 1, kBlock>(s.W + r, in.k + c, kRow<T>, r + M, acc);
      add(s.dq);
      clear<T, M, N>(acc);
      multiply<T, M, N, 1, kBlock>(s.B + r, in.k + c, kRow<T>, kBlock, acc);
      EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[i][n] *= unscale;
      multiply<T, M, N, kBlock, 1>(s.W + r * kBlock + r, in.q + r * kRow<T> + c, kRow<T>, kBlock - r, acc);
      add(s.dk);
    }
  });
}

// dS0 = gC dS' + scaled_o^T Q + scaled_r^T K, in place, in a slice of N vectors at column c.
template <class T, int N>
EFLA_INLINE void state_gradient_slice(const BlockInput<T>& in, const BlockScratch<T>& s, int c,
                                      Prefetcher& prefetcher) {
  constexpr int M = kTileRows<N>;
  const int64_t panel = int64_t(in.padded_K) * kPanel;
  const T g = s.from_start[kBlock - 1];
  for (int j = 0; j < in.padded_K; j += M) {
    T* to = in.dS + c / kPanel * panel + c % kPanel + j * kPanel;
    Accumulators<T, M, N> acc;
    prefetcher.step();
    EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[i][n] = g * load(to + i * kPanel + slice_offset<T>(n, panel));
    multiply<T, M, N, 1, kRow<T>>(in.q + j, s.scaled_o + c, kRow<T>, kBlock, acc);
    multiply<T, M, N, 1, kRow<T>>(in.k + j, s.scaled_r + c, kRow<T>, kBlock, acc);
    EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(to + i * kPanel + slice_offset<T>(n, panel), acc[i][n]);
  }
}

// d_log_decay, before dS' is overwritten. W_ij q_i.k_j + B_ij k_i.k_j is D_ij times its gradient; token t is in the
// D_ij with j < t <= i.
template <class T> inline void block_decay_gradient(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int lanes = kLanes<T>, vectors = kBlock / lanes;
  T qk_lanes[kBlock * kBlock], start[kBlock], end[kBlock], across[kBlock];
  Vec<T> rectangle[kBlock] = {};  // row t: sum_{j<t} F_ij in the lanes i >= t, summed over the vectors of lanes
  transpose(s.qk, kBlock, qk_lanes, kBlock, kBlock, kBlock);
  transpose(in.q, kRow<T>, s.q_lanes, kBlock, kBlock, in.padded_K);
  for (int n = 0; n < vectors; ++n) {
    const IntVec<T> lane = iota<T>() + n * lanes;
    Vec<T> read{}, kept{}, below{};
    for (int j = 0; j < in.padded_K; ++j) {
      const T* grads = s.state_grads + j * 2 * kBlock;
      Vec<T> k = token_lanes(s.k_lanes + j * kBlock, n);
      read += token_lanes(s.q_lanes + j * kBlock, n) * token_lanes(grads, n);
      kept += k * token_lanes(s.end_grads + j * kBlock, n);
    }
    Vec<T> g = token_lanes(s.from_start, n);
    store(start + n * lanes, (in.scale * g) * read - token_lanes(s.erased, n));
    store(end + n * lanes, token_lanes(s.to_end, n) * kept);
    for (int j = 0; j < kBlock; ++j) {
      rectangle[j] += lane >= j ? below : Vec<T>{};
      Vec<T> F =
          token_lanes(s.W + j * kBlock, n) * token_lanes(qk_lanes + j * kBlock, n) + token_lanes(s.F + j * kBlock, n);
      below += lane > j ? F : Vec<T>{};
    }
  }
  for (int t = 0; t < kBlock; t += lanes) {
    Vec<T> v[lanes];
    EFLA_UNROLL_FOR (int i = 0; i < lanes; ++i) v[i] = rectangle[t + i];
    store(across + t, sum_each<T>(v));
  }
  const size_t state_size = size_t(in.padded_K) * kPanel * in.panels;
  T whole = s.from_start[kBlock - 1] * long_dot(in.dS, in.S0, state_size), later = 0, earlier = 0;
  for (int t = kBlock - 1; t >= 0; --t) s.d_decay[t] = across[t] + (later += start[t]);
  for (int t = 0; t < kBlock; ++t) {
    s.d_decay[t] += earlier + whole;
    earlier += end[t];
  }
}

// Whether the block's scalars are far from denormal numbers themselves, so that only products of decays lead there.
template <class T> inline bool has_usual_scalars(const BlockInput<T>& in) {
  const auto is_usual = [](T x) { return x == 0 || (x > T(0x1p-24) && x < T(0x1p24)); };
  for (int i = 0; i < kBlock; ++i)
    if (!is_usual(in.erase[i]) || !is_usual(in.write[i]) || !is_usual(in.lam[i])) return false;
  return true;
}

// The whole block.
template <class T> inline void block_backward(const BlockInput<T>& in, const BlockScratch<T>& s) {
  const int padded_V = in.panels * kPanel, terms = kTerms<T>;
  const bool strong = in.decays && may_flush(in.decay, kBlock);
  const FlushDenormals flush_all(strong && has_usual_scalars(in));
  block_matrices<T>(in, s);
  {
    const FlushDenormals flush(strong);
    for_slices<T>(padded_V, [&]<int N>(int c) { solve_slice<T, N>(in, s, c, *in.prefetcher); });
  }
  tokens_in_lanes(in.x, s.x_terms, terms * kBlock, padded_V);
  tokens_in_lanes(in.d_o, s.grad_terms, terms * 2 * kBlock, padded_V);
  tokens_in_lanes(s.dR, s.grad_terms + terms * kBlock, terms * 2 * kBlock, padded_V);
  row_dots<T>(s.dR, in.v, padded_V, s.d_write);
  block_pair_gradients<T>(in, s, padded_V);
  block_state_products<T>(in, s);
  {
    const FlushDenormals flush(strong);
    block_key_gradients<T>(in, s);
  }
  if (in.decays) block_decay_gradient<T>(in, s);
  const FlushDenormals flush(strong);
  for_slices<T>(padded_V, [&]<int N>(int c) { state_gradient_slice<T, N>(in, s, c, *in.prefetcher); });
}

}  // namespace efla::EFLA_ISA
