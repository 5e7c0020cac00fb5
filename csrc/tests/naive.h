// Tensors of every element type in random layouts, and a naive implementation of the scan on them, for fuzz.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "plan.h"

namespace efla {

inline std::mt19937_64 rng;
inline int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
inline double normal() { return std::normal_distribution<double>()(rng); }
inline double uniform() { return std::uniform_real_distribution<double>()(rng); }

// --- element types -------------------------------------------------------------------------------------------------

inline size_t element_size(Dtype d) { return d == Dtype::float64 ? 8 : d == Dtype::float32 ? 4 : 2; }

inline double half_to_double(uint16_t h) {
  int exponent = (h >> 10) & 31, mantissa = h & 1023;
  double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(mantissa, -24)
                                 : std::ldexp(mantissa + 1024, exponent - 25);
  return h & 0x8000 ? -value : value;
}

inline double get(Dtype d, const void* p, int64_t i) {
  if (d == Dtype::float64) return static_cast<const double*>(p)[i];
  if (d == Dtype::float32) return static_cast<const float*>(p)[i];
  uint16_t bits = static_cast<const uint16_t*>(p)[i];
  if (d == Dtype::float16) return half_to_double(bits);
  uint32_t word = uint32_t(bits) << 16;
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}

// Any representable value near x is good enough.
inline void put(Dtype d, void* p, int64_t i, double x) {
  if (d == Dtype::float64) {
    static_cast<double*>(p)[i] = x;
  } else if (d == Dtype::float32) {
    static_cast<float*>(p)[i] = float(x);
  } else if (d == Dtype::bfloat16) {
    float f = float(x);
    uint32_t word;
    std::memcpy(&word, &f, 4);
    static_cast<uint16_t*>(p)[i] = std::isnan(x) ? 0x7fc0 : uint16_t(word >> 16);
  } else {
    uint16_t bits = 0x7e00;
    if (!std::isnan(x)) {
      int exponent;
      double m = std::frexp(std::fabs(x), &exponent);  // m in [0.5, 1)
      bits = exponent < -13 ? 0 : uint16_t(((exponent + 14) << 10) | (int(m * 2048) & 1023));
      if (x < 0) bits |= 0x8000;
    }
    static_cast<uint16_t*>(p)[i] = bits;
  }
}

// --- tensors -------------------------------------------------------------------------------------------------------

// [B, T, H, W] with random order of B, T, H in memory, gaps after rows, possibly negative token stride.
struct Tensor {
  Dtype dtype;
  int64_t B, T, H, W;
  std::vector<unsigned char> memory, before;
  Strided strided;
  int64_t origin = 0;

  Tensor(Dtype d, int64_t B, int64_t T, int64_t H, int64_t W, bool scalar) : dtype(d), B(B), T(T), H(H), W(W) {
    const int64_t row = W + (scalar ? pick(0, 1) : pick(0, 3));
    int64_t sizes[3] = {B, T, H}, strides[3], order[3] = {0, 1, 2}, step = row;
    std::shuffle(order, order + 3, rng);
    for (int64_t i : order) strides[i] = step, step *= sizes[i];
    if (pick(0, 3) == 0 && T > 0) origin = strides[1] * (T - 1), strides[1] = -strides[1];
    memory.resize(size_t(step > 0 ? step - (row - W) : 0) * element_size(d) + (step > 0 ? 0 : 8));
    for (size_t i = 0; i < memory.size() / element_size(d); ++i) put(d, memory.data(), int64_t(i), NAN);
    strided = {memory.data() + origin * int64_t(element_size(d)), strides[0], strides[1], strides[2]};
    before = memory;
  }
  int64_t index(int64_t b, int64_t t, int64_t h, int64_t w) const {
    return origin + b * strided.batch + t * strided.token + h * strided.head + w;
  }
  double at(int64_t b, int64_t t, int64_t h, int64_t w = 0) const {
    return get(dtype, memory.data(), index(b, t, h, w));
  }
  template <class F> void each(F f) const {
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < H; ++h)
          for (int64_t w = 0; w < W; ++w) f(index(b, t, h, w), b, t, h, w);
  }
  template <class F> void fill(F f) {
    each([&](int64_t i, int64_t, int64_t, int64_t, int64_t) { put(dtype, memory.data(), i, f()); });
  }
  // Whether everything outside the tensor's own elements is unchanged.
  bool gaps_intact() const {
    std::vector<unsigned char> now = memory;
    const size_t size = element_size(dtype);
    each([&](int64_t i, int64_t, int64_t, int64_t, int64_t) { std::memcpy(&now[i * size], &before[i * size], size); });
    return now == before;
  }
};

