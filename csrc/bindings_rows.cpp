// Python bindings of the kernels around the scan: norm, convolution, gate, products, and the decoding steps of layers.
#include <optional>

#include "bindings.h"
#include "rows.h"

namespace {

struct NormInputs {
  Tensor x, weight, gate;
  NormInputs(nb::handle x, nb::handle weight, nb::handle gate)
      : x(x, "x"), weight(weight, "weight"), gate(gate, "gate") {}

  efla::NormProblem problem(double factor, double eps) const {
    efla::NormProblem p;
    p.dtype = x.dimensions(2).dtype();
    p.rows = x.size(0), p.width = int(x.size(1)), p.factor = factor, p.eps = eps;
    p.x = x.dense({p.rows, p.width}, p.dtype);
    p.weight = weight.dense({p.width}, compute_type(p.dtype));
    p.gate = gate.dense({p.rows, p.width}, p.dtype);
    return p;
  }
};

void norm_forward(nb::handle x, nb::handle weight, nb::handle gate, nb::handle y, double factor, double eps,
                  int threads) {
  const NormInputs inputs(x, weight, gate);
  const Tensor ty(y, "y");
  efla::NormProblem p = inputs.problem(factor, eps);
  p.y = ty.dimensions(2).dense({p.rows, p.width}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_norm_forward(p, threads);
}

void norm_backward(nb::handle x, nb::handle weight, nb::handle gate, nb::handle dy, nb::handle dx, nb::handle dgate,
                   nb::handle dweight_parts, double factor, double eps, int threads) {
  const NormInputs inputs(x, weight, gate);
  const Tensor tdy(dy, "dy"), tdx(dx, "dx"), tdgate(dgate, "dgate"), parts(dweight_parts, "dweight_parts");
  efla::NormProblem p = inputs.problem(factor, eps);
  p.parts = efla::norm_parts(p.rows);
  p.dy = tdy.dimensions(2).dense({p.rows, p.width}, p.dtype);
  p.dx = tdx.dimensions(2).dense({p.rows, p.width}, p.dtype);
  check(bool(tdgate) == bool(inputs.gate), "a gate and its gradient go together");
  p.dgate = tdgate.dense({p.rows, p.width}, p.dtype);
  p.dweight_parts = parts.dense({p.parts, p.width}, compute_type(p.dtype));
  nb::gil_scoped_release release;
  efla::run_norm_backward(p, threads);
}

struct ConvInputs {
  Tensor x, weight, bias, past, cu_seqlens;
  ConvInputs(nb::handle x, nb::handle weight, nb::handle bias, nb::handle past, nb::handle cu_seqlens)
      : x(x, "x"), weight(weight, "weight"), bias(bias, "bias"), past(past, "past"),
        cu_seqlens(cu_seqlens, "cu_seqlens") {}

  efla::ConvProblem problem(bool silu) const {
    efla::ConvProblem p;
    p.dtype = x.dimensions(3).dtype(), p.silu = silu;
    p.batch = x.size(0), p.tokens = x.size(1), p.channels = int(x.size(2)), p.width = int(weight.dimensions(2).size(0));
    p.sequences = cu_seqlens ? cu_seqlens.dimensions(1).size(0) - 1 : p.batch;
    check(p.sequences >= 0, "cu_seqlens must not be empty");
    const Dtype compute = compute_type(p.dtype);
    const efla::Strided rows = x.rows({p.batch, p.tokens, p.channels}, p.dtype);
    p.x = rows.data, p.x_batch = rows.batch, p.x_token = rows.token;
    p.weight = weight.dense({p.width, p.channels}, compute);
    p.bias = bias.dense({p.channels}, compute);
    p.past = past.dense({p.sequences, p.width - 1, p.channels}, compute);
    p.cu_seqlens = cu_seqlens.integers(p.sequences + 1);
    efla::check_conv(p);
    return p;
  }
};

void conv_forward(nb::handle x, nb::handle weight, nb::handle bias, nb::handle past, nb::handle cu_seqlens,
                  nb::handle y, bool silu, int threads) {
  const ConvInputs inputs(x, weight, bias, past, cu_seqlens);
  const Tensor ty(y, "y");
  efla::ConvProblem p = inputs.problem(silu);
  p.y = ty.dimensions(3).dense({p.batch, p.tokens, p.channels}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_conv_forward(p, threads);
}

void conv_backward(nb::handle x, nb::handle weight, nb::handle bias, nb::handle past, nb::handle cu_seqlens,
                   nb::handle dy, nb::handle dx, nb::handle dpast, nb::handle dweight_parts, bool silu, int threads) {
  const ConvInputs inputs(x, weight, bias, past, cu_seqlens);
  const Tensor tdy(dy, "dy"), tdx(dx, "dx"), tdp(dpast, "dpast"), parts(dweight_parts, "dweight_parts");
  efla::ConvProblem p = inputs.problem(silu);
  p.parts = efla::conv_parts(p.cu_seqlens, p.sequences, p.tokens);
  p.dy = tdy.dimensions(3).dense({p.batch, p.tokens, p.channels}, p.dtype);
  p.dx = tdx.dimensions(3).dense({p.batch, p.tokens, p.channels}, p.dtype);
  p.dpast = tdp.dense({p.sequences, p.width - 1, p.channels}, compute_type(p.dtype));
  p.dweight_parts = parts.dimensions(3).dense({p.parts, p.width + 1, p.channels}, compute_type(p.dtype));
  nb::gil_scoped_release release;
  efla::run_conv_backward(p, threads);
}

void gate_forward(nb::handle gate, nb::handle up, nb::handle y, int threads) {
  const Tensor tg(gate, "gate"), tu(up, "up"), ty(y, "y");
  efla::GateProblem p;
  p.dtype = tg.dimensions(1).dtype(), p.count = tg.size(0);
  p.gate = tg.dense({p.count}, p.dtype);
  p.up = tu.dimensions(1).dense({p.count}, p.dtype);
  p.y = ty.dimensions(1).dense({p.count}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_gate_forward(p, threads);
}

void gate_backward(nb::handle gate, nb::handle up, nb::handle dy, nb::handle dgate, nb::handle dup, int threads) {
  const Tensor tg(gate, "gate"), tu(up, "up"), tdy(dy, "dy"), tdg(dgate, "dgate"), tdu(dup, "dup");
  efla::GateProblem p;
  p.dtype = tg.dimensions(1).dtype(), p.count = tg.size(0);
  p.gate = tg.dense({p.count}, p.dtype);
  p.up = tu.dimensions(1).dense({p.count}, p.dtype);
  p.dy = tdy.dimensions(1).dense({p.count}, p.dtype);
  p.dgate = tdg.dimensions(1).dense({p.count}, p.dtype);
  p.dup = tdu.dimensions(1).dense({p.count}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_gate_backward(p, threads);
}

// The parameters and states of a linear-attention layer that its decoding step uses. Those that it does not have are None.
struct MixerInputs {
  Tensor q_conv, k_conv, v_conv, conv_state, memory, A_log, dt_bias, norm;

  MixerInputs(nb::handle q_conv, nb::handle k_conv, nb::handle v_conv, nb::handle conv_state, nb::handle memory,
              nb::handle A_log, nb::handle dt_bias, nb::handle norm)
      : q_conv(q_conv, "q_conv"), k_conv(k_conv, "k_conv"), v_conv(v_conv, "v_conv"),
        conv_state(conv_state, "conv_state"), memory(memory, "memory"), A_log(A_log, "A_log"),
        dt_bias(dt_bias, "dt_bias"), norm(norm, "norm_weight") {}

  efla::MixerStep problem(Dtype dtype, int64_t key_size, int rule, nb::handle normalise, double scale,
                          double beta_factor, double eps) const {
    check(rule >= 0 && rule < efla::kRuleCount, "unknown rule id");
    check(bool(A_log) == bool(dt_bias), "A_log and dt_bias belong together");
    efla::MixerStep p;
    p.dtype = dtype, p.rule = Rule(rule), p.scale = scale, p.beta_factor = beta_factor, p.eps = eps;
    const std::string which = normalised(normalise);
    p.normalise_q = which.find('q') != std::string::npos, p.normalise_k = which.find('k') != std::string::npos;
    set_memory(p, memory);
    p.key_heads = key_size / p.K;
    check(p.key_heads >= 1 && p.value_heads % p.key_heads == 0, "value heads must be a multiple of key heads");
    const int64_t keys = p.key_heads * p.K, values = p.value_heads * p.V;
    if (q_conv) {
      p.conv_width = int(q_conv.dimensions(3).size(2)), p.conv_channels = 2 * keys + values;
      p.k_channel = keys, p.v_channel = 2 * keys;
      check_conv_width(p.conv_width);
      p.q_weight = q_conv.dense({keys, 1, p.conv_width}, dtype),
      p.k_weight = k_conv.dense({keys, 1, p.conv_width}, dtype);
      p.v_weight = v_conv.dense({values, 1, p.conv_width}, dtype);
      p.conv_kept = int(conv_state.dimensions(3).size(2));
      check(p.conv_kept == p.conv_width - 1 || p.conv_kept == p.conv_width, "conv_state must hold W - 1 or W inputs");
      p.conv_state = conv_state.writable({p.batch, p.conv_channels, p.conv_kept}, dtype);
      check(k_conv && v_conv, "the convolutions of q, k and v belong together");
    }
    p.A_log = A_log.dense({p.value_heads}, dtype), p.dt_bias = dt_bias.dense({p.value_heads}, dtype);
    p.norm_weight = norm.dimensions(1).dense({p.V}, dtype);
    return p;
  }

  static void set_memory(efla::MixerStep& p, const Tensor& memory) {
    p.batch = memory.dimensions(4).size(0), p.value_heads = memory.size(1);
    check(memory.size(2) >= 1 && memory.size(2) <= efla::kMaxWidth && memory.size(3) >= 1 &&
              memory.size(3) <= efla::kMaxWidth,
          "K and V must be between 1 and 256");
    p.K = int(memory.size(2)), p.V = int(memory.size(3));
    p.memory = memory.writable({p.batch, p.value_heads, p.K, p.V}, compute_type(p.dtype));
  }

  static void check_conv_width(int width) {
    check(width >= 2 && width <= efla::kMaxConvWidth, "the convolution's width must be between 2 and 16");
  }

  static void check_scalars(const efla::MixerStep& p, bool has_b, bool has_a) {
    const efla::RuleFacts& rule = efla::kRules[int(p.rule)];
    check(has_b == rule.needs_beta && has_a == rule.needs_gate,
          "b and a must be given where the rule takes beta and a gate, and only there");
  }
};

// One decoded token of a linear-attention layer.
void mixer_step(nb::handle q, nb::handle k, nb::handle v, nb::handle b, nb::handle a, nb::handle g, nb::handle q_conv,
                nb::handle k_conv, nb::handle v_conv, nb::handle conv_state, nb::handle memory, nb::handle A_log,
                nb::handle dt_bias, nb::handle norm_weight, nb::handle y, int rule, nb::handle normalise, double scale,
                double beta_factor, double eps, int threads) {
  const Tensor tq(q, "q"), tk(k, "k"), tv(v, "v"), tb(b, "b"), ta(a, "a"), tg(g, "g"), ty(y, "y");
  const MixerInputs inputs(q_conv, k_conv, v_conv, conv_state, memory, A_log, dt_bias, norm_weight);
  const Dtype dtype = tq.dimensions(3).dtype();
  efla::MixerStep p = inputs.problem(dtype, tq.size(2), rule, normalise, scale, beta_factor, eps);
  MixerInputs::check_scalars(p, bool(tb), bool(ta));
  const int64_t keys = p.key_heads * p.K, values = p.value_heads * p.V;
  p.q = tq.rows({p.batch, 1, keys}, dtype), p.k = tk.dimensions(3).rows({p.batch, 1, keys}, dtype);
  p.v = tv.dimensions(3).rows({p.batch, 1, values}, dtype), p.g = tg.rows({p.batch, 1, values}, dtype);
  p.b = tb.rows({p.batch, 1, p.value_heads}, dtype), p.a = ta.rows({p.batch, 1, p.value_heads}, dtype);
  p.y = ty.dimensions(3).dense({p.batch, 1, values}, dtype);
  nb::gil_scoped_release release;
  efla::run_mixer_step(p, threads);
}

// One decoded token of a Mamba-2 layer. projected: [B, 1, columns], the output gate z, then x, B, C and dt.
void mamba2_step(nb::handle projected, nb::handle conv_weight, nb::handle conv_bias, nb::handle conv_state,
                 nb::handle memory, nb::handle A_log, nb::handle dt_bias, nb::handle D, nb::handle norm_weight,
                 nb::handle y, double eps, int threads) {
  const Tensor tp(projected, "projected"), weight(conv_weight, "conv_weight"), bias(conv_bias, "conv_bias");
  const Tensor conv(conv_state, "conv_state"), s(memory, "memory"), rate(A_log, "A_log"), dt(dt_bias, "dt_bias");
  const Tensor skip(D, "D"), norm(norm_weight, "norm_weight"), ty(y, "y");
  efla::MixerStep p;
  p.dtype = tp.dimensions(3).dtype(), p.rule = Rule::ssd, p.eps = eps;
  check(p.dtype == compute_type(p.dtype), "a Mamba-2 step takes float32 or float64");
  MixerInputs::set_memory(p, s);
  const int64_t values = p.value_heads * p.V, shared = tp.size(2) - 2 * values - p.value_heads;
  p.key_heads = shared / (2 * p.K);
  check(p.key_heads >= 1 && shared == 2 * p.key_heads * p.K && p.value_heads % p.key_heads == 0,
        "projected must hold z, x, B, C and dt of the memory's heads");
  const int64_t keys = p.key_heads * p.K;
  p.conv_width = int(weight.dimensions(3).size(2)), p.conv_kept = p.conv_width - 1, p.conv_channels = values + 2 * keys;
  MixerInputs::check_conv_width(p.conv_width);
  const efla::Strided all = tp.rows({p.batch, 1, 2 * values + 2 * keys + p.value_heads}, p.dtype);
  const int64_t size = p.dtype == Dtype::float64 ? 8 : 4;
  const auto at = [&](const void* data, int64_t elements) {
    return const_cast<char*>(static_cast<const char*>(data)) + elements * size;
  };
  const auto columns = [&](int64_t first) { return efla::Strided{at(all.data, first), all.batch, 0, 1}; };
  p.g = all, p.v = columns(values), p.k = columns(2 * values), p.q = columns(2 * values + keys);
  p.b = columns(2 * values + 2 * keys);
  p.v_channel = 0, p.k_channel = values, p.q_channel = values + keys;
  p.v_weight = weight.dense({p.conv_channels, 1, p.conv_width}, p.dtype);
  p.k_weight = at(p.v_weight, values * p.conv_width), p.q_weight = at(p.k_weight, keys * p.conv_width);
  p.v_bias = bias.dimensions(1).dense({p.conv_channels}, p.dtype);
  p.k_bias = at(p.v_bias, values), p.q_bias = at(p.k_bias, keys);
  p.conv_state = conv.dimensions(3).writable({p.batch, p.conv_channels, p.conv_width - 1}, p.dtype);
  p.A_log = rate.dimensions(1).dense({p.value_heads}, p.dtype);
  p.dt_bias = dt.dimensions(1).dense({p.value_heads}, p.dtype),
  p.D = skip.dimensions(1).dense({p.value_heads}, p.dtype);
  p.norm_weight = norm.dimensions(1).dense({values}, p.dtype);
  p.y = ty.dimensions(3).dense({p.batch, 1, values}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_mixer_step(p, threads);
}

constexpr const char* kGateAndUp = "the weights of gate and up must have the same shape and type";

// A weight of products with rows of a type; null if absent.
efla::Weight weight_of(const Tensor& tensor, int64_t columns, int64_t width, Dtype rows) {
  if (rows == Dtype::float32 && tensor.is(Dtype::int8))
    return {tensor.dense({columns, width + efla::kScaleBytes}, Dtype::int8), Dtype::int8};
  const Dtype dtype = rows == Dtype::float32 && tensor.is(Dtype::float16) ? Dtype::float16 : rows;
  return {tensor.dense({columns, width}, dtype), dtype};
}

// One decoded token of a block with a linear-attention mixer, into y [B, 1, width]. MLP weights are None without an MLP.
void block_step(nb::handle x, nb::handle norm_weight, nb::handle wq, nb::handle wk, nb::handle wv, nb::handle wb,
                nb::handle wa, nb::handle wg, nb::handle wo, nb::handle mlp_norm_weight, nb::handle gate, nb::handle up,
                nb::handle down, nb::handle q_conv, nb::handle k_conv, nb::handle v_conv, nb::handle conv_state,
                nb::handle memory, nb::handle A_log, nb::handle dt_bias, nb::handle o_norm_weight, nb::handle y,
                int rule, nb::handle normalise, double scale, double beta_factor, double o_eps, double eps,
                double mlp_eps, int threads) {
  const Tensor tx(x, "x"), tq(wq, "wq"), tk(wk, "wk"), tv(wv, "wv"), tb(wb, "wb"), ta(wa, "wa"), tg(wg, "wg");
  const Tensor to(wo, "wo"), norm(norm_weight, "norm_weight"), mlp_norm(mlp_norm_weight, "mlp_norm_weight");
  const Tensor tgate(gate, "gate"), tup(up, "up"), tdown(down, "down"), ty(y, "y");
  const MixerInputs inputs(q_conv, k_conv, v_conv, conv_state, memory, A_log, dt_bias, o_norm_weight);
  const Dtype dtype = tx.dimensions(3).dtype(), compute = compute_type(dtype);
  efla::BlockStep p;
  p.mixer = inputs.problem(dtype, tq.dimensions(2).size(0), rule, normalise, scale, beta_factor, o_eps);
  MixerInputs::check_scalars(p.mixer, bool(tb), bool(ta));
  const int64_t B = p.mixer.batch, keys = p.mixer.key_heads * p.mixer.K, values = p.mixer.value_heads * p.mixer.V;
  p.width = tx.size(2), p.eps = eps, p.mlp_eps = mlp_eps;
  p.x = tx.dense({B, 1, p.width}, dtype);
  p.norm_weight = norm.dimensions(1).dense({p.width}, compute);
  const Tensor* maps[6] = {&tq, &tk, &tv, &tb, &ta, &tg};
  const int64_t columns[6] = {keys, keys, values, p.mixer.value_heads, p.mixer.value_heads, values};
  for (int i = 0; i < 6; ++i) p.projections[i] = weight_of(*maps[i], columns[i], p.width, dtype);
  check(p.projections[1].data && p.projections[2].data, "wk and wv must be tensors, got None");
  p.o_weight = weight_of(to.dimensions(2), p.width, values, dtype);
  if (tgate) {
    p.inner = tgate.dimensions(2).size(0);
    p.gate_weight = weight_of(tgate, p.inner, p.width, dtype);
    p.up_weight = weight_of(tup.dimensions(2), p.inner, p.width, dtype);
    p.down_weight = weight_of(tdown.dimensions(2), p.width, p.inner, dtype);
    check(p.gate_weight.dtype == p.up_weight.dtype, kGateAndUp);
    p.mlp_norm_weight = mlp_norm.dimensions(1).dense({p.width}, compute);
  }
  p.y = ty.dimensions(3).dense({B, 1, p.width}, dtype);
  nb::gil_scoped_release release;
  efla::run_block_step(p, threads);
}

// y_i = x W_i^T; with `gated`, y_0 = silu(x W_0^T) * (x W_1^T).
void products(nb::handle x, nb::sequence weights, nb::sequence results, bool gated, int threads) {
  constexpr int most = efla::ProductsProblem::kMaxWeights;
  const Tensor tx(x, "x");
  efla::ProductsProblem p;
  p.dtype = tx.dimensions(2).dtype(), p.gated = gated;
  p.rows = tx.size(0), p.width = tx.size(1), p.count = int(nb::len(weights));
  p.x = tx.dense({p.rows, p.width}, p.dtype);
  check(p.count >= 1 && p.count <= most && (!gated || p.count == 2), "products takes 1 to 8 weights, 2 if gated");
  check(int(nb::len(results)) == (gated ? 1 : p.count), "products needs one result per weight, 1 if gated");
  std::optional<Tensor> w[most], y[most];
  for (int i = 0; i < p.count; ++i) {
    w[i].emplace(weights[i], "weight");
    p.columns[i] = w[i]->dimensions(2).size(0);
    p.weight[i] = weight_of(*w[i], p.columns[i], p.width, p.dtype);
    if (gated && i) {
      check(p.columns[1] == p.columns[0] && p.weight[1].dtype == p.weight[0].dtype, kGateAndUp);
    } else {
      y[i].emplace(results[i], "y");
      p.y[i] = y[i]->dimensions(2).dense({p.rows, p.columns[i]}, p.dtype);
    }
  }
  nb::gil_scoped_release release;
  efla::run_products(p, threads);
}

}  // namespace

void add_rows(nb::module_& m) {
  const auto t = tensor_argument;
  m.def("norm_forward", &norm_forward, t("x"), t("weight"), t("gate"), t("y"), nb::arg("factor"), nb::arg("eps"),
        nb::arg("threads"),
        "Rows divided by the root of factor * sum of squares + eps, times weight and SiLU of the gate.");
  m.def("norm_backward", &norm_backward, t("x"), t("weight"), t("gate"), t("dy"), t("dx"), t("dgate"),
        t("dweight_parts"), nb::arg("factor"), nb::arg("eps"), nb::arg("threads"),
        "Gradients of norm_forward; the weight's as norm_parts partial sums.");
  m.def("norm_parts", &efla::norm_parts, nb::arg("rows"));
  m.def("gate_forward", &gate_forward, t("gate"), t("up"), t("y"), nb::arg("threads"),
        "SiLU of the gate times up, element by element.");
  m.def("gate_backward", &gate_backward, t("gate"), t("up"), t("dy"), t("dgate"), t("dup"), nb::arg("threads"),
        "Gradients of gate_forward.");
  m.def("conv_forward", &conv_forward, t("x"), t("weight"), t("bias"), t("past"), t("cu_seqlens"), t("y"),
        nb::arg("silu"), nb::arg("threads"),
        "Depthwise causal convolution, then SiLU. weight: [W, C]; past: [N, W - 1, C].");
  m.def("conv_backward", &conv_backward, t("x"), t("weight"), t("bias"), t("past"), t("cu_seqlens"), t("dy"), t("dx"),
        t("dpast"), t("dweight_parts"), nb::arg("silu"), nb::arg("threads"),
        "Gradients of conv_forward; the weight's and bias's as conv_parts partial sums [parts, W + 1, C].");
  m.def(
      "conv_parts",
      [](nb::handle cu_seqlens, int64_t N, int64_t T) {
        const Tensor boundaries(cu_seqlens, "cu_seqlens");
        return efla::conv_parts(boundaries.integers(N + 1), N, T);
      },
      t("cu_seqlens"), nb::arg("N"), nb::arg("T"));
  m.def("products", &products, t("x"), nb::arg("weights"), nb::arg("results"), nb::arg("gated"), nb::arg("threads"),
        "Products of a few rows with 1 to 8 weights [columns, width]; gated: silu of the first times the second. For "
        "float32 "
        "rows also float16 weights, or int8 [columns, width + 4]: a column's numbers, then the bytes of their float32 "
        "scale.");
  m.def(
      "block_step", &block_step, t("x"), t("norm_weight"), t("wq"), t("wk"), t("wv"), t("wb"), t("wa"), t("wg"),
      t("wo"), t("mlp_norm_weight"), t("gate"), t("up"), t("down"), t("q_conv"), t("k_conv"), t("v_conv"),
      t("conv_state"), t("memory"), t("A_log"), t("dt_bias"), t("o_norm_weight"), t("y"), nb::arg("rule"),
      nb::arg("normalise"), nb::arg("scale"), nb::arg("beta_factor"), nb::arg("o_eps"), nb::arg("eps"),
      nb::arg("mlp_eps"), nb::arg("threads"),
      "One decoded token of a block: norm, mixer, norm and MLP, with both residuals. Updates conv_state and memory in "
      "place.");
  m.def("mamba2_step", &mamba2_step, t("projected"), t("conv_weight"), t("conv_bias"), t("conv_state"), t("memory"),
        t("A_log"), t("dt_bias"), t("D"), t("norm_weight"), t("y"), nb::arg("eps"), nb::arg("threads"),
        "One decoded token of a Mamba-2 layer, between its products. Updates conv_state and memory in place.");
  m.def("mixer_step", &mixer_step, t("q"), t("k"), t("v"), t("b"), t("a"), t("g"), t("q_conv"), t("k_conv"),
        t("v_conv"), t("conv_state"), t("memory"), t("A_log"), t("dt_bias"), t("norm_weight"), t("y"), nb::arg("rule"),
        nb::arg("normalise"), nb::arg("scale"), nb::arg("beta_factor"), nb::arg("eps"), nb::arg("threads"),
        "One decoded token of a linear-attention layer, between its products. Updates conv_state and memory in place.");
}
