// Python bindings of the scan and of the runtime: efla.native._kernels.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "plan.h"
#include "runtime.h"

using efla::Problem;

namespace {

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

std::string build_info() {
  return std::string("compiler ") + EFLA_COMPILER + "; flags " + EFLA_FLAGS + "; C++ " + std::to_string(__cplusplus);
}

}  // namespace

NB_MODULE(_kernels, m) {
  const auto t = tensor_argument;
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
  add_rows(m);
  m.def("simd_levels", &efla::simd_levels, "Instruction sets this CPU can run, best first.");
  m.def("active_simd", &efla::active_simd, "The instruction set in use; EFLA_SIMD forces one.");
  m.def("set_simd", &efla::set_simd, nb::arg("name"));
  m.def("mkl_misses_avx512", &efla::mkl_misses_avx512,
        "Whether AVX-512 is in use on an AMD CPU of family 26 (Zen 5) or later, where MKL takes its AVX2 code.");
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
