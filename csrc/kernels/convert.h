// Element types of q, k, v, o and their conversion to and from the compute type (float32, or float64 for float64).
//
// Rounding to bfloat16 and float16 is to nearest even; NaN stays NaN, overflow becomes infinity.
#pragma once

#include "simd.h"

#if defined(__AVX2__) || defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace efla::EFLA_ISA {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class E> struct ComputeOf {
  using type = float;
};
template <> struct ComputeOf<double> {
  using type = double;
};
template <class E> using Compute = typename ComputeOf<E>::type;

// Calls body with a value of dtype's element type. Only the type of the value matters.
template <class Body> EFLA_INLINE void with_elements(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float32: return body(float{});
    case Dtype::bfloat16: return body(Bfloat16{});
    case Dtype::float16: return body(Float16{});
    case Dtype::float64: return body(double{});
    case Dtype::int8: return;  // weights only (products.cpp)
  }
}

typedef uint16_t HalfBits __attribute__((vector_size(EFLA_VECTOR_BYTES / 2)));
typedef uint32_t WordBits __attribute__((vector_size(EFLA_VECTOR_BYTES)));

EFLA_INLINE Vec<float> load_elements(const float* p) { return load(p); }
EFLA_INLINE Vec<double> load_elements(const double* p) { return load(p); }
EFLA_INLINE void store_elements(float* p, Vec<float> v) { store(p, v); }
EFLA_INLINE void store_elements(double* p, Vec<double> v) { store(p, v); }

// GCC 12 widens bytes element by element unless it is told how.
#if defined(__AVX512F__)
EFLA_INLINE Vec<float> load_elements(const int8_t* p) {
  const __m512i words = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return Vec<float>(_mm512_cvtepi32_ps(words));
}
#elif defined(__AVX2__)
EFLA_INLINE Vec<float> load_elements(const int8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return Vec<float>(_mm256_cvtepi32_ps(words));
}
#else
EFLA_INLINE Vec<float> load_elements(const int8_t* p) {
  return Vec<float>{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
#endif

EFLA_INLINE Vec<float> load_elements(const Bfloat16* p) {
  HalfBits half;
  __builtin_memcpy(&half, p, sizeof half);
  return Vec<float>(__builtin_convertvector(half, WordBits) << 16);
}

EFLA_INLINE void store_elements(Bfloat16* p, Vec<float> v) {
  WordBits bits = WordBits(v);
  WordBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  WordBits quiet = (bits >> 16) | 0x40u;
  HalfBits half = __builtin_convertvector(v == v ? rounded : quiet, HalfBits);
  __builtin_memcpy(p, &half, sizeof half);
}

#if defined(__AVX512F__)
EFLA_INLINE Vec<float> load_elements(const Float16* p) {
  return Vec<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
EFLA_INLINE void store_elements(Float16* p, Vec<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
EFLA_INLINE Vec<float> load_elements(const Float16* p) {
  return Vec<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
EFLA_INLINE void store_elements(Float16* p, Vec<float> v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT));
}
#else
// Denormal halves are converted as integers: as bits of a float they would be denormal too, and those are flushed.
EFLA_INLINE Vec<float> load_elements(const Float16* p) {
  HalfBits half;
  __builtin_memcpy(&half, p, sizeof half);
  WordBits bits = __builtin_convertvector(half, WordBits);
  WordBits magnitude = bits & 0x7fffu;
  WordBits normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000u;
  WordBits denormal = WordBits(__builtin_convertvector(IntVec<float>(magnitude), Vec<float>) * 0x1p-24f);
  WordBits finite = magnitude < 0x0400u ? denormal : normal;
  return Vec<float>((magnitude >= 0x7c00u ? special : finite) | (bits & 0x8000u) << 16);
}
// Normal halves: add half an ulp (to even) and shift. Denormal halves: adding 0.5 lets the hardware round.
EFLA_INLINE void store_elements(Float16* p, Vec<float> v) {
  WordBits bits = WordBits(v);
  WordBits sign = (bits >> 16) & 0x8000u;
  WordBits magnitude = bits & 0x7fffffffu;
  WordBits normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  WordBits denormal = WordBits(Vec<float>(magnitude) + 0.5f) - 0x3f000000u;
  WordBits result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x477ff000u ? (WordBits{} + 0x7c00u) : result;
  result = magnitude > 0x7f800000u ? (WordBits{} + 0x7e00u) : result;
  HalfBits half = __builtin_convertvector(result | sign, HalfBits);
  __builtin_memcpy(p, &half, sizeof half);
}
#endif

// Loads the first `count` >= 1 elements, at most a vector; other lanes are zero.
template <class E> EFLA_INLINE Vec<Compute<E>> load_some(const E* p, int count) {
  constexpr int n = kLanes<Compute<E>>;
  if (count >= n) return load_elements(p);
  E copy[n] = {};
  for (int i = 0; i < count; ++i) copy[i] = p[i];
  return load_elements(copy);
}

template <class E> EFLA_INLINE void store_some(E* p, Vec<Compute<E>> v, int count) {
  constexpr int n = kLanes<Compute<E>>;
  if (count >= n) {
    store_elements(p, v);
    return;
  }
  E copy[n];
  store_elements(copy, v);
  for (int i = 0; i < count; ++i) p[i] = copy[i];
}

// to[0..padded) = from[0..width), then zeros; padded is a multiple of 16.
template <class E> EFLA_INLINE void load_row(const E* from, int width, Compute<E>* to, int padded) {
  using T = Compute<E>;
  int c = 0;
  for (; c + kLanes<T> <= width; c += kLanes<T>) store(to + c, load_elements(from + c));
  if (c < width) {
    store(to + c, load_some(from + c, width - c));
    c += kLanes<T>;
  }
  for (; c < padded; c += kLanes<T>) store(to + c, Vec<T>{});
}

template <class E> EFLA_INLINE void store_row(E* to, const Compute<E>* from, int width) {
  using T = Compute<E>;
  for (int c = 0; c < width; c += kLanes<T>) store_some(to + c, load(from + c), width - c);
}

template <class T> EFLA_INLINE void zero_row(T* to, int padded) {
  for (int c = 0; c < padded; c += kLanes<T>) store(to + c, Vec<T>{});
}

// Element addresses of the strided inputs.
template <class E> EFLA_INLINE E* at(const Strided& s, int64_t b, int64_t t, int64_t h) {
  return static_cast<E*>(s.data) + (b * s.batch + t * s.token + h * s.head);
}

}  // namespace efla::EFLA_ISA
