// The inner loops of every scan: 4 tokens (a quad) and one slice of columns of S. Compiled for AVX-512, AVX2 and portable
// vectors; simd.h sets the vector width.
//
//     sweep    k_t^T S0, then q_t^T S0 for the four tokens (sweep_row). With 32 registers 4 x 4 accumulators need 8 loads for
//              16 products, with 16 registers 4 x 2 need 6 for 8
//     solve    the 4 x 4 triangular system of tokens.h, columns in the lanes
//     update   S = g S0 + sum_t (D_3t u_t) k_t^T
#pragma once

#include "tokens.h"

namespace efla::EFLA_ISA {

// Rows of S that one step of the update handles. 32 registers hold u of the whole quad; with 16, each load of u serves 4 rows.
constexpr int kUpdateRows = EFLA_WIDE_REGISTERS ? 1 : 4;

template <class T, int N> using QuadVectors = Vec<T>[kQuad][N];

// Cache lines to prefetch during a sweep. Rows of one head are too far apart in [B, T, H, width] for the hardware's
// prefetchers. The requests are spread over the rows of S, because a burst would stall the loads.
struct SweepPrefetch {
  const char* row[4];  // the first of four rows in each stream
  int64_t stride[4];   // bytes
  int first = 0, streams = 0, lines = 0;

  // The streams before and from `stream` on, for rules with two sweeps.
  SweepPrefetch before(int stream) const {
    SweepPrefetch part = *this;
    part.streams = streams < stream ? streams : stream;
    return part;
  }
  SweepPrefetch from(int stream) const {
    SweepPrefetch part = *this;
    part.first = stream;
    return part;
  }
};

template <class T, int N, bool keys, bool queries>
EFLA_INLINE void sweep_row(const T* k, const T* q, const T* S, int64_t panel, int j, QuadVectors<T, N>& ks,
                           QuadVectors<T, N>& qs) {
  Vec<T> s[N];
  EFLA_UNROLL_FOR (int n = 0; n < N; ++n) s[n] = load(S + j * kPanel + slice_offset<T>(n, panel));
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
    if constexpr (keys) {
      Vec<T> b = splat<T>(k[i * kRow<T> + j]);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) ks[i][n] += b * s[n];
    }
    if constexpr (queries) {
      Vec<T> b = splat<T>(q[i * kRow<T> + j]);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) qs[i][n] += b * s[n];
    }
  }
}

// A request to prefetch every `spacing` rows of S.
template <class T, int N, bool keys, bool queries, int spacing>
EFLA_INLINE void sweep(const T* k, const T* q, const T* S, int64_t panel, int rows, QuadVectors<T, N>& ks,
                       QuadVectors<T, N>& qs, const SweepPrefetch& prefetch) {
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      if constexpr (keys) ks[i][n] = Vec<T>{};
      if constexpr (queries) qs[i][n] = Vec<T>{};
    }
  }
  if constexpr (!keys && !queries) return;
  int j = 0;
  for (int line = 0; line < prefetch.lines; ++line) {
    for (int stream = prefetch.first; stream < prefetch.streams; ++stream) {
      const char* row = prefetch.row[stream] + 64 * line;
      for (int i = 0; i < kQuad && j + spacing <= rows; ++i, row += prefetch.stride[stream], j += spacing) {
        __builtin_prefetch(row, 0, 2);
        EFLA_UNROLL_FOR (int r = 0; r < spacing; ++r) sweep_row<T, N, keys, queries>(k, q, S, panel, j + r, ks, qs);
      }
    }
  }
#pragma GCC unroll 2
  for (; j < rows; ++j) sweep_row<T, N, keys, queries>(k, q, S, panel, j, ks, qs);
}

// Rows [j, j + R) of the state after the quad.
template <class T, int N, int R, bool decay>
EFLA_INLINE void update_rows(const T* k, const QuadVectors<T, N>& u, Vec<T> g, const T* from, T* to, int64_t panel,
                             int j) {
  Vec<T> s[R][N];
  EFLA_UNROLL_FOR (int r = 0; r < R; ++r) {
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      s[r][n] = load(from + (j + r) * kPanel + slice_offset<T>(n, panel));
      if constexpr (decay) s[r][n] = rounded(s[r][n] * g);
    }
  }
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
    EFLA_UNROLL_FOR (int r = 0; r < R; ++r) {
      Vec<T> b = splat<T>(k[i * kRow<T> + j + r]);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) s[r][n] += b * u[i][n];
    }
  }
  EFLA_UNROLL_FOR (int r = 0; r < R; ++r)
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(to + (j + r) * kPanel + slice_offset<T>(n, panel), s[r][n]);
}

template <class T, int N, bool decay>
EFLA_INLINE void update(const T* k, const QuadVectors<T, N>& u, T g, const T* from, T* to, int64_t panel, int rows) {
  const Vec<T> gv = splat<T>(g);
  int j = 0;
#pragma GCC unroll 1
  for (; j + kUpdateRows <= rows; j += kUpdateRows) update_rows<T, N, kUpdateRows, decay>(k, u, gv, from, to, panel, j);
  for (; kUpdateRows > 1 && j < rows; ++j) update_rows<T, N, 1, decay>(k, u, gv, from, to, panel, j);
}

