// Norm over the last axis and its gradient. Processes as many rows at once as a vector has lanes: their sums are one vector.
//
//     r = 1 / sqrt(factor sum(x^2) + eps),   y = r x w
//     dx = r (g - factor (g.u) u)  with g = dy w, u = r x,      dw = sum over rows of dy u
//
// With a gate z, y = r x w silu(z): dy above becomes dy silu(z), and dz = dy u w silu'(z).
//
// u is computed first, because r^3 alone leaves the range of float32 for norms beyond 1e12.
#include <cmath>

#include "convert.h"
#include "rows.h"
#include "vmath.h"

namespace efla::EFLA_ISA {
namespace {

template <class T> EFLA_INLINE Vec<T> weight_at(const NormProblem& p, int c) {
  return p.weight ? load_some(static_cast<const T*>(p.weight) + c, p.width - c) : splat<T>(1);
}

// v times silu of the gate at element `at`, or v without a gate.
template <class E> EFLA_INLINE Vec<Compute<E>> gated(const NormProblem& p, Vec<Compute<E>> v, int64_t at, int left) {
  using T = Compute<E>;
  if (!p.gate) return v;
  const Vec<T> z = load_some(static_cast<const E*>(p.gate) + at, left);
  return v * (z * sigmoid<T>(z));
}

// Lane i of the result is the sum of row i of `count`; f(i, c) is its vector at column c.
template <class T, class F> EFLA_INLINE Vec<T> row_sums(int count, int width, F f) {
  Vec<T> v[kLanes<T>];
  EFLA_UNROLL_FOR (int i = 0; i < kLanes<T>; ++i) {
    v[i] = Vec<T>{};
    if (i < count)
      for (int c = 0; c < width; c += kLanes<T>) v[i] += f(i, c);
  }
  return sum_each<T>(v);
}

// Lane i of the result is r of row i.
template <class E> EFLA_INLINE Vec<Compute<E>> inverse_roots(const NormProblem& p, const E* x, int count) {
  using T = Compute<E>;
  const Vec<T> sums = row_sums<T>(count, p.width, [&](int i, int c) {
    Vec<T> a = load_some(x + int64_t(i) * p.width + c, p.width - c);
    return a * a;
  });
  Vec<T> r = sums * T(p.factor) + T(p.eps);
  for (int i = 0; i < kLanes<T>; ++i) r[i] = T(1) / std::sqrt(r[i]);
  return r;
}

template <class E> void forward_rows(const NormProblem& p, int64_t begin, int64_t end) {
  using T = Compute<E>;
  for (int64_t row = begin; row < end; row += kLanes<T>) {
    const int count = int(end - row < kLanes<T> ? end - row : kLanes<T>);
    const E* x = static_cast<const E*>(p.x) + row * p.width;
    E* y = static_cast<E*>(p.y) + row * p.width;
    const Vec<T> r = inverse_roots<E>(p, x, count);
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < p.width; c += kLanes<T>) {
        const int64_t at = int64_t(i) * p.width + c;
        const Vec<T> v = load_some(x + at, p.width - c) * r[i] * weight_at<T>(p, c);
        store_some(y + at, gated<E>(p, v, row * p.width + at, p.width - c), p.width - c);
      }
  }
}

template <class E> void backward_rows(const NormProblem& p, int64_t begin, int64_t end, Compute<E>* dweight) {
  using T = Compute<E>;
  for (int64_t row = begin; row < end; row += kLanes<T>) {
    const int count = int(end - row < kLanes<T> ? end - row : kLanes<T>);
    const E* x = static_cast<const E*>(p.x) + row * p.width;
    const E* dy = static_cast<const E*>(p.dy) + row * p.width;
    E* dx = static_cast<E*>(p.dx) + row * p.width;
    const Vec<T> r = inverse_roots<E>(p, x, count);
    Vec<T> dot = row_sums<T>(count, p.width, [&](int i, int c) {
      const int64_t at = int64_t(i) * p.width + c;
      const Vec<T> g = gated<E>(p, load_some(dy + at, p.width - c), row * p.width + at, p.width - c);
      return load_some(x + at, p.width - c) * r[i] * (g * weight_at<T>(p, c));
    });
    dot = dot * T(p.factor);
    for (int c = 0; c < p.width; c += kLanes<T>) {
      const Vec<T> w = weight_at<T>(p, c);
      Vec<T> dw{};
      for (int i = 0; i < count; ++i) {
        const int64_t at = int64_t(i) * p.width + c;
        const Vec<T> u = load_some(x + at, p.width - c) * r[i];
        Vec<T> g = load_some(dy + at, p.width - c);
        if (p.gate) {
          const int64_t element = row * p.width + at;
          const Vec<T> z = load_some(static_cast<const E*>(p.gate) + element, p.width - c), s = sigmoid<T>(z);
          store_some(static_cast<E*>(p.dgate) + element, g * (u * w) * silu_slope<T>(z, s), p.width - c);
          g = g * (z * s);
        }
        dw += g * u;
        store_some(dx + at, (g * w - u * dot[i]) * r[i], p.width - c);
      }
      if (dweight) store_some(dweight + c, load_some(dweight + c, p.width - c) + dw, p.width - c);
    }
  }
}

template <class E> void backward_part(const NormProblem& p, int64_t part) {
  using T = Compute<E>;
  T* dweight = p.dweight_parts ? static_cast<T*>(p.dweight_parts) + part * p.width : nullptr;
  if (dweight)
    for (int c = 0; c < p.width; ++c) dweight[c] = 0;
  backward_rows<E>(p, p.rows * part / p.parts, p.rows * (part + 1) / p.parts, dweight);
}

}  // namespace

void norm_forward(const NormProblem& p, int64_t begin, int64_t end) {
  with_elements(p.dtype, [&]<class E>(E) { forward_rows<E>(p, begin, end); });
}

void norm_backward(const NormProblem& p, int64_t part) {
  with_elements(p.dtype, [&]<class E>(E) { backward_part<E>(p, part); });
}

}  // namespace efla::EFLA_ISA
