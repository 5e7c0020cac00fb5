// Random shapes, strides, types, rules and packed lengths at every SIMD level, compared with a naive implementation.
//
//     efla_fuzz [cases = 300] [seed = 1]        exits non-zero on the first mismatch or overwritten guard
//
// Where OpenMP is linked, each case also runs on three threads and must give the same bits as on one.
// Build with -DEFLA_BUILD_FUZZ=ON, and -DEFLA_SANITIZE=ON for the address and undefined-behaviour sanitizers. Buffers are
// exactly as large as their tensors. Gaps between rows are filled with NaN and must not change.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "naive.h"
#include "plan.h"
#include "runtime.h"

using namespace efla;

namespace {

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
