// Products of a few rows with a weight, for decoding: bound by reading the weight once, not by arithmetic.
//
// A tile is a few columns (rows of the weight) times up to four rows of x, with one vector accumulator each. Every result is
// one chain of multiply-adds over the width and one sum over lanes, whatever the tile, so it does not depend on the batch.
// The next tile is prefetched in the order of its memory: as many streams as columns would defeat the hardware's prefetcher.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "convert.h"
#include "rows.h"
#include "vmath.h"

namespace efla::EFLA_ISA {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileColumns = EFLA_WIDE_REGISTERS ? 4 : 2;  // with more than two rows

// dots[j][r] = x_r . w_j for `columns` rows of the weight, from `column` on, and `rows` rows of x.
template <class T, class W, int columns, int rows>
EFLA_INLINE void dot_tile(const T* x, const Weight& weight, int64_t column, int64_t width, T (&dots)[columns][rows]) {
  constexpr bool is_scaled = std::is_same_v<W, int8_t>;
  const int64_t stride = width + (is_scaled ? kScaleBytes : 0);
  const W* w = static_cast<const W*>(weight.data) + column * stride;
  Vec<T> sums[columns][rows];
  EFLA_UNROLL_FOR (int j = 0; j < columns; ++j)
    EFLA_UNROLL_FOR (int r = 0; r < rows; ++r) sums[j][r] = Vec<T>{};
  constexpr int step = columns * kLanes<T> * int(sizeof(W)), line = 64;
  const auto accumulate = [&](auto fetch, auto multiply, int64_t c) __attribute__((always_inline)) {
    const char* next = reinterpret_cast<const char*>(w + columns * (stride + c));  // may lie behind the weight
    EFLA_UNROLL_FOR (int i = 0; i < step; i += line) __builtin_prefetch(next + i, 0, 2);
    Vec<T> a[rows];
    EFLA_UNROLL_FOR (int r = 0; r < rows; ++r) a[r] = fetch(x + r * width + c);
    EFLA_UNROLL_FOR (int j = 0; j < columns; ++j) {
      const Vec<T> b = fetch(w + j * stride + c);
      EFLA_UNROLL_FOR (int r = 0; r < rows; ++r) sums[j][r] += multiply(a[r], b);
    }
  };
  int64_t c = 0;
  for (; c + kLanes<T> <= width; c += kLanes<T>)
    accumulate([](const auto* p) { return load_elements(p); }, [](Vec<T> a, Vec<T> b) { return a * b; }, c);
  // Only some instantiations would fuse the last product: round it in all of them.
  if (const int left = int(width - c))
    accumulate([left](const auto* p) { return load_some(p, left); },
               [](Vec<T> a, Vec<T> b) { return rounded<Vec<T>>(a * b); }, c);
  EFLA_UNROLL_FOR (int j = 0; j < columns; ++j)
    EFLA_UNROLL_FOR (int r = 0; r < rows; ++r) dots[j][r] = sum<T>(sums[j][r]);
  if constexpr (is_scaled)
    for (int j = 0; j < columns; ++j) {
      T scale;
      __builtin_memcpy(&scale, w + j * stride + width, sizeof scale);
      for (int r = 0; r < rows; ++r) dots[j][r] *= scale;
    }
}

template <class E> EFLA_INLINE Compute<E> get(const E* y) { return load_some(y, 1)[0]; }
template <class E> EFLA_INLINE void put(E* y, Compute<E> value) { store_some(y, splat<Compute<E>>(value), 1); }

template <class E, class W, int columns, int rows>
EFLA_INLINE void tile(const ProductsProblem& p, const Compute<E>* x, int part, int64_t row, int64_t column) {
  using T = Compute<E>;
  x += row * p.width;
  E* y = static_cast<E*>(p.y[part]) + row * p.columns[part] + column;
  T dots[columns][rows];
  dot_tile<T, W, columns, rows>(x, p.weight[part], column, p.width, dots);
  if (p.gated) {
    T up[columns][rows];
    dot_tile<T, W, columns, rows>(x, p.weight[1], column, p.width, up);
    for (int j = 0; j < columns; ++j)
      for (int r = 0; r < rows; ++r)
        dots[j][r] = (splat<T>(dots[j][r]) * sigmoid<T>(splat<T>(dots[j][r])))[0] * up[j][r];
  }
  for (int j = 0; j < columns; ++j)
    for (int r = 0; r < rows; ++r) put(y + r * p.columns[part] + j, dots[j][r]);
  if (!p.residual) return;
  const E* residual = static_cast<const E*>(p.residual) + (y - static_cast<E*>(p.y[part]));
  for (int j = 0; j < columns; ++j)
    for (int r = 0; r < rows; ++r) {
      const int64_t at = r * p.columns[part] + j;
      put(y + at, get(residual + at) + get(y + at));
    }
}

template <class E, class W, int columns>
void column_tile(const ProductsProblem& p, const Compute<E>* x, int part, int64_t column) {
  for (int64_t row = 0; row < p.rows; row += kTileRows) switch (p.rows - row) {
      case 1: tile<E, W, columns, 1>(p, x, part, row, column); break;
      case 2: tile<E, W, columns, 2>(p, x, part, row, column); break;
      case 3: tile<E, W, columns, 3>(p, x, part, row, column); break;
      default: tile<E, W, columns, kTileRows>(p, x, part, row, column);
    }
}

// The rows of x; those in half precision are converted once for all columns of the call.
template <class E> const Compute<E>* in_compute_type(const ProductsProblem& p) {
  if constexpr (std::is_same_v<E, Compute<E>>) {
    return static_cast<const E*>(p.x);
  } else {
    static thread_local std::vector<Compute<E>> converted;
    const int64_t count = p.rows * p.width;
    converted.resize(size_t(count) + kLanes<Compute<E>>);
    for (int64_t i = 0; i < count; i += kLanes<Compute<E>>)
      store(converted.data() + i,
            load_some(static_cast<const E*>(p.x) + i, int(std::min<int64_t>(count - i, kLanes<Compute<E>>))));
    return converted.data();
  }
}

template <class E, class W> void columns_of(const ProductsProblem& p, int part, int64_t begin, int64_t end) {
  const Compute<E>* x = in_compute_type<E>(p);
  int64_t column = begin;
  if (p.rows == 1)
    for (; column + 8 <= end; column += 8) tile<E, W, 8, 1>(p, x, part, 0, column);
  else if (p.rows == 2)
    for (; column + 4 <= end; column += 4) tile<E, W, 4, 2>(p, x, part, 0, column);
  else
    for (; column + kTileColumns <= end; column += kTileColumns) column_tile<E, W, kTileColumns>(p, x, part, column);
  for (; column < end; ++column) column_tile<E, W, 1>(p, x, part, column);
}

}  // namespace

void products(const ProductsProblem& p, int part, int64_t begin, int64_t end) {
  const Dtype weight = p.weight[part].dtype;
  if (p.dtype == Dtype::float32 && weight == Dtype::int8) return columns_of<float, int8_t>(p, part, begin, end);
  if (p.dtype == Dtype::float32 && weight == Dtype::float16) return columns_of<float, Float16>(p, part, begin, end);
  with_elements(p.dtype, [&]<class E>(E) { columns_of<E, E>(p, part, begin, end); });
}

}  // namespace efla::EFLA_ISA
