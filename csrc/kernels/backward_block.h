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
  T *k_lanes, *q_lanes;            // [K][16]; q_lanes only for log_decay's gradient
  T *kk, *qk;                      // [16][16]: k_i.k_j and q_i.k_j, row i
  T* D;                            // [16][16], zero above the diagonal
  T *P, *M;                        // [16][16]
  T* x_lanes;                      // [V][16]
  T* grad_lanes;                   // [V][32]: dO, then dR
  T* dR;                           // [16][kRow]
  T *scaled_o, *scaled_r;          // [16][kRow]: scale g dO, -erase g dR
  T* ox_rx;                        // [16][32]: row j: x_j.dO_i, then x_j.dR_i, i in the lanes
  T *W, *W_transposed, *B;         // [16][16]; the last two times key_scale
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
    k_lanes = arena.allocate<T>(wide * kBlock);
    q_lanes = arena.allocate<T>(wide * kBlock);
    T** squares[] = {&kk, &qk, &D, &P, &M, &W, &W_transposed, &B, &F};
    for (T** a : squares) *a = arena.allocate<T>(square);
    x_lanes = arena.allocate<T>(wide * kBlock);
    grad_lanes = arena.allocate<T>(wide * 2 * kBlock);
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
  const T *decay, *erase, *write;
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
  constexpr int M = kTokenRows<T>, N = kTokenVectors<T>;
  transpose(in.k, kRow<T>, s.k_lanes, kBlock, kBlock, in.padded_K);
  product<T, M, N, kRow<T>, 1>(in.k, s.k_lanes, kBlock, in.padded_K, s.kk, kBlock, kBlock, kBlock, *in.prefetcher);
  product<T, M, N, kRow<T>, 1>(in.q, s.k_lanes, kBlock, in.padded_K, s.qk, kBlock, kBlock, kBlock, *in.prefetcher);
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
      store(s.M + i * kBlock + n * kLanes<T>, lane < i ? (in.erase[i] * kk) * row[n] : Vec<T>{});
    }
  }
  for (int n = 0; n < vectors; ++n) store(s.to_end + n * kLanes<T>, row[n]);
}

// dR = M^-T (P^T dO + diag(d) K dS'), written to s.dR; and the scaled copies of dO and dR.
template <class T> inline void block_solve(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int N = 2, rows = kProductRows, lanes = kLanes<T>;
  const size_t panel_size = size_t(in.padded_K) * kPanel;
  for (int panel = 0; panel < in.panels; ++panel) {
    for (int c = 0; c < kPanel; c += N * lanes) {
      const int column = panel * kPanel + c;
      for (int r = 0; r < kBlock; r += rows) {
        Accumulators<T, rows, N> acc;
        clear<T, rows, N>(acc);
        in.prefetcher->step();
        multiply<T, rows, N, kRow<T>, 1>(in.k + r * kRow<T>, in.dS + panel * panel_size + c, kPanel, in.padded_K, acc);
        EFLA_UNROLL_FOR (int i = 0; i < rows; ++i)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[i][n] *= s.to_end[r + i];
        multiply<T, rows, N, 1, kBlock>(s.P + r * kBlock + r, in.d_o + r * kRow<T> + column, kRow<T>, kBlock - r, acc);
        EFLA_UNROLL_FOR (int i = 0; i < rows; ++i)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(s.dR + (r + i) * kRow<T> + column + n * lanes, acc[i][n]);
      }
      for (int i = kBlock - 1; i >= 0; --i) {
        const T* above = s.M + i * kBlock;
        Vec<T> r[N];
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) r[n] = load(s.dR + i * kRow<T> + column + n * lanes);
        for (int j = 0; j < i; ++j)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
            T* to = s.dR + j * kRow<T> + column + n * lanes;
            store(to, load(to) - above[j] * r[n]);
          }
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
          int at = i * kRow<T> + column + n * lanes;
          store(s.scaled_r + at, (-in.erase[i] * s.from_start[i]) * r[n]);
          store(s.scaled_o + at, (in.scale * s.from_start[i]) * load(in.d_o + at));
        }
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

// W, W^T, B + B^T, F and the part of d_erase inside the block.
template <class T> inline void block_pair_gradients(const BlockInput<T>& in, const BlockScratch<T>& s, int padded_V) {
  constexpr int vectors = kBlock / kLanes<T>;
  product<T, kProductRows, 2, kRow<T>, 1>(in.x, s.grad_lanes, 2 * kBlock, padded_V, s.ox_rx, 2 * kBlock, kBlock,
                                          2 * kBlock, *in.prefetcher);
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
  transpose(s.W, kBlock, s.W_transposed, kBlock, kBlock, kBlock);
  transpose(B_lanes, kBlock, s.B, kBlock, kBlock, kBlock);
  for (int i = 0; i < kBlock * kBlock; i += kLanes<T>) {
    store(s.B + i, load(s.B + i) + load(B_lanes + i));
    store(s.W_transposed + i, power * load(s.W_transposed + i));
  }
}

// dQ and dK with tokens in the lanes, then as rows; the rest of d_erase.
template <class T> inline void block_key_gradients(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int M = kTokenRows<T>, N = kTokenVectors<T>, lanes = kLanes<T>;
  const size_t panel_size = size_t(in.padded_K) * kPanel;
  const T unscale = T(1) / key_scale<T>(s);
  panel_product<T, kProductRows, 2>(in.S0, panel_size, in.panels, s.grad_lanes, 2 * kBlock, s.state_grads, 2 * kBlock,
                                    in.padded_K, 2 * kBlock, *in.prefetcher);
  panel_product<T, M, N>(in.dS, panel_size, in.panels, s.x_lanes, kBlock, s.end_grads, kBlock, in.padded_K, kBlock,
                         *in.prefetcher);
  for (int c = 0; c < kBlock; c += N * lanes) {
    Vec<T> read[N], erased[N], to_end[N], start[N], d_erase[N] = {}, d_scaled[N] = {};
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      start[n] = load(s.from_start + c + n * lanes);
      read[n] = in.scale * start[n];
      erased[n] = load(in.erase + c + n * lanes) * start[n];
      to_end[n] = load(s.to_end + c + n * lanes);
    }
    for (int j = 0; j < in.padded_K; j += M) {
      Accumulators<T, M, N> acc;
      clear<T, M, N>(acc);
      multiply<T, M, N, 1, kRow<T>>(in.k + j, s.W + c, kBlock, kBlock, acc);
      EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
          Vec<T> o = load(s.state_grads + (j + i) * 2 * kBlock + c + n * lanes);
          store(s.dq_lanes + (j + i) * kBlock + c + n * lanes, acc[i][n] + read[n] * o);
        }
      clear<T, M, N>(acc);
      multiply<T, M, N, 1, kRow<T>>(in.q + j, s.W_transposed + c, kBlock, kBlock, acc);
      multiply<T, M, N, 1, kRow<T>>(in.k + j, s.B + c, kBlock, kBlock, acc);
      EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
          Vec<T> r = load(s.state_grads + (j + i) * 2 * kBlock + kBlock + c + n * lanes);
          Vec<T> end = load(s.end_grads + (j + i) * kBlock + c + n * lanes);
          Vec<T> k = load(s.k_lanes + (j + i) * kBlock + c + n * lanes);
          d_erase[n] += r * k;
          d_scaled[n] += (erased[n] * k) * r;
          store(s.dk_lanes + (j + i) * kBlock + c + n * lanes, acc[i][n] * unscale + to_end[n] * end - erased[n] * r);
        }
    }
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      T* to = s.d_erase + c + n * lanes;
      store(to, load(to) - start[n] * d_erase[n]);
      store(s.erased + c + n * lanes, d_scaled[n]);
      store(s.d_erase_scaled + c + n * lanes, load(s.d_erase_scaled + c + n * lanes) - d_scaled[n]);
    }
  }
  transpose(s.dq_lanes, kBlock, s.dq, kRow<T>, in.padded_K, kBlock);
  transpose(s.dk_lanes, kBlock, s.dk, kRow<T>, in.padded_K, kBlock);
}

