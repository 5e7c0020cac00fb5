// Vectors of the width that this file is compiled for, on the vector extensions of GCC and Clang.
//
// EFLA_ISA names the build (portable, neon, avx2, avx512). It is the namespace of everything in kernels/, so that builds share no
// template instantiation. a * b + c becomes a fused multiply-add where the instruction set has one (-ffp-contract=fast).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "problem.h"

#if defined(__AVX512F__)
#define EFLA_VECTOR_BYTES 64
#define EFLA_WIDE_REGISTERS 1  // 32 vector registers
#elif defined(__AVX2__)
#define EFLA_VECTOR_BYTES 32
#define EFLA_WIDE_REGISTERS 0
#elif defined(EFLA_NEON)
#define EFLA_VECTOR_BYTES 16
#define EFLA_WIDE_REGISTERS 1
#else
#define EFLA_VECTOR_BYTES 16
#define EFLA_WIDE_REGISTERS 0
#endif

#define EFLA_INLINE inline __attribute__((always_inline))
#define EFLA_UNROLL_FOR _Pragma("GCC unroll 64") for

namespace efla::EFLA_ISA {

template <class T> struct IntegerOf;
template <> struct IntegerOf<float> {
  using type = int32_t;
};
template <> struct IntegerOf<double> {
  using type = int64_t;
};

template <class T> constexpr int kLanes = EFLA_VECTOR_BYTES / int(sizeof(T));

template <class T> struct VectorOf {
  typedef T type __attribute__((vector_size(EFLA_VECTOR_BYTES)));
};
template <class T> using Vec = typename VectorOf<T>::type;
template <class T> using IntVec = typename VectorOf<typename IntegerOf<T>::type>::type;

// Stride of packed rows, the same for all widths: addresses in the inner loops are immediates, and the odd number of cache
// lines spreads the rows over the sets of L1.
template <class T> constexpr int kRow = kMaxWidth + 64 / int(sizeof(T));

// Width of a slice in vectors. A slice of 16-lane vectors covers two panels.
constexpr int kSweepVectors = EFLA_WIDE_REGISTERS ? 4 : 2;
template <class T> constexpr int kSliceWidth = kSweepVectors * kLanes<T>;

// Offset of vector n of a slice in each row of S; `panel` is the size of a panel.
template <class T> EFLA_INLINE int64_t slice_offset(int n, int64_t panel) {
  return n * kLanes<T> / kPanel * panel + n * kLanes<T> % kPanel;
}

// Calls f<N>(column) for the slices of N vectors that cover `columns`, a multiple of 16. The last ones may be narrower.
template <class T, class F> EFLA_INLINE void for_slices(int columns, F&& f) {
  int c = 0;
  for (; c + kSliceWidth<T> <= columns; c += kSliceWidth<T>) f.template operator()<kSweepVectors>(c);
  if constexpr (kSliceWidth<T> > kBlock) {
    if (c + 2 * kLanes<T> <= columns) f.template operator()<2>(c), c += 2 * kLanes<T>;
  }
  if constexpr (kLanes<T> == kBlock) {
    if (c < columns) f.template operator()<1>(c);
  }
}

template <class T> EFLA_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T> EFLA_INLINE void store(T* p, Vec<T> v) { __builtin_memcpy(p, &v, sizeof v); }

// x - 0 is x for every x, including -0 and NaN, so this compiles to a broadcast.
template <class T> EFLA_INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }

// Rounds a product before it is added to another. In a * b + c * d the compiler may fuse either product and chooses
// differently in different instantiations, but a token's result must not depend on whether its quad is whole.
// The empty asm statement keeps the product in a register and emits nothing; GCC's __builtin_assoc_barrier splits vectors.
template <class V> EFLA_INLINE V rounded(V x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

template <class T, size_t... I> EFLA_INLINE IntVec<T> iota_of(std::index_sequence<I...>) { return IntVec<T>{I...}; }
template <class T> EFLA_INLINE IntVec<T> iota() { return iota_of<T>(std::make_index_sequence<kLanes<T>>{}); }

#if defined(__clang__) || __GNUC__ >= 12
#define EFLA_SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define EFLA_SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, IntVec<T>{__VA_ARGS__})
#endif

template <class T, size_t... I> EFLA_INLINE Vec<T> even_of(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
  return EFLA_SHUFFLE(T, a, b, (2 * I)...);
}
template <class T, size_t... I> EFLA_INLINE Vec<T> odd_of(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
  return EFLA_SHUFFLE(T, a, b, (2 * I + 1)...);
}
template <class T, size_t... I> EFLA_INLINE Vec<T> zip_low_of(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
  return EFLA_SHUFFLE(T, a, b, (I / 2 + (I % 2) * sizeof...(I))...);
}
template <class T, size_t... I> EFLA_INLINE Vec<T> zip_high_of(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
  return EFLA_SHUFFLE(T, a, b, (sizeof...(I) / 2 + I / 2 + (I % 2) * sizeof...(I))...);
}

// Lane i of the result is the sum over the lanes of v[i]. Destroys v.
template <class T> EFLA_INLINE Vec<T> sum_each(Vec<T> (&v)[kLanes<T>]) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
  EFLA_UNROLL_FOR (int n = kLanes<T>; n > 1; n /= 2) {
    EFLA_UNROLL_FOR (int i = 0; i < n / 2; ++i) {
      v[i] = even_of<T>(v[2 * i], v[2 * i + 1], lanes) + odd_of<T>(v[2 * i], v[2 * i + 1], lanes);
    }
  }
  return v[0];
}

