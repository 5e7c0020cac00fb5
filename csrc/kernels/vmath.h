// exp, expm1, sigmoid, phi1(x) = (1 - e^-x) / x and its derivative on vectors, to about 2 ulp, with denormals.
//
// x = n ln2 + r with |r| <= ln2/2;  p = expm1(r) as a Taylor polynomial;  exp(x) = 2^n (1 + p),
// expm1(x) = 2^n p + (2^n - 1). 2^n is applied as two factors so that the result may be denormal.
#pragma once

#include "simd.h"

namespace efla::EFLA_ISA {

template <class T> struct ExpConstants;
template <> struct ExpConstants<float> {
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, log2e = 1.44269504f;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float lowest = -104.0f, highest = 89.0f;
  static constexpr int bias = 127, mantissa = 23, expm1_terms = 8, phi_terms = 12;
};
template <> struct ExpConstants<double> {
  static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
  static constexpr double log2e = 1.44269504088896340736, round_magic = 6755399441055744.0;
  static constexpr double lowest = -746.0, highest = 710.0;
  static constexpr int bias = 1023, mantissa = 52, expm1_terms = 14, phi_terms = 20;
};

constexpr double kInverseFactorial[] = {1.0,
                                        1.0,
                                        0.5,
                                        1.0 / 6,
                                        1.0 / 24,
                                        1.0 / 120,
                                        1.0 / 720,
                                        1.0 / 5040,
                                        1.0 / 40320,
                                        1.0 / 362880,
                                        1.0 / 3628800,
                                        1.0 / 39916800,
                                        1.0 / 479001600,
                                        1.0 / 6227020800.0,
                                        1.0 / 87178291200.0,
                                        1.0 / 1307674368000.0,
                                        1.0 / 20922789888000.0,
                                        1.0 / 355687428096000.0,
                                        1.0 / 6402373705728000.0,
                                        1.0 / 121645100408832000.0,
                                        1.0 / 2432902008176640000.0,
                                        1.0 / 51090942171709440000.0};

// 2^n = scale1 * scale2, p = expm1(x - n ln2).
template <class T> struct ExpParts {
  Vec<T> p, scale1, scale2;
};

template <class T> EFLA_INLINE ExpParts<T> exp_parts(Vec<T> x) {
  using C = ExpConstants<T>;
  x = x < splat<T>(C::lowest) ? splat<T>(C::lowest) : x;
  x = x > splat<T>(C::highest) ? splat<T>(C::highest) : x;
  Vec<T> n = (x * C::log2e + C::round_magic) - C::round_magic;
  Vec<T> r = x - n * C::ln2_high;
  r = r - n * C::ln2_low;
  Vec<T> p = splat<T>(T(kInverseFactorial[C::expm1_terms]));
  EFLA_UNROLL_FOR (int i = C::expm1_terms - 1; i >= 2; --i) p = p * r + T(kInverseFactorial[i]);
  p = r + (r * r) * p;
  // NaN must not reach the integer conversion; p propagates it.
  IntVec<T> k = __builtin_convertvector(n == n ? n : Vec<T>{}, IntVec<T>);
  IntVec<T> half = k >> 1;
  return {p, Vec<T>((half + C::bias) << C::mantissa), Vec<T>((k - half + C::bias) << C::mantissa)};
}

template <class T> EFLA_INLINE Vec<T> vexp(Vec<T> x) {
  ExpParts<T> e = exp_parts<T>(x);
  return (e.p * e.scale1 + e.scale1) * e.scale2;
}

template <class T> EFLA_INLINE Vec<T> vexpm1(Vec<T> x) {
  ExpParts<T> e = exp_parts<T>(x);
  Vec<T> power = e.scale1 * e.scale2;
  return e.p * power + (power - T(1));
}

template <class T> EFLA_INLINE Vec<T> sigmoid(Vec<T> z) { return T(1) / (vexp<T>(-z) + T(1)); }

// d (z sigmoid(z)) / dz, with s = sigmoid(z).
template <class T> EFLA_INLINE Vec<T> silu_slope(Vec<T> z, Vec<T> s) { return s * (T(1) + z * (T(1) - s)); }

// For x >= 0. expm1 returns tiny arguments unchanged, so the quotient is exact there; x = 0 is the limit 1.
template <class T> EFLA_INLINE Vec<T> phi1(Vec<T> x) {
  Vec<T> ratio = -vexpm1<T>(-x) / x;
  return x == Vec<T>{} ? splat<T>(1) : ratio;
}

// d phi1 / dx = (e^-x - phi1(x)) / x = sum_{n>=1} n (-1)^n x^(n-1) / (n+1)!; the series below 1, where the quotient cancels.
template <class T> EFLA_INLINE Vec<T> phi1_derivative(Vec<T> x, Vec<T> exp_minus_x, Vec<T> phi) {
  constexpr int terms = ExpConstants<T>::phi_terms;
  Vec<T> s = splat<T>(T(terms * kInverseFactorial[terms + 1] * (terms % 2 ? -1 : 1)));
  EFLA_UNROLL_FOR (int n = terms - 1; n >= 1; --n) s = s * x + T(n * kInverseFactorial[n + 1] * (n % 2 ? -1 : 1));
  Vec<T> quotient = (exp_minus_x - phi) / x;
  return x < splat<T>(1) ? s : quotient;
}

}  // namespace efla::EFLA_ISA
