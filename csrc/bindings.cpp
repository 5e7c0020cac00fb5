// Python bindings: efla.native._kernels. tensors.h checks every tensor that a kernel reads or writes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>

#include "plan.h"
#include "rows.h"
#include "runtime.h"
#include "tensors.h"

namespace nb = nanobind;
using efla::Dtype;
using efla::Problem;
using efla::Rule;
using efla::Tensor;

namespace {

// Sums, states and scalars of half-precision tensors are float32.
Dtype compute_type(Dtype dtype) { return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32; }

void check(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

struct ScanInputs {
  Tensor q, k, v, log_decay, erase, write, log_gate, beta, initial_state, cu_seqlens;

  ScanInputs(nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay, nb::handle erase, nb::handle write,
             nb::handle log_gate, nb::handle beta, nb::handle initial_state, nb::handle cu_seqlens)
      : q(q, "q"), k(k, "k"), v(v, "v"), log_decay(log_decay, "log_decay"), erase(erase, "erase"),
        write(write, "write"), log_gate(log_gate, "log_gate"), beta(beta, "beta"),
        initial_state(initial_state, "initial_state"), cu_seqlens(cu_seqlens, "cu_seqlens") {}

  // normalise: which of q and k are divided by their norm, "", "q", "k" or "qk".
  Problem problem(int rule, const std::string& normalise, double scale, int threads) const {
    Problem p;
    p.rule = Rule(rule), p.scale = scale, p.threads = threads;
    p.normalise_q = normalise.find('q') != std::string::npos, p.normalise_k = normalise.find('k') != std::string::npos;
    check(rule >= int(Rule::raw) && rule < efla::kRuleCount, "unknown rule id");
    check(rule != int(Rule::raw) || write, "write must be a torch.Tensor, got None");
    p.dtype = k.dimensions(4).dtype();
    p.batch = k.size(0), p.tokens = k.size(1), p.key_heads = k.size(2), p.value_heads = v.dimensions(4).size(2);
    check(k.size(3) <= efla::kMaxWidth && v.size(3) <= efla::kMaxWidth, "K and V must be between 1 and 256");
    p.K = int(k.size(3)), p.V = int(v.size(3));
    p.sequences = cu_seqlens ? cu_seqlens.dimensions(1).size(0) - 1 : p.batch;
    check(p.sequences >= 0, "cu_seqlens must not be empty");
    p.q = q.dimensions(4).rows({p.batch, p.tokens, p.key_heads, p.K}, p.dtype);
    p.k = k.rows({p.batch, p.tokens, p.key_heads, p.K}, p.dtype);
    p.v = v.rows({p.batch, p.tokens, p.value_heads, p.V}, p.dtype);
    p.log_decay = log_decay.scalars({p.batch, p.tokens, p.value_heads}, compute_type(p.dtype));
    p.erase = erase.scalars({p.batch, p.tokens, p.value_heads}, compute_type(p.dtype));
    p.write = write.scalars({p.batch, p.tokens, p.value_heads}, compute_type(p.dtype));
    p.log_gate = log_gate.scalars({p.batch, p.tokens, p.value_heads}, compute_type(p.dtype));
    p.beta = beta.scalars({p.batch, p.tokens, p.value_heads}, compute_type(p.dtype));
    p.initial_state = initial_state.dense({p.sequences, p.value_heads, p.K, p.V}, compute_type(p.dtype));
    p.cu_seqlens = cu_seqlens.integers(p.sequences + 1);
    return p;
  }
};

int64_t boundary_count(const Problem& p) {
  efla::validate(p);
  return efla::boundary_size(p.cu_seqlens, p.sequences, p.tokens, p.value_heads, p.K, p.V);
}

unsigned forward(nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay, nb::handle erase, nb::handle write,
                 nb::handle log_gate, nb::handle beta, nb::handle initial_state, nb::handle cu_seqlens, nb::handle o,
                 nb::handle final_state, nb::handle boundary_states, int rule, const std::string& normalise,
                 double scale, bool in_place, bool check_domain, int threads) {
  const ScanInputs inputs(q, k, v, log_decay, erase, write, log_gate, beta, initial_state, cu_seqlens);
  const Tensor to(o, "o"), tf(final_state, "final_state"), tb(boundary_states, "boundary_states");
  Problem p = inputs.problem(rule, normalise, scale, threads);
  p.check_domain = check_domain;
  p.o = to.dimensions(4).rows({p.batch, p.tokens, p.value_heads, p.V}, p.dtype);
  const Dtype compute = compute_type(p.dtype);
  p.final_state = in_place ? inputs.initial_state.writable({p.sequences, p.value_heads, p.K, p.V}, compute)
                           : tf.dense({p.sequences, p.value_heads, p.K, p.V}, compute);
  if (tb) p.boundary_states = tb.dense({boundary_count(p)}, compute);
  nb::gil_scoped_release release;
  return efla::run_forward(p);
}

// Gradients that are None are not computed.
unsigned backward(nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay, nb::handle erase, nb::handle write,
                  nb::handle log_gate, nb::handle beta, nb::handle initial_state, nb::handle cu_seqlens,
                  nb::handle boundary_states, nb::handle d_o, nb::handle d_final_state, nb::handle dq, nb::handle dk,
                  nb::handle dv, nb::handle d_log_decay, nb::handle d_erase, nb::handle d_write, nb::handle d_log_gate,
                  nb::handle d_beta, nb::handle d_initial_state, int rule, const std::string& normalise, double scale,
                  int threads) {
  const ScanInputs inputs(q, k, v, log_decay, erase, write, log_gate, beta, initial_state, cu_seqlens);
  const Tensor tb(boundary_states, "boundary_states"), to(d_o, "grad of o"), tf(d_final_state, "grad of final_state");
  const Tensor tq(dq, "dq"), tk(dk, "dk"), tv(dv, "dv"), ti(d_initial_state, "d_initial_state");
  const Tensor td(d_log_decay, "d_log_decay"), te(d_erase, "d_erase"), tw(d_write, "d_write");
  const Tensor tg(d_log_gate, "d_log_gate"), tbeta(d_beta, "d_beta");
  Problem p = inputs.problem(rule, normalise, scale, threads);
  const Dtype compute = compute_type(p.dtype);
  p.boundary_states = tb.dimensions(1).dense({boundary_count(p)}, compute);
  p.d_o = to.dimensions(4).rows({p.batch, p.tokens, p.value_heads, p.V}, p.dtype);
  p.d_final_state = tf.dense({p.sequences, p.value_heads, p.K, p.V}, compute);
  p.dq = tq.dimensions(4).dense({p.batch, p.tokens, p.key_heads, p.K}, p.dtype);
  p.dk = tk.dimensions(4).dense({p.batch, p.tokens, p.key_heads, p.K}, p.dtype);
  p.dv = tv.dimensions(4).dense({p.batch, p.tokens, p.value_heads, p.V}, p.dtype);
  p.d_log_decay = td.dense({p.batch, p.tokens, p.value_heads}, compute);
  p.d_erase = te.dense({p.batch, p.tokens, p.value_heads}, compute);
  p.d_write = tw.dense({p.batch, p.tokens, p.value_heads}, compute);
  p.d_log_gate = tg.dense({p.batch, p.tokens, p.value_heads}, compute);
  p.d_beta = tbeta.dense({p.batch, p.tokens, p.value_heads}, compute);
  p.d_initial_state = ti.dense({p.sequences, p.value_heads, p.K, p.V}, compute);
  nb::gil_scoped_release release;
  return efla::run_backward(p);
}

// A dictionary from the name of a rule to its code.
PyObject* rule_codes = nullptr;

// rule_codes and rule_facts: the table of rules for Python.
void add_rules(nb::module_& m) {
  nb::dict codes, all_facts;
  for (int code = 0; code < efla::kRuleCount; ++code) {
    const efla::RuleFacts& rule = efla::kRules[code];
    const nb::object name = nb::steal(PyUnicode_InternFromString(rule.name));  // lookups compare by identity first
    nb::dict facts;
    facts["needs_beta"] = rule.needs_beta, facts["needs_gate"] = rule.needs_gate;
    facts["has_decay"] = rule.has_decay, facts["has_erase"] = rule.has_erase, facts["uses_norm"] = rule.uses_norm;
    codes[name] = code, all_facts[name] = facts;
  }
  m.attr("rule_codes") = codes;
  m.attr("rule_facts") = all_facts;
  rule_codes = codes.release().ptr();
}

// What attend's caller says of q and k (True, False, "q" or "k"), as `problem` takes it.
std::string normalised(nb::handle which) {
  if (which.ptr() == Py_True) return "qk";
  if (which.ptr() == Py_False) return "";
  const std::string name = nb::cast<std::string>(which);
  if (name != "q" && name != "k") throw std::invalid_argument("the general path names the mistake");
  return name;
}

// One call from tensors to tensors, for inference without autograd, tracing or packed input. Returns (o, final_state or
// None), or None where it does not apply: the caller then takes the general path, which also reports invalid input.
nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle beta, nb::handle log_gate, nb::handle rule_name,
                  nb::handle normalise, nb::handle scale, nb::handle initial_state, nb::handle output_final_state,
                  nb::handle in_place, nb::handle check_domain) {
  if (!efla::can_allocate() || !PyUnicode_CheckExact(rule_name.ptr()) || !efla::records_nothing()) return nb::none();
  const nb::handle code = PyDict_GetItem(rule_codes, rule_name.ptr());
  if (!code.is_valid()) return nb::none();
  const Rule rule = Rule(PyLong_AsLong(code.ptr()));
  for (nb::handle flag : {output_final_state, in_place})
    if (flag.ptr() != Py_True && flag.ptr() != Py_False) return nb::none();
  for (nb::handle tensor : {q, k, v, beta, log_gate, initial_state})
    if (!tensor.is_none() && !efla::is_plain_tensor(tensor)) return nb::none();
  if (beta.is_none() == efla::kRules[int(rule)].needs_beta || log_gate.is_none() == efla::kRules[int(rule)].needs_gate)
    return nb::none();
  const nb::handle none = Py_None;
  const ScanInputs inputs(q, k, v, none, none, none, log_gate, beta, initial_state, none);
  Problem p = inputs.problem(int(rule), normalised(normalise), 1.0, efla::num_threads());
  if (!p.batch || !p.tokens || (p.tokens > 1 && p.tokens < p.key_heads))
    return nb::none();  // the general path warns about the layout
  p.scale = scale.is_none() ? 1.0 / std::sqrt(double(p.K)) : PyFloat_AsDouble(scale.ptr());
  if (PyErr_Occurred()) throw nb::python_error();
  if (!std::isfinite(p.scale)) return nb::none();
  p.check_domain = check_domain.ptr() == Py_True;
  efla::validate(p);
  const Dtype compute = compute_type(p.dtype);
  nb::object final_state = nb::none();
  const bool overwrites = in_place.ptr() == Py_True && p.initial_state;
  if (overwrites) {
    p.final_state = inputs.initial_state.writable({p.sequences, p.value_heads, p.K, p.V}, compute);
    final_state = nb::borrow(initial_state);
  } else if (output_final_state.ptr() == Py_True) {
    efla::Allocated made = efla::allocate_tensor({p.sequences, p.value_heads, p.K, p.V}, compute);
    p.final_state = made.data;
    final_state = std::move(made.object);
  }
  efla::Allocated o = efla::allocate_tensor({p.batch, p.tokens, p.value_heads, p.V}, p.dtype);
  p.o = {o.data, p.tokens * p.value_heads * p.V, p.value_heads * p.V, p.V};
  unsigned status;
  {
    nb::gil_scoped_release release;
    status = efla::run_forward(p);
  }
  if (status && p.check_domain) return nb::none();
  if (overwrites) efla::increment_version(initial_state);
  return nb::make_tuple(o.object, output_final_state.ptr() == Py_True ? final_state : nb::none());
}

// A plain C function, because nanobind's dispatch is a tenth of the cost of a decoding step.
PyObject* attend_entry(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 12) return PyErr_Format(PyExc_TypeError, "attend takes 12 arguments, got %zd", count);
  try {
    return attend(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]).release().ptr();
  } catch (const nb::builtin_exception&) {  // invalid input
  } catch (const std::invalid_argument&) {
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef kFastCalls[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend_entry)), METH_FASTCALL,
     "attend(q, k, v, beta, log_gate, rule, normalise, scale, initial_state, output_final_state, in_place, "
     "check_domain)\n"
     "One call for inference: (o, final_state or None), or None where the general path is needed."},
    {nullptr, nullptr, 0, nullptr},
};

