// Small matrix products C = A B with the accumulators in registers. A is read by broadcasts, so it may be transposed.
//
//     acc[r][n] += A[r * row_stride + p * column_stride] * B[p * ldb + n * lanes]
//
// Strides are template arguments, so that addresses in the inner loop are immediates.
#pragma once

#include "simd.h"

namespace efla::EFLA_ISA {

// Rows of a tile with N vectors a row: as many accumulators as leave registers for A and B.
template <int N> constexpr int kTileRows = (EFLA_WIDE_REGISTERS ? 16 : 8) / N;

// Terms that a lane adds up where the columns are the 16 tokens of a block. A vector of 16 lanes holds 8 tokens with two terms
// each, a broadcast two elements of A: 16 products then need 10 loads instead of 17. The two sums are added at the end.
template <class T> constexpr int kTerms = kLanes<T> / 8 > 1 ? 2 : 1;

// Steps of a product in one iteration of its loop.
constexpr int kProductUnroll = EFLA_WIDE_REGISTERS ? 1 : 2;

// Prefetches the rows of the next head or tile, a few cache lines at a time between products.
struct Prefetcher {
  static constexpr int streams = 7, per_step = 10;  // k, q, v, dO and dq, dk, dv
  const char* row[streams];                         // first row of each stream
  int64_t stride[streams];                          // bytes between rows
  int lines[streams];                               // per row
  int rows = 0, token = 0, stream = 0, line = 0;

  EFLA_INLINE void step() {
    for (int n = 0; n < per_step && token < rows; ++n) {
      __builtin_prefetch(row[stream] + token * stride[stream] + 64 * line, 0, 2);
      if (++line == lines[stream]) {
        line = 0;
        if (++stream == streams) stream = 0, ++token;
      }
    }
  }
};

template <class T, int M, int N> using Accumulators = Vec<T>[M][N];

template <class T, int M, int N> EFLA_INLINE void clear(Accumulators<T, M, N>& acc) {
  EFLA_UNROLL_FOR (int r = 0; r < M; ++r)
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[r][n] = Vec<T>{};
}

template <class T, int terms> EFLA_INLINE Vec<T> splat_terms(const T* p) {
  if constexpr (terms == 1) {
    return splat<T>(*p);
  } else {
    static_assert(terms * sizeof(T) == sizeof(double));
    double both;
    __builtin_memcpy(&both, p, sizeof both);
    return (Vec<T>)splat<double>(both);
  }
}

// B is a row of vectors or, with the size of a panel, a slice of a state (slice_offset in simd.h).
template <class T, int M, int N, int row_stride, int column_stride, int terms = 1>
EFLA_INLINE void multiply(const T* A, const T* B, int ldb, int depth, Accumulators<T, M, N>& acc,
                          int64_t panel = kPanel) {
  static_assert(terms == 1 || column_stride == 1);
#pragma GCC unroll kProductUnroll
  for (int p = 0; p < depth / terms; ++p) {
    Vec<T> b[N];
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) b[n] = load(B + p * ldb + slice_offset<T>(n, panel));
    EFLA_UNROLL_FOR (int r = 0; r < M; ++r) {
      Vec<T> a = splat_terms<T, terms>(A + r * row_stride + p * terms * column_stride);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[r][n] += a * b[n];
    }
  }
}

// Rows [16][kRow] with the tokens in the lanes, as multiply takes them: to[p * stride + token * kTerms + term].
template <class T> inline void tokens_in_lanes(const T* rows, T* to, int stride, int columns) {
  if constexpr (kTerms<T> == 1) {
    transpose(rows, kRow<T>, to, stride, kBlock, columns);
  } else {
    transpose(reinterpret_cast<const double*>(rows), kRow<T> / 2, reinterpret_cast<double*>(to), stride / 2, kBlock,
              columns / 2);
  }
}

