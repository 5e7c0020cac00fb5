// One decoded token of a linear-attention layer, from its projections to the input of the output projection:
//
//     q, k, v = silu(conv(q, k, v)),   beta = factor sigmoid(b),   log_gate = -exp(A_log) softplus(a + dt_bias)
//     S = one step of the rule,        o = scale S^T q,            y = RMSNorm(o) weight silu(g)
//
// or of a Mamba-2 layer, whose norm runs over all heads of a token (in rows.cpp, after this kernel):
//
//     beta = softplus(b + dt_bias),    log_gate = -exp(A_log) beta,                y = (o + D v) silu(g)
//
// A task is one sequence and one key head with its group of value heads: channels, memories and outputs that no other task
// touches. Convolution states and memories are updated in place.
#include <cmath>

#include "decode.h"
#include "rows.h"

namespace efla::EFLA_ISA {
namespace {

template <class T> T softplus(T x) { return x > T(20) ? x : std::log1p(std::exp(x)); }
template <class T> T log_sigmoid(T x) { return (x < 0 ? x : T(0)) - std::log1p(std::exp(-std::fabs(x))); }

template <class E> Compute<E> element(const void* data, int64_t i) {
  return load_some(static_cast<const E*>(data) + i, 1)[0];
}

// Element i of a tensor [B, 1, columns] in the sequence `batch`.
template <class E> Compute<E> element(const Strided& x, int64_t batch, int64_t i) {
  return element<E>(x.data, batch * x.batch + i);
}

// silu(conv(x)) of the channels [first, first + count) of one projection, into `to` with zeros up to `padded`. `offset` is
// the projection's first channel in the convolution state, which moves on by one token.
template <class E>
void convolve(const MixerStep& p, const Strided& x, const void* weight, const void* bias, int64_t offset, int64_t batch,
              int64_t first, int count, Compute<E>* to, int padded) {
  using T = Compute<E>;
  const E* input = static_cast<const E*>(x.data) + batch * x.batch + first;
  load_row(input, count, to, padded);
  const int W = p.conv_width, past = W - 1, kept = p.conv_kept;
  if (W) {
    alignas(64) T w[kMaxWidth * kMaxConvWidth], s[kMaxWidth * kMaxConvWidth];
    E* state = static_cast<E*>(p.conv_state) + (batch * p.conv_channels + offset + first) * kept;
    load_row(static_cast<const E*>(weight) + first * W, count * W, w, round_up(count * W, 16));
    load_row(state, count * kept, s, round_up(count * kept, 16));
    for (int c = 0; c < count; ++c) {
      T z = 0;
      for (int i = 0; i < past; ++i) z += w[c * W + i] * s[(c + 1) * kept - past + i];
      to[c] = z + w[c * W + past] * to[c];
      if (bias) to[c] += element<E>(bias, first + c);
      for (int i = 0; i + 1 < kept; ++i) state[c * kept + i] = state[c * kept + i + 1];
      state[(c + 1) * kept - 1] = input[c];
    }
  }
  for (int c = 0; c < padded; c += kLanes<T>) {
    const Vec<T> z = load(to + c);
    store(to + c, z * sigmoid<T>(z));
  }
}

template <class E> void step_group(const MixerStep& p, int64_t index) {
  using T = Compute<E>;
  const int64_t batch = index / p.key_heads, key_head = index % p.key_heads, group = p.value_heads / p.key_heads;
  const int padded_K = round_up(p.K, 16), padded_V = round_up(p.V, 16);
  alignas(64) T q[kMaxWidth], k[kMaxWidth], v[kMaxWidth], o[kMaxWidth];
  convolve<E>(p, p.q, p.q_weight, p.q_bias, p.q_channel, batch, key_head * p.K, p.K, q, padded_K);
  convolve<E>(p, p.k, p.k_weight, p.k_bias, p.k_channel, batch, key_head * p.K, p.K, k, padded_K);

  T beta = 1, log_gate = 0;
  Problem one;  // one token of one head, in the compute type
  one.rule = p.rule, one.normalise_q = p.normalise_q, one.normalise_k = p.normalise_k, one.scale = p.scale;
  one.q.data = q, one.k.data = k, one.v.data = v, one.o.data = o, one.beta.data = &beta, one.log_gate.data = &log_gate;
  one.batch = one.tokens = one.sequences = one.key_heads = one.value_heads = 1, one.K = p.K, one.V = p.V;
  const Task task{0, 0, 0, 1, 0, 1, 0, 1, 0, (p.V + kPanel - 1) / kPanel, 0, 0};
  DecodeTokens<T> d;
  ScalarTile<T> s;
  s.beta = d.beta, s.log_gate = d.log_gate, s.decay = d.decay, s.erase = d.erase, s.write = d.write;
  decode_keys<T>(one, task, 0, d);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    convolve<E>(p, p.v, p.v_weight, p.v_bias, p.v_channel, batch, head * p.V, p.V, v, padded_V);
    if (p.D) {
      beta = softplus(element<E>(p.b, batch, head) + element<E>(p.dt_bias, head));
      log_gate = -std::exp(element<E>(p.A_log, head)) * beta;
    } else if (p.b.data) {
      beta = T(p.beta_factor) * sigmoid<T>(splat<T>(element<E>(p.b, batch, head)))[0];
    }
    if (p.a.data) {
      const T raw = element<E>(p.a, batch, head);
      log_gate = p.A_log ? -std::exp(element<E>(p.A_log, head)) * softplus(raw + element<E>(p.dt_bias, head))
                         : log_sigmoid(raw) / T(16);
    }
    unsigned status = 0;  // beta >= 0 and log_gate <= 0 by construction
    load_scalars<T>(one, task, 0, 1, kBlock, 0, d.lam, s, &status);
    T* memory = static_cast<T*>(p.memory) + (batch * p.value_heads + head) * p.K * p.V;
    one.initial_state = one.final_state = memory;
    decode_head<T>(one, task, d, 0);
    for (int c = p.V; c < padded_V; ++c) o[c] = 0;
    const T r = p.D ? T(1) : T(1) / std::sqrt(row_dot<T>(o, o, padded_V) / T(p.V) + T(p.eps));
    const T skip = p.D ? element<E>(p.D, head) : T(0);
    E* y = static_cast<E*>(p.y) + (batch * p.value_heads + head) * p.V;
    for (int c = 0; c < p.V; c += kLanes<T>) {
      const int left = p.V - c;
      Vec<T> out = p.D ? load(o + c) + skip * load(v + c)
                       : load(o + c) * r * load_some(static_cast<const E*>(p.norm_weight) + c, left);
      if (p.g.data) {
        const Vec<T> z = load_some(static_cast<const E*>(p.g.data) + batch * p.g.batch + head * p.V + c, left);
        out = out * (z * sigmoid<T>(z));
      }
      store_some(y + c, out, left);
    }
  }
}

}  // namespace

void mixer_step(const MixerStep& p, int64_t index) {
  with_elements(p.dtype, [&]<class E>(E) { step_group<E>(p, index); });
}

}  // namespace efla::EFLA_ISA