struct NormInputs {
  Tensor x, weight;
  NormInputs(nb::handle x, nb::handle weight) : x(x, "x"), weight(weight, "weight") {}

  efla::NormProblem problem(double factor, double eps) const {
    efla::NormProblem p;
    p.dtype = x.dimensions(2).dtype();
    p.rows = x.size(0), p.width = int(x.size(1)), p.factor = factor, p.eps = eps;
    p.x = x.dense({p.rows, p.width}, p.dtype);
    p.weight = weight.dense({p.width}, compute_type(p.dtype));
    return p;
  }
};

void norm_forward(nb::handle x, nb::handle weight, nb::handle y, double factor, double eps, int threads) {
  const NormInputs inputs(x, weight);
  const Tensor ty(y, "y");
  efla::NormProblem p = inputs.problem(factor, eps);
  p.y = ty.dimensions(2).dense({p.rows, p.width}, p.dtype);
  nb::gil_scoped_release release;
  efla::run_norm_forward(p, threads);
}

void norm_backward(nb::handle x, nb::handle weight, nb::handle dy, nb::handle dx, nb::handle dweight_parts,
                   double factor, double eps, int threads) {
  const NormInputs inputs(x, weight);
  const Tensor tdy(dy, "dy"), tdx(dx, "dx"), parts(dweight_parts, "dweight_parts");
  efla::NormProblem p = inputs.problem(factor, eps);
  p.parts = efla::norm_parts(p.rows);
  p.dy = tdy.dimensions(2).dense({p.rows, p.width}, p.dtype);
  p.dx = tdx.dimensions(2).dense({p.rows, p.width}, p.dtype);
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
      p.conv_state = conv_state.writable({p.batch, p.conv_channels, p.conv_width - 1}, dtype);
      check(p.k_weight && p.v_weight && p.conv_state, "the convolutions of q, k and v belong together");
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
  p.conv_width = int(weight.dimensions(3).size(2)), p.conv_channels = values + 2 * keys;
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
  for (int i = 0; i < 6; ++i) p.projections[i] = maps[i]->dense({columns[i], p.width}, dtype);
  check(p.projections[1] && p.projections[2], "wk and wv must be tensors, got None");
  p.o_weight = to.dimensions(2).dense({p.width, values}, dtype);
  if (tgate) {
    p.inner = tgate.dimensions(2).size(0);
    p.gate_weight = tgate.dense({p.inner, p.width}, dtype);
    p.up_weight = tup.dimensions(2).dense({p.inner, p.width}, dtype);
    p.down_weight = tdown.dimensions(2).dense({p.width, p.inner}, dtype);
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
    p.weight[i] = w[i]->dense({p.columns[i], p.width}, p.dtype);
    if (gated && i) {
      check(p.columns[1] == p.columns[0], "the weights of gate and up must have the same shape");
    } else {
      y[i].emplace(results[i], "y");
      p.y[i] = y[i]->dimensions(2).dense({p.rows, p.columns[i]}, p.dtype);
    }
  }
  nb::gil_scoped_release release;
  efla::run_products(p, threads);
}

