// The rules' formulas and gradients: (beta, lam = k.k, log_gate) -> (decay = exp(log_decay), erase, write).
//
// The same formulas in Python are in src/efla/rules; ../rule_table.h has the properties of each rule.
// With x = beta lam, a = exp(log_gate), phi1(x) = (1 - e^-x) / x:
//
//     efla            erase = write = beta phi1(x)
//     gated_efla      log_decay = -(1 - a), erase = a beta phi1(a x), write = beta phi1((1 - a) + a x)
//     gated_efla_log  log_decay = log_gate, erase = beta phi1(x),     write = beta phi1(-log_gate + x)
//
// lam may be 1e-36 or 1e36, and x may overflow. Where x > 1, the code computes beta phi1(y) with y = c + b lam as
// -expm1(-y) / (c/beta + (b/beta) lam), which does not need x and tends to 1/lam. The gradient of lam is returned as the
// factors of dk += 2 g (r k), because the product g r may overflow where dk does not.
#pragma once

#include "vmath.h"

namespace efla::EFLA_ISA {

EFLA_INLINE const RuleFacts& facts(Rule rule) { return rule == Rule::raw ? kRaw : kRules[int(rule)]; }

template <class T> struct Coefficients {
  Vec<T> decay, erase, write;
};

template <class T> struct RuleGradient {
  Vec<T> beta, log_gate;
  Vec<T> g1, r1, g2, r2;  // dk += 2 (g1 (r1 k) + g2 (r2 k))
};

// beta phi1(x), x = beta lam.
template <class T> EFLA_INLINE Vec<T> exact_erase(Vec<T> beta, Vec<T> lam) {
  Vec<T> x = beta * lam;
  Vec<T> m = -vexpm1<T>(-x);
  Vec<T> small = beta * (x == Vec<T>{} ? splat<T>(1) : m / x);
  return x > splat<T>(1) ? m / lam : small;
}

// The gated exact flow: erase = b phi1(b lam), write = beta phi1(c + b lam), b = share * beta.
template <class T> struct GatedTerms {
  Vec<T> share, c, b, x, y;
};

template <class T> EFLA_INLINE GatedTerms<T> gated_terms(Rule rule, Vec<T> beta, Vec<T> log_gate, Vec<T> lam) {
  GatedTerms<T> g;
  bool paper = rule == Rule::gated_efla;
  g.share = paper ? vexp<T>(log_gate) : splat<T>(1);
  // A gate of exactly 0 is an infinite rate, and the quotient of two infinite rates is NaN.
  const Vec<T> rate = -log_gate, most = splat<T>(T(1e30));
  g.c = paper ? -vexpm1<T>(log_gate) : (rate < most ? rate : most);
  g.b = paper ? g.share * beta : beta;
  g.x = g.b * lam;
  g.y = g.c + g.x;
  return g;
}

template <class T> EFLA_INLINE Vec<T> gated_write(const GatedTerms<T>& g, Vec<T> beta, Vec<T> lam) {
  Vec<T> m = -vexpm1<T>(-g.y);
  Vec<T> small = beta * (g.y == Vec<T>{} ? splat<T>(1) : m / g.y);
  return g.x > splat<T>(1) ? m / (g.c / beta + g.share * lam) : small;
}

template <class T> EFLA_INLINE Coefficients<T> rule_forward(Rule rule, Vec<T> beta, Vec<T> log_gate, Vec<T> lam) {
  const Vec<T> one = splat<T>(1), zero{};
  Vec<T> x = beta * lam;
  switch (rule) {
    case Rule::linear: return {one, zero, one};
    case Rule::ssd: return {vexp<T>(log_gate), zero, beta};
    case Rule::delta: return {one, beta, beta};
    case Rule::gated_delta: return {vexp<T>(log_gate), beta, beta};
    case Rule::rk2: {
      Vec<T> e = beta * (one - x * T(0.5));
      return {one, e, e};
    }
    case Rule::rk4: {
      Vec<T> e = beta * (((x * T(-1.0 / 24) + T(1.0 / 6)) * x - T(0.5)) * x + T(1));
      return {one, e, e};
    }
    case Rule::implicit_euler: {
      Vec<T> e = x > one ? one / (one / beta + lam) : beta / (one + x);
      return {one, e, e};
    }
    case Rule::crank_nicolson: {
      Vec<T> e = x > one ? one / (one / beta + lam * T(0.5)) : beta / (one + x * T(0.5));
      return {one, e, e};
    }
    case Rule::efla: {
      Vec<T> e = exact_erase<T>(beta, lam);
      return {one, e, e};
    }
    default: {
      GatedTerms<T> g = gated_terms<T>(rule, beta, log_gate, lam);
      Vec<T> decay = vexp<T>(rule == Rule::gated_efla ? -g.c : log_gate);
      return {decay, exact_erase<T>(g.b, lam), gated_write<T>(g, beta, lam)};
    }
  }
}

// Gradient of b phi1(b lam): e^-x for b; for lam, b^2 phi1'(x) as the factors (g, r).
template <class T>
EFLA_INLINE void exact_norm_gradient(Vec<T> upstream, Vec<T> b, Vec<T> lam, Vec<T> erase, Vec<T> exp_minus_x, Vec<T>& g,
                                     Vec<T>& r) {
  Vec<T> x = b * lam;
  auto large = x > splat<T>(1);
  Vec<T> slope = phi1_derivative<T>(x, exp_minus_x, phi1<T>(x));
  g = upstream * (large ? b * exp_minus_x - erase : b * slope);
  r = large ? splat<T>(1) / lam : b;
}

template <class T>
EFLA_INLINE RuleGradient<T> gated_backward(Rule rule, Vec<T> beta, Vec<T> log_gate, Vec<T> lam, Vec<T> d_log_decay,
                                           Vec<T> d_erase, Vec<T> d_erase_scaled, Vec<T> d_write) {
  const Vec<T> one = splat<T>(1);
  GatedTerms<T> t = gated_terms<T>(rule, beta, log_gate, lam);
  Vec<T> erase = exact_erase<T>(t.b, lam), write = gated_write<T>(t, beta, lam);
  Vec<T> exp_x = vexp<T>(-t.x), exp_y = vexp<T>(-t.y), phi = phi1<T>(t.y), slope = phi1_derivative<T>(t.y, exp_y, phi);
  auto y_large = t.y > one, x_large = t.x > one;
  // rho = x/y and 1/y, also where x and y are infinite.
  Vec<T> rho = x_large ? one / (one + t.c / t.x) : t.x / t.y;
  Vec<T> write_beta = y_large ? phi * (t.c / t.y) + rho * exp_y : phi + t.x * slope;
  // d write / dy, times y where y > 1: it is (beta e^-y - write) / y there.
  Vec<T> lift = d_write * (y_large ? beta * exp_y - write : beta * slope);

  RuleGradient<T> out;
  exact_norm_gradient<T>(d_erase, t.b, lam, erase, exp_x, out.g1, out.r1);
  // With keys of 1e18 and a tiny b, d_erase overflows but b d_erase = d_erase_scaled / phi1(x) does not.
  const Vec<T> phi_x = phi1<T>(t.x), per_b = d_erase_scaled / phi_x;
  const auto overflow = d_erase - d_erase != Vec<T>{};
  const Vec<T> exp_per_b = exp_x == Vec<T>{} ? Vec<T>{} : exp_x * per_b;  // per_b is infinite where x is
  out.g1 = overflow ? (x_large ? exp_per_b - d_erase_scaled : per_b * phi1_derivative<T>(t.x, exp_x, phi_x)) : out.g1;
  out.g2 = lift;
  out.r2 = y_large ? (x_large ? one / (t.c / t.b + lam) : t.b / t.y) : t.b;
  out.beta = (overflow ? exp_per_b / beta : d_erase * (exp_x * t.share)) + d_write * write_beta;
  if (rule == Rule::gated_efla) {
    // dy/dlog_gate = -a + a beta lam = x - a, and d log_decay / d log_gate = a.
    Vec<T> dy = y_large ? rho - t.share / t.y : t.x - t.share;
    out.log_gate = d_log_decay * t.share + (overflow ? exp_per_b : d_erase * (exp_x * t.b)) + lift * dy;
  } else {
    out.log_gate = d_log_decay - lift * (y_large ? one / t.y : one);
  }
  return out;
}

template <class T>
EFLA_INLINE RuleGradient<T> rule_backward(Rule rule, Vec<T> beta, Vec<T> log_gate, Vec<T> lam, Vec<T> d_log_decay,
                                          Vec<T> d_erase, Vec<T> d_erase_scaled, Vec<T> d_write) {
  const Vec<T> one = splat<T>(1), zero{};
  Vec<T> x = beta * lam, both = d_erase + d_write;
  switch (rule) {
    case Rule::linear: return {zero, zero, zero, zero, zero, zero};
    case Rule::ssd: return {d_write, d_log_decay, zero, zero, zero, zero};
    case Rule::delta: return {both, zero, zero, zero, zero, zero};
    case Rule::gated_delta: return {both, d_log_decay, zero, zero, zero, zero};
    case Rule::rk2: return {both * (one - x), zero, both * beta * T(-0.5), beta, zero, zero};
    case Rule::rk4: {
      Vec<T> slope = (x * T(-1.0 / 8) + T(1.0 / 3)) * x - T(0.5);
      Vec<T> d_beta = ((x * T(-1.0 / 6) + T(0.5)) * x - T(1)) * x + T(1);
      return {both * d_beta, zero, both * (beta * slope), beta, zero, zero};
    }
    case Rule::implicit_euler: {
      Vec<T> y = one / (one + x);
      Vec<T> e = x > one ? one / (one / beta + lam) : beta * y;
      return {both * y * y, zero, -(both * e), e, zero, zero};
    }
    case Rule::crank_nicolson: {
      Vec<T> y = one / (one + x * T(0.5));
      Vec<T> e = x > one ? one / (one / beta + lam * T(0.5)) : beta * y;
      return {both * y * y, zero, both * e * T(-0.5), e, zero, zero};
    }
    case Rule::efla: {
      Vec<T> decayed = vexp<T>(-x);
      RuleGradient<T> out{both * decayed, zero, zero, zero, zero, zero};
      exact_norm_gradient<T>(both, beta, lam, exact_erase<T>(beta, lam), decayed, out.g1, out.r1);
      return out;
    }
    default: return gated_backward<T>(rule, beta, log_gate, lam, d_log_decay, d_erase, d_erase_scaled, d_write);
  }
}

}  // namespace efla::EFLA_ISA