// dS0 = gC dS' + scaled_o^T Q + scaled_r^T K, in place.
template <class T> inline void block_state_gradient(const BlockInput<T>& in, const BlockScratch<T>& s) {
  constexpr int M = kProductRows, N = 2, lanes = kLanes<T>;
  const size_t panel_size = size_t(in.padded_K) * kPanel;
  const T g = s.from_start[kBlock - 1];
  for (int panel = 0; panel < in.panels; ++panel) {
    for (int c = 0; c < kPanel; c += N * lanes) {
      for (int j = 0; j < in.padded_K; j += M) {
        T* to = in.dS + panel * panel_size + j * kPanel + c;
        const int column = panel * kPanel + c;
        Accumulators<T, M, N> acc;
        in.prefetcher->step();
        EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[i][n] = g * load(to + i * kPanel + n * lanes);
        multiply<T, M, N, 1, kRow<T>>(in.q + j, s.scaled_o + column, kRow<T>, kBlock, acc);
        multiply<T, M, N, 1, kRow<T>>(in.k + j, s.scaled_r + column, kRow<T>, kBlock, acc);
        EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
          EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(to + i * kPanel + n * lanes, acc[i][n]);
      }
    }
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

// The whole block.
template <class T> inline void block_backward(const BlockInput<T>& in, const BlockScratch<T>& s) {
  const int padded_V = in.panels * kPanel;
  block_matrices<T>(in, s);
  block_solve<T>(in, s);
  transpose(in.x, kRow<T>, s.x_lanes, kBlock, kBlock, padded_V);
  transpose(in.d_o, kRow<T>, s.grad_lanes, 2 * kBlock, kBlock, padded_V);
  transpose(s.dR, kRow<T>, s.grad_lanes + kBlock, 2 * kBlock, kBlock, padded_V);
  row_dots<T>(s.dR, in.v, padded_V, s.d_write);
  block_pair_gradients<T>(in, s, padded_V);
  block_key_gradients<T>(in, s);
  if (in.decays) block_decay_gradient<T>(in, s);
  block_state_gradient<T>(in, s);
}

}  // namespace efla::EFLA_ISA
