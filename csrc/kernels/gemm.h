// Small matrix products C = A B with the accumulators in registers. A is read by broadcasts, so it may be transposed.
//
//     acc[r][n] += A[r * row_stride + p * column_stride] * B[p * ldb + n * lanes]
//
// Strides are template arguments, so that addresses in the inner loop are immediates.
#pragma once

#include "simd.h"

namespace efla::EFLA_ISA {

// Rows of accumulators, two vectors each: 8 x 2 accumulators with 32 registers, 4 x 2 with 16.
constexpr int kProductRows = EFLA_WIDE_REGISTERS ? 8 : 4;

// The same where the columns are the 16 tokens of a block: one vector per row if it has 16 lanes, else two.
template <class T> constexpr int kTokenVectors = kLanes<T> >= kBlock ? 1 : 2;
template <class T> constexpr int kTokenRows = kLanes<T> >= kBlock ? 16 : kProductRows;

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

template <class T, int M, int N, int row_stride, int column_stride>
EFLA_INLINE void multiply(const T* A, const T* B, int ldb, int depth, Accumulators<T, M, N>& acc) {
#pragma GCC unroll kProductUnroll
  for (int p = 0; p < depth; ++p) {
    Vec<T> b[N];
    EFLA_UNROLL_FOR (int n = 0; n < N; ++n) b[n] = load(B + p * ldb + n * kLanes<T>);
    EFLA_UNROLL_FOR (int r = 0; r < M; ++r) {
      Vec<T> a = splat<T>(A[r * row_stride + p * column_stride]);
      EFLA_UNROLL_FOR (int n = 0; n < N; ++n) acc[r][n] += a * b[n];
    }
  }
}

// C[rows][columns] = A B. `rows` is a multiple of M, `columns` of N vectors.
template <class T, int M, int N, int row_stride, int column_stride>
inline void product(const T* A, const T* B, int ldb, int depth, T* C, int ldc, int rows, int columns,
                    Prefetcher& prefetcher) {
  for (int c = 0; c < columns; c += N * kLanes<T>) {
    for (int r = 0; r < rows; r += M) {
      Accumulators<T, M, N> acc;
      clear<T, M, N>(acc);
      prefetcher.step();
      multiply<T, M, N, row_stride, column_stride>(A + r * row_stride, B + c, ldb, depth, acc);
      EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(C + (r + i) * ldc + c + n * kLanes<T>, acc[i][n]);
    }
  }
}

// C[rows][columns] = S B for a state S in panels [panels][rows][32]: contracts over all columns of S.
template <class T, int M, int N>
inline void panel_product(const T* S, size_t panel_size, int panels, const T* B, int ldb, T* C, int ldc, int rows,
                          int columns, Prefetcher& prefetcher) {
  for (int r = 0; r < rows; r += M) {
    for (int c = 0; c < columns; c += N * kLanes<T>) {
      Accumulators<T, M, N> acc;
      clear<T, M, N>(acc);
      prefetcher.step();
      for (int panel = 0; panel < panels; ++panel)
        multiply<T, M, N, kPanel, 1>(S + panel * panel_size + r * kPanel, B + panel * kPanel * ldb + c, ldb, kPanel,
                                     acc);
      EFLA_UNROLL_FOR (int i = 0; i < M; ++i)
        EFLA_UNROLL_FOR (int n = 0; n < N; ++n) store(C + (r + i) * ldc + c + n * kLanes<T>, acc[i][n]);
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
