// The gate of a feed-forward layer, and its gradient, element by element in one pass each.
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
    const Vec<T> z = load_some(static_cast<const E*>(p.gate) + i, left), u = load_some(static_cast<const E*>(p.up) + i, left);
    store_some(static_cast<E*>(p.y) + i, z * sigmoid<T>(z) * u, left);
  }
}

template <class E> void backward_elements(const GateProblem& p, int64_t begin, int64_t end) {
  using T = Compute<E>;
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    const int left = int(end - i < kLanes<T> ? end - i : kLanes<T>);
    const Vec<T> z = load_some(static_cast<const E*>(p.gate) + i, left), u = load_some(static_cast<const E*>(p.up) + i, left);
    const Vec<T> g = load_some(static_cast<const E*>(p.dy) + i, left), s = sigmoid<T>(z);
    store_some(static_cast<E*>(p.dgate) + i, g * u * (s * (T(1) + z * (T(1) - s))), left);
    store_some(static_cast<E*>(p.dup) + i, g * (z * s), left);
  }
}

}  // namespace

void gate_forward(const GateProblem& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::float32: return forward_elements<float>(p, begin, end);
    case Dtype::bfloat16: return forward_elements<Bfloat16>(p, begin, end);
    case Dtype::float16: return forward_elements<Float16>(p, begin, end);
    case Dtype::float64: return forward_elements<double>(p, begin, end);
  }
}

void gate_backward(const GateProblem& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::float32: return backward_elements<float>(p, begin, end);
    case Dtype::bfloat16: return backward_elements<Bfloat16>(p, begin, end);
    case Dtype::float16: return backward_elements<Float16>(p, begin, end);
    case Dtype::float64: return backward_elements<double>(p, begin, end);
  }
}

}  // namespace efla::EFLA_ISA