// The reading half of a quad on a slice of N vectors: computes the outputs, and stores u (times its decay to the end of the
// quad) in `pending` for the writing half. v and o point to the slice's first column of the quad's first token. The slice
// has `valid` columns and the quad `tokens` tokens; `whole` means that both are full. With `queries` the outputs go to o,
// otherwise the rows u_t go to x.
template <class E, int N, bool erases, bool queries, bool whole>
EFLA_INLINE void read_quad(const KeyTile<Compute<E>>& keys, const ScalarTile<Compute<E>>& s, int t, int tokens,
                           int rows, const E* v, int64_t v_stride, int valid, E* o, int64_t o_stride, Compute<E>* x,
                           const Compute<E>* from, int64_t panel, Compute<E>* pending, const SweepPrefetch& prefetch) {
  using T = Compute<E>;
  const FlushDenormals flush(may_flush(s.decay + t, kQuad));
  const T *k = keys.k + t * kRow<T>, *q = keys.q + t * kRow<T>;
  QuadVectors<T, N> ks, qs, u;
  constexpr bool together = EFLA_WIDE_REGISTERS && N < kSweepVectors;
  constexpr bool twice = !together && erases && queries;
  constexpr int spacing = erases ? 2 : 1;  // rules without an erase have half as many rows to sweep
  sweep<T, N, erases, together && queries, spacing>(k, q, from, panel, rows, ks, qs,
                                                    twice ? prefetch.before(2) : prefetch);
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      const int left = valid - n * kLanes<T>;
      Vec<T> value{};
      if constexpr (whole) {
        value = load_elements(v + i * v_stride + n * kLanes<T>);
      } else if (i < tokens && left > 0) {
        value = load_some(v + i * v_stride + n * kLanes<T>, left);
      }
      u[i][n] = rounded(s.write[t + i] * value);
      if constexpr (erases) {
        u[i][n] -= s.erase_start[t + i] * ks[i][n];
        EFLA_UNROLL_FOR (int j = 0; j < i; ++j) u[i][n] -= s.kk[i - j][t + i] * u[j][n];
      }
      store(pending + (i * N + n) * kLanes<T>, s.to_end[t + i] * u[i][n]);
    }
  }
  if constexpr (!together)
    sweep<T, N, false, queries, spacing>(k, q, from, panel, rows, ks, qs, twice ? prefetch.from(2) : prefetch);
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i) {
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) {
      if constexpr (!queries) {
        store(x + i * kRow<T> + n * kLanes<T>, u[i][n]);
        continue;
      }
      const int left = valid - n * kLanes<T>;
      Vec<T> out = rounded(s.read_start[t + i] * qs[i][n]);
      EFLA_UNROLL_FOR (int j = 0; j <= i; ++j) out += s.qk[i - j][t + i] * u[j][n];
      if constexpr (whole) {
        store_elements(o + i * o_stride + n * kLanes<T>, out);
        continue;
      }
      out = rounded(out);  // outside the branch, so that product and sum are fused as in a whole quad
      if (i < tokens && left > 0) store_some(o + i * o_stride + n * kLanes<T>, out, left);
    }
  }
}

// The writing half: computes the state after the quad. `from` and `to` may be equal.
template <class T, int N>
EFLA_INLINE void write_quad(const KeyTile<T>& keys, const ScalarTile<T>& s, int t, int rows, const T* pending,
                            const T* from, T* to, int64_t panel) {
  QuadVectors<T, N> u;
  EFLA_UNROLL_FOR (int i = 0; i < kQuad; ++i)
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) u[i][n] = rounded(load(pending + (i * N + n) * kLanes<T>));
  const T* k = keys.k + t * kRow<T>;
  const T g = s.quad_decay[t + kQuad - 1];
  const FlushDenormals flush(may_flush(s.decay + t, kQuad));
  if (g == T(1)) {
    update<T, N, false>(k, u, g, from, to, panel, rows);
  } else {
    update<T, N, true>(k, u, g, from, to, panel, rows);
  }
}

// Copy a state [K][V] to and from panels [panels][padded_K][32], which are zero outside the state.
template <class T>
inline void load_panels(const T* state, int K, int V, int padded_K, int panel_begin, int panel_end, T* panels) {
  for (int p = panel_begin; p < panel_end; ++p, panels += padded_K * kPanel) {
    for (int j = 0; j < padded_K; ++j) {
      T* row = panels + j * kPanel;
      int width = V - p * kPanel < kPanel ? V - p * kPanel : kPanel;
      if (!state || j >= K) {
        zero_row(row, kPanel);
      } else {
        load_row(state + j * V + p * kPanel, width, row, kPanel);
      }
    }
  }
}

template <class T>
inline void store_panels(T* state, int K, int V, int padded_K, int panel_begin, int panel_end, const T* panels) {
  for (int p = panel_begin; p < panel_end; ++p, panels += padded_K * kPanel)
    for (int j = 0; j < K; ++j) {
      int width = V - p * kPanel < kPanel ? V - p * kPanel : kPanel;
      store_row(state + j * V + p * kPanel, panels + j * kPanel, width);
    }
}

template <class T> EFLA_INLINE void copy_vectors(T* to, const T* from, size_t count) {
  for (size_t i = 0; i < count; i += kLanes<T>) store(to + i, load(from + i));
}

}  // namespace efla::EFLA_ISA
