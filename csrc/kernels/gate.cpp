// The gate of a feed-forward layer and its gradient, element by element, one pass each.
//
//     y = z s u  with s = sigmoid(z);      dz = dy u s (1 + z (1 - s)),   du = dy z s
#include "convert.h"
#include "rows.h"
#include "vmath.h"

namespace efla::EFLA_ISA {
namespace {

template <class E> void forward_elements(const GateProblem& p, int64_t begin, int64_t end) {
  using T = Compute<E>;
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    const int left = int(end - i < kLanes<T> ? end - i : kLanes<T>);
    const Vec<T> z = load_some(static_cast<const E*>(p.gate) + i, left),
                 u = load_some(static_cast<const E*>(p.up) + i, left);
    store_some(static_cast<E*>(p.y) + i, z * sigmoid<T>(z) * u, left);
  }
}

template <class E> void backward_elements(const GateProblem& p, int64_t begin, int64_t end) {
  using T = Compute<E>;
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    const int left = int(end - i < kLanes<T> ? end - i : kLanes<T>);
    const Vec<T> z = load_some(static_cast<const E*>(p.gate) + i, left),
                 u = load_some(static_cast<const E*>(p.up) + i, left);
    const Vec<T> g = load_some(static_cast<const E*>(p.dy) + i, left), s = sigmoid<T>(z);
    store_some(static_cast<E*>(p.dgate) + i, g * u * silu_slope<T>(z, s), left);
    store_some(static_cast<E*>(p.dup) + i, g * (z * s), left);
  }
}

}  // namespace

void gate_forward(const GateProblem& p, int64_t begin, int64_t end) {
  with_elements(p.dtype, [&]<class E>(E) { forward_elements<E>(p, begin, end); });
}

void gate_backward(const GateProblem& p, int64_t begin, int64_t end) {
  with_elements(p.dtype, [&]<class E>(E) { backward_elements<E>(p, begin, end); });
}

}  // namespace efla::EFLA_ISA
