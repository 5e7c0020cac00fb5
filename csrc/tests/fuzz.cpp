// Random shapes, strides, types, rules and packed lengths at every SIMD level, compared with a naive implementation.
//
//     efla_fuzz [cases = 300] [seed = 1]        exits non-zero on the first mismatch or overwritten guard
//
// Where OpenMP is linked, each case also runs on three threads and must give the same bits as on one.
// Build with -DEFLA_BUILD_FUZZ=ON, and -DEFLA_SANITIZE=ON for the address and undefined-behaviour sanitizers. Buffers are
// exactly as large as their tensors. Gaps between rows are filled with NaN and must not change.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "plan.h"
#include "runtime.h"

using namespace efla;

namespace {

std::mt19937_64 rng;
int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
double normal() { return std::normal_distribution<double>()(rng); }
double uniform() { return std::uniform_real_distribution<double>()(rng); }

// --- element types -------------------------------------------------------------------------------------------------

size_t element_size(Dtype d) { return d == Dtype::float64 ? 8 : d == Dtype::float32 ? 4 : 2; }

double half_to_double(uint16_t h) {
  int exponent = (h >> 10) & 31, mantissa = h & 1023;
  double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(mantissa, -24)
                                 : std::ldexp(mantissa + 1024, exponent - 25);
  return h & 0x8000 ? -value : value;
}

double get(Dtype d, const void* p, int64_t i) {
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
void put(Dtype d, void* p, int64_t i, double x) {
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

double phi1(double x) { return std::fabs(x) < 1e-9 ? 1 - x / 2 : -std::expm1(-x) / x; }

void coefficients(Rule r, double beta, double lam, double gate, double* c) {
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
double dot(const Row& a, const Row& b) {
  double s = 0;
  for (size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

Row key_row(const Tensor& x, int64_t b, int64_t t, int64_t h, bool normalise, double& inverse) {
  Row r(size_t(x.W));
  for (int64_t i = 0; i < x.W; ++i) r[i] = x.at(b, t, h, i);
  inverse = normalise ? 1 / std::sqrt(dot(r, r) + 1e-6) : 1;
  for (double& y : r) y *= inverse;
  return r;
}

void naive(const Case& c, int64_t n, int64_t h, Reference& r) {
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

// --- one case ------------------------------------------------------------------------------------------------------

Case make_case() {
  const int64_t widths[] = {1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 40, 64, 65, 80};
  const Dtype dtype = Dtype(pick(0, 3));
  const Dtype compute = dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
  const int64_t K = widths[pick(0, 13)], V = widths[pick(0, 13)], Hk = pick(1, 3), Hv = Hk * pick(1, 3);
  int64_t B = pick(0, 9) ? pick(1, 3) : 0, T = pick(0, 4) ? pick(0, 12) : pick(13, 150), N = B;
  std::vector<int64_t> cu;
  if (pick(0, 2) == 0) {
    B = 1, N = pick(1, 4), cu = {0};
    for (int64_t n = 0; n < N; ++n) cu.push_back(cu.back() + (pick(0, 3) ? pick(0, 20) : pick(60, 140)));
    T = cu.back();
  }
  Problem p;
  p.dtype = dtype, p.rule = Rule(pick(-1, kRuleCount - 1));
  p.normalise_q = pick(0, 1) && K > 1, p.normalise_k = pick(0, 1) && K > 1;  // K = 1: the gradient is rounding only
  p.scale = 0.3 + uniform();
  p.batch = B, p.tokens = T, p.sequences = N, p.key_heads = Hk, p.value_heads = Hv, p.K = int(K), p.V = int(V);
  Case c{p,
         Tensor(dtype, B, T, Hk, K, false),
         Tensor(dtype, B, T, Hk, K, false),
         Tensor(dtype, B, T, Hv, V, false),
         Tensor(dtype, B, T, Hv, V, false),
         Tensor(dtype, B, T, Hv, V, false),
         Tensor(compute, B, T, Hv, 1, true),
         Tensor(compute, B, T, Hv, 1, true),
         Tensor(compute, B, T, Hv, 1, true),
         cu,
         {},
         {},
         pick(0, 1) == 1,
         pick(0, 1) == 1,
         ""};
  const double key_scale = 1.2 / std::sqrt(double(K));
  c.q.fill(normal), c.v.fill(normal), c.d_o.fill(normal);
  c.k.fill([&] { return key_scale * normal(); });
  // Strong gates multiply to denormal numbers within a quad or a block, weak ones never do.
  const double strength = T % 3 ? 1 : compute == Dtype::float64 ? 350 : 44;
  c.c0.fill([&] { return pick(0, 3) ? -strength * uniform() : 0.0; });
  c.c1.fill(uniform), c.c2.fill(uniform);
  c.initial.resize(size_t(N * Hv * K * V)), c.d_final.resize(c.initial.size());
  for (double& x : c.initial) x = float(normal());
  for (double& x : c.d_final) x = float(normal());
  char text[256];
  std::snprintf(text, sizeof text,
                "dtype %d rule %d normalise %d %d B %ld T %ld N %ld Hk %ld Hv %ld K %ld V %ld packed %d", int(dtype),
                int(p.rule), p.normalise_q, p.normalise_k, long(B), long(T), long(N), long(Hk), long(Hv), long(K),
                long(V), !cu.empty());
  c.name = text;
  return c;
}

bool close(const char* what, const Case& c, const std::vector<double>& want, const std::vector<double>& have,
           double tolerance) {
  double scale = 1e-2, worst = 0;
  for (double x : want) scale = std::fmax(scale, std::fabs(x));
  for (size_t i = 0; i < want.size(); ++i)
    if (!(std::fabs(want[i] - have[i]) <= tolerance * scale))
      worst = std::fmax(worst, std::isnan(have[i]) ? INFINITY : std::fabs(want[i] - have[i]));
  if (worst > 0)
    std::fprintf(stderr, "MISMATCH %s [%s] %s: off by %g of %g\n", what, active_simd().c_str(), c.name.c_str(), worst,
                 scale);
  return worst == 0;
}

std::vector<double> values(const Dense& d, size_t n) {
  std::vector<double> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = d.at(int64_t(i));
  return out;
}

// Compares one case with `want`; `results` are the bits of everything that it computed.
bool run_case(Case& c, const Reference& want, int threads, std::vector<unsigned char>& results) {
  Problem p = c.p;
  p.threads = threads;
  const Dtype compute = p.dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
  const int64_t states = int64_t(c.initial.size()), scalars = p.batch * p.tokens * p.value_heads;
  const int64_t keys = p.batch * p.tokens * p.key_heads * p.K;
  const double tolerances[] = {1e-4, 3e-2, 4e-3, 1e-8};
  const double tight = p.dtype == Dtype::float64 ? 1e-8 : 1e-4, loose = tolerances[int(p.dtype)];
  Dense initial(compute, states), final_state(compute, states), d_final(compute, states), d_initial(compute, states);
  for (int64_t i = 0; i < states; ++i)
    put(compute, initial.data(), i, c.initial[i]), put(compute, d_final.data(), i, c.d_final[i]);
  const int64_t* cu = c.cu.empty() ? nullptr : c.cu.data();
  Dense boundary_states(compute, boundary_size(cu, p.sequences, p.tokens, p.value_heads, p.K, p.V));
  c.o.memory = c.o.before;
  p.q = c.q.strided, p.k = c.k.strided, p.v = c.v.strided, p.o = c.o.strided, p.d_o = c.d_o.strided;
  p.o.data = c.o.memory.data() + c.o.origin * int64_t(element_size(p.dtype));
  const bool raw = p.rule == Rule::raw;
  (raw ? p.log_decay : p.log_gate) = c.c0.strided, (raw ? p.erase : p.beta) = c.c1.strided, p.write = c.c2.strided;
  p.cu_seqlens = cu;
  p.initial_state = c.has_initial ? initial.data() : nullptr;
  p.boundary_states = boundary_states.data();
  p.final_state = final_state.data();
  bool ok = run_forward(p) == 0;

  std::vector<double> o(want.o.size());
  c.o.each([&](int64_t, int64_t b, int64_t t, int64_t h, int64_t w) {
    o[((b * p.tokens + t) * p.value_heads + h) * p.V + w] = c.o.at(b, t, h, w);
  });
  ok &=
      close("o", c, want.o, o, loose) && close("final state", c, want.final_state, values(final_state, states), tight);
  if (!c.o.gaps_intact()) std::fprintf(stderr, "OVERWRITTEN guard of o: %s\n", c.name.c_str()), ok = false;

  Dense dq(p.dtype, keys), dk(p.dtype, keys), dv(p.dtype, scalars * p.V);
  Dense d0(compute, scalars), d1(compute, scalars), d2(compute, scalars);
  p.d_final_state = c.has_d_final ? d_final.data() : nullptr;
  p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data(), p.d_initial_state = d_initial.data();
  (raw ? p.d_log_decay : p.d_log_gate) = d0.data(), (raw ? p.d_erase : p.d_beta) = d1.data(), p.d_write = d2.data();
  ok &= run_backward(p) == 0;
  ok &= close("dq", c, want.dq, values(dq, keys), loose) && close("dk", c, want.dk, values(dk, keys), loose) &&
        close("dv", c, want.dv, values(dv, want.dv.size()), loose) &&
        close("d initial state", c, want.d_initial, values(d_initial, states), tight);
  const double chain = raw ? tight : std::fmax(tight, 1e-6);  // the reference differentiates numerically
  const RuleFacts& facts = raw ? kRaw : kRules[int(p.rule)];
  if (facts.has_decay) ok &= close("d log_decay or log_gate", c, want.d0, values(d0, scalars), chain);
  if (raw || facts.needs_beta) ok &= close("d erase or beta", c, want.d1, values(d1, scalars), chain);
  if (raw) ok &= close("d write", c, want.d2, values(d2, scalars), tight);

  for (const auto* memory : {&c.o.memory, &final_state.memory, &dq.memory, &dk.memory, &dv.memory, &d0.memory,
                             &d1.memory, &d2.memory, &d_initial.memory})
    results.insert(results.end(), memory->begin(), memory->end());

  volatile float tiny = std::numeric_limits<float>::min();
  if (tiny * 0.5f == 0) std::fprintf(stderr, "DENORMALS still flushed after %s\n", c.name.c_str()), ok = false;

  // In place: overwriting the initial state must give the same bits.
  if (c.has_initial) {
    Dense again = initial;
    p.initial_state = p.final_state = again.data();
    p.boundary_states = nullptr;
    ok &= run_forward(p) == 0;
    if (again.memory != final_state.memory) std::fprintf(stderr, "IN PLACE differs: %s\n", c.name.c_str()), ok = false;
    // A beta outside the rule's domain is reported before the state is written.
    if (scalars && facts.needs_beta) {
      Dense untouched = initial;
      Tensor beta = c.c1;
      beta.fill([] { return -1.0; });
      p.beta = beta.strided, p.beta.data = beta.memory.data() + beta.origin * int64_t(element_size(compute));
      p.initial_state = p.final_state = untouched.data(), p.check_domain = true;
      ok &= run_forward(p) == kNegativeBeta;
      if (untouched.memory != initial.memory)
        std::fprintf(stderr, "REFUSED but written: %s\n", c.name.c_str()), ok = false;
    }
  }
  return ok;
}

// Inconsistent sizes are refused before anything is read or written, so no pointers are needed.
bool refused_case() {
  Problem p;
  p.batch = p.sequences = 2, p.tokens = 5, p.key_heads = 2, p.value_heads = 4, p.K = 8, p.V = 8;
  std::vector<int64_t> cu;
  switch (pick(0, 9)) {
    case 0: p.K = pick(0, 1) ? 0 : 257; break;
    case 1: p.V = pick(0, 1) ? -3 : 300; break;
    case 2: p.value_heads = pick(0, 1) ? 3 : 0; break;
    case 3: p.key_heads = pick(0, 1) ? 0 : -2; break;
    case 4: p.sequences = pick(0, 1) ? 3 : 1; break;
    case 5: p.tokens = -1; break;
    case 6: p.dtype = Dtype(pick(4, 9)); break;
    case 7: p.rule = Rule(kRuleCount); break;
    case 8: cu = {0, 2, 5}; break;  // B is not 1
    default:
      p.batch = 1, cu = pick(0, 1) ? std::vector<int64_t>{0, 4, 3, 5} : std::vector<int64_t>{0, 2, 5 + pick(1, 9)};
  }
  if (!cu.empty()) p.cu_seqlens = cu.data(), p.sequences = int64_t(cu.size()) - 1;
  for (auto run : {run_forward, run_backward}) {
    try {
      run(p);
    } catch (const std::invalid_argument&) {
      continue;
    }
    std::fprintf(stderr, "NOT REFUSED: a problem whose sizes do not fit\n");
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  rng.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
#if defined(_OPENMP)
  omp_set_dynamic(0);  // teams of the size asked for
  set_parallel_runtime("");
#endif
  for (int i = 0; i < cases; ++i) {
    if (!refused_case()) return 1;
    Case c = make_case();
    const Problem& p = c.p;
    const size_t scalars = size_t(p.batch * p.tokens * p.value_heads),
                 keys = size_t(p.batch * p.tokens * p.key_heads * p.K);
    Reference want{Row(scalars * p.V), Row(c.initial.size()), Row(keys),
                   Row(keys),          Row(scalars * p.V),    Row(scalars),
                   Row(scalars),       Row(scalars),          Row(c.initial.size())};
    for (int64_t n = 0; n < p.sequences; ++n)
      for (int64_t h = 0; h < p.value_heads; ++h) naive(c, n, h, want);
    for (const std::string& level : simd_levels()) {
      set_simd(level);
      std::vector<unsigned char> one, three;
      if (!run_case(c, want, 1, one) || !run_case(c, want, 3, three)) return 1;
      if (one != three) {
        std::fprintf(stderr, "THREADS change the bits [%s] %s\n", level.c_str(), c.name.c_str());
        return 1;
      }
    }
  }
  std::string levels;
  for (const std::string& level : simd_levels()) levels += " " + level;
  std::printf("%d cases at%s, %s: all match\n", cases, levels.c_str(),
              has_parallel_runtime() ? "1 and 3 threads" : "1 thread (no OpenMP)");
  return 0;
}