std::string build_info() {
  return std::string("compiler ") + EFLA_COMPILER + "; flags " + EFLA_FLAGS + "; C++ " + std::to_string(__cplusplus);
}

}  // namespace

NB_MODULE(_kernels, m) {
  // Every tensor argument may be None.
  const auto t = [](const char* name) { return nb::arg(name).none(); };
  m.doc() = "CPU kernels of the three-scalar recurrence and of the layers around it.";
  m.def("forward", &forward, t("q"), t("k"), t("v"), t("log_decay"), t("erase"), t("write"), t("log_gate"), t("beta"),
        t("initial_state"), t("cu_seqlens"), t("o"), t("final_state"), t("boundary_states"), nb::arg("rule"),
        nb::arg("normalise"), nb::arg("scale"), nb::arg("in_place"), nb::arg("check_domain"), nb::arg("threads"),
        "Run the recurrence on log_decay, erase and write (rule -1), or on the log_gate and beta of a rule. "
        "in_place: the final state overwrites the initial one, unless check_domain finds inputs outside the rule's "
        "domain. "
        "Returns status bits: 1 = some beta < 0, 2 = some log_gate > 0.");
  m.def("backward", &backward, t("q"), t("k"), t("v"), t("log_decay"), t("erase"), t("write"), t("log_gate"), t("beta"),
        t("initial_state"), t("cu_seqlens"), t("boundary_states"), t("d_o"), t("d_final_state"), t("dq"), t("dk"),
        t("dv"), t("d_log_decay"), t("d_erase"), t("d_write"), t("d_log_gate"), t("d_beta"), t("d_initial_state"),
        nb::arg("rule"), nb::arg("normalise"), nb::arg("scale"), nb::arg("threads"),
        "Gradients of forward; returns the same status bits.");
  m.def(
      "boundary_count",
      [](nb::handle cu_seqlens, int64_t N, int64_t T, int64_t Hv, int K, int V) {
        const Tensor boundaries(cu_seqlens, "cu_seqlens");
        return efla::boundary_size(boundaries.integers(N + 1), N, T, Hv, K, V);
      },
      t("cu_seqlens"), nb::arg("N"), nb::arg("T"), nb::arg("Hv"), nb::arg("K"), nb::arg("V"),
      "Elements (of the state's type) in the buffer of boundary states that forward fills for backward.");
  if (PyModule_AddFunctions(m.ptr(), kFastCalls) != 0) throw nb::python_error();
  m.def("norm_forward", &norm_forward, t("x"), t("weight"), t("y"), nb::arg("factor"), nb::arg("eps"),
        nb::arg("threads"), "Rows divided by the root of factor * sum of squares + eps, times weight.");
  m.def("norm_backward", &norm_backward, t("x"), t("weight"), t("dy"), t("dx"), t("dweight_parts"), nb::arg("factor"),
        nb::arg("eps"), nb::arg("threads"), "Gradients of norm_forward; the weight's as norm_parts partial sums.");
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
        "Products of a few rows with 1 to 8 weights [columns, width]; gated: silu of the first times the second.");
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
  m.def("simd_levels", &efla::simd_levels, "Instruction sets this CPU can run, best first.");
  m.def("active_simd", &efla::active_simd, "The instruction set in use; EFLA_SIMD forces one.");
  m.def("set_simd", &efla::set_simd, nb::arg("name"));
  m.def("set_parallel_runtime", &efla::set_parallel_runtime, nb::arg("path"),
        "Use the OpenMP runtime already loaded from `path` ('' searches the process); False if it is not there.");
  m.def("has_parallel_runtime", &efla::has_parallel_runtime);
  m.def("build_info", &build_info);
  m.def(
      "bind_torch",
      [](nb::handle tensor_type, nb::handle is_neg, nb::handle is_grad_enabled, nb::handle dispatch_depth,
         nb::handle get_num_threads, nb::handle increment_version, nb::handle forward_ad, bool use_c_table) {
        for (nb::handle h :
             {tensor_type, is_neg, is_grad_enabled, dispatch_depth, get_num_threads, increment_version, forward_ad})
          h.inc_ref();  // never released
        efla::bind_torch({reinterpret_cast<PyTypeObject*>(tensor_type.ptr()), is_neg.ptr(), is_grad_enabled.ptr(),
                          dispatch_depth.ptr(), get_num_threads.ptr(), increment_version.ptr(), forward_ad.ptr()},
                         use_c_table);
      },
      nb::arg("tensor_type"), nb::arg("is_neg"), nb::arg("is_grad_enabled"), nb::arg("dispatch_depth"),
      nb::arg("get_num_threads"), nb::arg("increment_version"), nb::arg("forward_ad"), nb::arg("use_c_table"),
      "Register torch's tensor type and callables. Without torch's C table `attend` always returns None.");
  add_rules(m);
}
