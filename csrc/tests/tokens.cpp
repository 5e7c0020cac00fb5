// One pass over T tokens, for counting instructions: one sequence and head, float32, the gated delta rule, one thread.
//
//     efla_tokens forward|training|decoding WIDTH TOKENS [LEVEL]
//
// Count at two numbers of tokens: the difference leaves out start-up.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "plan.h"
#include "runtime.h"

using namespace efla;

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "expected forward|training|decoding WIDTH TOKENS [LEVEL]\n");
    return 2;
  }
  const std::string work = argv[1];
  const int64_t D = std::atoll(argv[2]), T = std::atoll(argv[3]);
  if (argc > 4) set_simd(argv[4]);
  std::minstd_rand rng(1);
  auto drawn = [&](int64_t n, float low, float high) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& y : x) y = low + (high - low) * float(rng() % 65536) / 65536;
    return x;
  };
  // All tokens read the same row, so that the difference counts no input. Decoding is T calls of one token.
  const int64_t tokens = work == "decoding" ? 1 : T;
  auto q = drawn(D, -1, 1), k = drawn(D, -0.1f, 0.1f), v = drawn(D, -1, 1), state = drawn(D * D, -1, 1);
  float gate = -0.05f, beta = 0.5f;
  std::vector<float> o(q.size()), dq(size_t(tokens * D)), dk(dq.size()), dv(dq.size()), d_gate(dq.size()),
      d_beta(dq.size());
  std::vector<float> boundaries(size_t(boundary_size(nullptr, 1, tokens, 1, int(D), int(D))));
  Problem p;
  p.rule = Rule::gated_delta, p.scale = 1, p.batch = p.sequences = 1, p.tokens = tokens,
  p.key_heads = p.value_heads = 1;
  p.K = p.V = int(D), p.threads = 1;
  p.q.data = q.data(), p.k.data = k.data(), p.v.data = v.data(), p.o.data = o.data();
  p.log_gate.data = &gate, p.beta.data = &beta;
  p.initial_state = p.final_state = state.data();
  if (work == "training") p.boundary_states = boundaries.data();
  for (int64_t call = 0; call < (work == "decoding" ? T : 1); ++call)
    if (run_forward(p)) return 1;
  if (work == "training") {
    p.d_o = p.o, p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
    p.d_log_gate = d_gate.data(), p.d_beta = d_beta.data();
    if (run_backward(p)) return 1;
  }
  return 0;
}