// A dense buffer of n elements, exactly that large.
struct Dense {
  Dtype dtype;
  std::vector<unsigned char> memory;
  Dense(Dtype d, int64_t n) : dtype(d), memory(size_t(n) * element_size(d) + (n ? 0 : 8)) {
    for (int64_t i = 0; i < n; ++i) put(d, memory.data(), i, NAN);
  }
  double at(int64_t i) const { return get(dtype, memory.data(), i); }
  void* data() { return memory.data(); }
};

// --- the naive implementation --------------------------------------------------------------------------------------

inline double phi1(double x) { return std::fabs(x) < 1e-9 ? 1 - x / 2 : -std::expm1(-x) / x; }

inline void coefficients(Rule r, double beta, double lam, double gate, double* c) {
  const double x = beta * lam, a = std::exp(gate);
  double e = beta;
  if (r == Rule::rk2) e = beta * (1 - x / 2);
  if (r == Rule::rk4) e = beta * (1 - x / 2 + x * x / 6 - x * x * x / 24);
  if (r == Rule::implicit_euler) e = beta / (1 + x);
  if (r == Rule::crank_nicolson) e = beta / (1 + x / 2);
  if (r == Rule::efla || r == Rule::gated_efla_log) e = beta * phi1(x);
  c[0] = 0, c[1] = e, c[2] = e;
  if (r == Rule::linear) c[1] = 0, c[2] = 1;
  if (r == Rule::ssd) c[0] = gate, c[1] = 0, c[2] = beta;
  if (r == Rule::gated_delta) c[0] = gate;
  if (r == Rule::gated_efla) c[0] = std::expm1(gate), c[1] = a * beta * phi1(a * x), c[2] = beta * phi1(1 - a + a * x);
  if (r == Rule::gated_efla_log) c[0] = gate, c[2] = beta * phi1(-gate + x);
}

struct Case {
  Problem p;
  Tensor q, k, v, o, d_o;
  Tensor c0, c1, c2;  // log_decay, erase, write; by a rule: log_gate, beta, unused
  std::vector<int64_t> cu;
  std::vector<double> initial, d_final;
  bool has_initial, has_d_final;
  std::string name;
};

// Results of one sequence and value head, added into dense double arrays with the layout of the outputs.
struct Reference {
  std::vector<double> o, final_state, dq, dk, dv, d0, d1, d2, d_initial;
};