// Stores a tile whose columns are tokens; adds up the terms of each lane.
template <class T, int M, int N> EFLA_INLINE void store_tokens(Accumulators<T, M, N>& acc, T* C, int ldc) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  constexpr int terms = kTerms<T>;
  EFLA_UNROLL_FOR (int i = 0; i < M; ++i) {
    EFLA_UNROLL_FOR (int n = 0; n < N; n += terms) {
      Vec<T> total = acc[i][n];
      if constexpr (terms == 2)
        total = even_of<T>(acc[i][n], acc[i][n + 1], lanes) + odd_of<T>(acc[i][n], acc[i][n + 1], lanes);
      store(C + i * ldc + n / terms * kLanes<T>, total);
    }
  }
}

// Vectors of a tile whose columns are `tokens` tokens.
template <class T, int tokens>
constexpr int kTokenVectors =
    tokens * kTerms<T> / kLanes<T> < kSweepVectors ? tokens * kTerms<T> / kLanes<T> : kSweepVectors;

// C[16][tokens] = A B for rows A [16][kRow] and B with the tokens in the lanes.
template <class T, int tokens>
inline void token_product(const T* A, const T* B, int depth, T* C, Prefetcher& prefetcher) {
  constexpr int N = kTokenVectors<T, tokens>, M = kTileRows<N>, terms = kTerms<T>, width = N * kLanes<T>;
  for (int c = 0; c < tokens * terms; c += width) {
    for (int r = 0; r < kBlock; r += M) {
      Accumulators<T, M, N> acc;
      clear<T, M, N>(acc);
      prefetcher.step();
      multiply<T, M, N, kRow<T>, 1, terms>(A + r * kRow<T>, B + c, tokens * terms, depth, acc);
      store_tokens<T, M, N>(acc, C + r * tokens + c / terms, tokens);
    }
  }
}

// C[rows][tokens] = S B for a state S in panels [panels][rows][32]: contracts over all columns of S.
template <class T, int tokens>
inline void panel_product(const T* S, int panels, const T* B, T* C, int rows, Prefetcher& prefetcher) {
  constexpr int N = kTokenVectors<T, tokens>, M = kTileRows<N>, terms = kTerms<T>, width = N * kLanes<T>;
  for (int r = 0; r < rows; r += M) {
    for (int c = 0; c < tokens * terms; c += width) {
      Accumulators<T, M, N> acc;
      clear<T, M, N>(acc);
      prefetcher.step();
      for (int panel = 0; panel < panels; ++panel)
        multiply<T, M, N, kPanel, 1, terms>(S + (size_t(panel) * rows + r) * kPanel, B + panel * kPanel * tokens + c,
                                            tokens * terms, kPanel, acc);
      store_tokens<T, M, N>(acc, C + r * tokens + c / terms, tokens);
    }
  }
}

// out[i] = a_i . b_i for 16 rows of stride kRow; padded is a multiple of 16.
template <class T> inline void row_dots(const T* a, const T* b, int padded, T* out) {
  constexpr int lanes = kLanes<T>;
  for (int first = 0; first < kBlock; first += lanes) {
    Vec<T> acc[lanes] = {};
    for (int c = 0; c < padded; c += lanes)
      EFLA_UNROLL_FOR (int i = 0; i < lanes; ++i)
        acc[i] += load(a + (first + i) * kRow<T> + c) * load(b + (first + i) * kRow<T> + c);
    store(out + first, sum_each<T>(acc));
  }
}

template <class T> inline T long_dot(const T* a, const T* b, size_t count) {
  Vec<T> s[4] = {};
  for (size_t i = 0; i < count; i += 4 * kLanes<T>)
    EFLA_UNROLL_FOR (int n = 0; n < 4; ++n) s[n] += load(a + i + n * kLanes<T>) * load(b + i + n * kLanes<T>);
  return sum<T>((s[0] + s[1]) + (s[2] + s[3]));
}

}  // namespace efla::EFLA_ISA