template <class T, int shift, size_t... I> EFLA_INLINE Vec<T> rotate_of(Vec<T> v, std::index_sequence<I...>) {
  return EFLA_SHUFFLE(T, v, v, ((I + shift) % sizeof...(I))...);
}

// The sum of all lanes, by halves: a chain of log2(lanes) additions.
template <class T, int half = kLanes<T> / 2> EFLA_INLINE T sum(Vec<T> v) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    return sum<T, half / 2>(v + rotate_of<T, half>(v, std::make_index_sequence<kLanes<T>>{}));
  }
}

// Transposes the square matrix with rows v in place.
template <class T> EFLA_INLINE void transpose_square(Vec<T> (&v)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
  constexpr auto lanes = std::make_index_sequence<n>{};
  EFLA_UNROLL_FOR (int stage = 1; stage < n; stage *= 2) {
    Vec<T> next[n];
    EFLA_UNROLL_FOR (int i = 0; i < n / 2; ++i) {
      next[2 * i] = zip_low_of<T>(v[i], v[i + n / 2], lanes);
      next[2 * i + 1] = zip_high_of<T>(v[i], v[i + n / 2], lanes);
    }
    EFLA_UNROLL_FOR (int i = 0; i < n; ++i) v[i] = next[i];
  }
}

// to[c * to_stride + r] = from[r * from_stride + c] for `rows` x `columns`, both multiples of 16.
template <class T>
EFLA_INLINE void transpose(const T* from, int from_stride, T* to, int to_stride, int rows, int columns) {
  constexpr int n = kLanes<T>;
  for (int r = 0; r < rows; r += n) {
    for (int c = 0; c < columns; c += n) {
      Vec<T> v[n];
      EFLA_UNROLL_FOR (int i = 0; i < n; ++i) v[i] = load(from + (r + i) * from_stride + c);
      transpose_square<T>(v);
      EFLA_UNROLL_FOR (int i = 0; i < n; ++i) store(to + (c + i) * to_stride + r, v[i]);
    }
  }
}

// Divides one block of memory into 64-byte aligned arrays. With a null base it only counts bytes.
struct Arena {
  char* base;
  size_t used = 0;
  template <class T> T* allocate(size_t count) {
    T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

// While it lives and `on`, this thread computes with zeros in place of denormal numbers. Under strong gates products of decays pass
// through them, and on many CPUs an operation on one takes a hundred times as long. The empty asm statements keep loads and
// stores, and so the arithmetic between them, inside.
class FlushDenormals {
 public:
  explicit EFLA_INLINE FlushDenormals(bool on) : on_(on) {
    if (!on_) return;
#if defined(__x86_64__)
    before_ = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(unsigned(before_) | 0x8040);  // results and inputs
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(before_ | uint64_t(1) << 24));
#endif
    __asm__ volatile("" : : : "memory");
  }
  EFLA_INLINE ~FlushDenormals() {
    if (!on_) return;
    __asm__ volatile("" : : : "memory");
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(unsigned(before_));
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before_));
#endif
  }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  bool on_;
  uint64_t before_ = 0;
};

// Whether denormal numbers may be flushed in a step over `count` tokens: their decays multiply to so little that it meets them,
// and none alone is so small that results of its size would be lost.
template <class T> EFLA_INLINE bool may_flush(const T* decay, int count) {
  constexpr T small = T(sizeof(T) == 4 ? 0x1p-64 : 0x1p-512);
  T product = 1, least = 1;
  for (int i = 0; i < count; ++i) product *= decay[i], least = decay[i] < least ? decay[i] : least;
  return product < small && least >= small;
}

EFLA_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace efla::EFLA_ISA