using Row = std::vector<double>;
inline double dot(const Row& a, const Row& b) {
  double s = 0;
  for (size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

inline Row key_row(const Tensor& x, int64_t b, int64_t t, int64_t h, bool normalise, double& inverse) {
  Row r(size_t(x.W));
  for (int64_t i = 0; i < x.W; ++i) r[i] = x.at(b, t, h, i);
  inverse = normalise ? 1 / std::sqrt(dot(r, r) + 1e-6) : 1;
  for (double& y : r) y *= inverse;
  return r;
}

inline void naive(const Case& c, int64_t n, int64_t h, Reference& r) {
  const Problem& p = c.p;
  const int64_t K = p.K, V = p.V, kh = h / (p.value_heads / p.key_heads), b = c.cu.empty() ? n : 0;
  const int64_t begin = c.cu.empty() ? 0 : c.cu[n], length = c.cu.empty() ? p.tokens : c.cu[n + 1] - begin;
  const int64_t base = (n * p.value_heads + h) * K * V;
  std::vector<Row> S(length + 1, Row(K * V)), q(length), k(length), u(length, Row(V)), kS(length, Row(V));
  std::vector<double> qi(length), ki(length), ld(length), e(length), w(length);
  if (c.has_initial) std::copy_n(c.initial.begin() + base, K * V, S[0].begin());
  for (int64_t t = 0; t < length; ++t) {
    const int64_t at = begin + t;
    q[t] = key_row(c.q, b, at, kh, p.normalise_q, qi[t]);
    k[t] = key_row(c.k, b, at, kh, p.normalise_k, ki[t]);
    double in[3] = {c.c0.at(b, at, h), c.c1.at(b, at, h), c.c2.at(b, at, h)}, out[3] = {in[0], in[1], in[2]};
    if (p.rule != Rule::raw) coefficients(p.rule, in[1], dot(k[t], k[t]), in[0], out);
    ld[t] = out[0], e[t] = out[1], w[t] = out[2];
    const double a = std::exp(ld[t]);
    for (int64_t i = 0; i < V; ++i) {
      for (int64_t j = 0; j < K; ++j) kS[t][i] += k[t][j] * S[t][j * V + i];
      u[t][i] = w[t] * c.v.at(b, at, h, i) - a * e[t] * kS[t][i];
      double o = 0;
      for (int64_t j = 0; j < K; ++j) {
        S[t + 1][j * V + i] = a * S[t][j * V + i] + k[t][j] * u[t][i];
        o += S[t + 1][j * V + i] * q[t][j];
      }
      r.o[((b * p.tokens + at) * p.value_heads + h) * V + i] = p.scale * o;
    }
  }
  std::copy_n(S[length].begin(), K * V, r.final_state.begin() + base);

  Row dS(K * V);
  if (c.has_d_final) std::copy_n(c.d_final.begin() + base, K * V, dS.begin());
  for (int64_t t = length - 1; t >= 0; --t) {
    const int64_t at = begin + t, row = (b * p.tokens + at) * p.value_heads + h,
                  key = ((b * p.tokens + at) * p.key_heads + kh) * K;
    Row dq(K), dk(K), du(V);
    for (int64_t j = 0; j < K; ++j)
      for (int64_t i = 0; i < V; ++i) {
        const double g = c.d_o.at(b, at, h, i);
        dq[j] += p.scale * S[t + 1][j * V + i] * g;
        dS[j * V + i] += p.scale * q[t][j] * g;
      }
    for (int64_t j = 0; j < K; ++j)
      for (int64_t i = 0; i < V; ++i) du[i] += dS[j * V + i] * k[t][j];
    const double a = std::exp(ld[t]);
    double d[3] = {0, 0, 0};
    for (int64_t i = 0; i < V; ++i) {
      r.dv[row * V + i] = w[t] * du[i];
      d[2] += du[i] * c.v.at(b, at, h, i);
      d[1] -= a * kS[t][i] * du[i];
      d[0] -= a * e[t] * kS[t][i] * du[i];
      for (int64_t j = 0; j < K; ++j) {
        double& ds = dS[j * V + i];
        d[0] += a * ds * S[t][j * V + i];
        dk[j] += ds * u[t][i] - a * e[t] * S[t][j * V + i] * du[i];
        ds = a * (ds - e[t] * k[t][j] * du[i]);
      }
    }
    if (p.rule != Rule::raw) {  // chain rule by central differences of the coefficients
      double x[3] = {c.c1.at(b, at, h), dot(k[t], k[t]), c.c0.at(b, at, h)}, g[3];
      for (int i = 0; i < 3; ++i) {
        const double step = 1e-5 * (std::fabs(x[i]) + 1e-2);
        double y[3] = {x[0], x[1], x[2]}, high[3], low[3];
        y[i] = x[i] + step, coefficients(p.rule, y[0], y[1], y[2], high);
        y[i] = x[i] - step, coefficients(p.rule, y[0], y[1], y[2], low);
        g[i] = 0;
        for (int m = 0; m < 3; ++m) g[i] += d[m] * (high[m] - low[m]) / (2 * step);
      }
      d[0] = g[2], d[1] = g[0], d[2] = 0;
      for (int64_t j = 0; j < K; ++j) dk[j] += 2 * g[1] * k[t][j];
    }
    r.d0[row] = d[0], r.d1[row] = d[1], r.d2[row] = d[2];
    const double qd = dot(q[t], dq), kd = dot(k[t], dk);
    for (int64_t j = 0; j < K; ++j) {
      r.dq[key + j] += p.normalise_q ? qi[t] * (dq[j] - q[t][j] * qd) : dq[j];
      r.dk[key + j] += p.normalise_k ? ki[t] * (dk[j] - k[t][j] * kd) : dk[j];
    }
  }
  std::copy_n(dS.begin(), K * V, r.d_initial.begin() + base);
}

}  // namespace efla
