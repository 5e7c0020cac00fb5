// Python bindings: efla._native.
//
// Addresses and sizes are plain integers, so a call costs a microsecond or two; the Python side checks shapes and
// keeps the tensors alive. Strides are in elements, the last dimension of q, k, v, o is contiguous.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eager.h"
#include "rows.h"
#include "runtime.h"
#include "scan.h"

namespace nb = nanobind;
using efla::Problem;
using efla::Strided;

namespace {

template <class T = void> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

Strided strided(uintptr_t address, int64_t b, int64_t t, int64_t h) { return {pointer(address), b, t, h}; }

Problem common(int dtype, int rule, bool l2norm, double scale, const Strided& q, const Strided& k, const Strided& v,
               const Strided& c0, const Strided& c1, const Strided& c2, uintptr_t initial_state, uintptr_t border_states,
               uintptr_t cu_seqlens, int64_t B, int64_t T, int64_t N, int64_t Hk, int64_t Hv, int K, int V, int threads) {
  Problem p;
  p.dtype = efla::Dtype(dtype);
  p.rule = efla::Rule(rule);
  p.l2norm = l2norm;
  p.scale = scale;
  p.q = q, p.k = k, p.v = v;
  p.log_decay = c0, p.erase = c1, p.write = c2;
  p.initial_state = pointer(initial_state);
  p.border_states = pointer(border_states);
  p.cu_seqlens = pointer<const int64_t>(cu_seqlens);
  p.batch = B, p.tokens = T, p.sequences = N, p.key_heads = Hk, p.value_heads = Hv;
  p.K = K, p.V = V, p.threads = threads;
  return p;
}

// dtype: 0 float32, 1 bfloat16, 2 float16, 3 float64. rule: -1 raw, else the order of efla::Rule.
// c0, c1, c2: raw: log_decay, erase, write. Rule: log_gate, beta, unused. Address 0: absent.
unsigned forward(int dtype, int rule, bool l2norm, double scale,                                          //
                 uintptr_t q, int64_t q_b, int64_t q_t, int64_t q_h,                                      //
                 uintptr_t k, int64_t k_b, int64_t k_t, int64_t k_h,                                      //
                 uintptr_t v, int64_t v_b, int64_t v_t, int64_t v_h,                                      //
                 uintptr_t o, int64_t o_b, int64_t o_t, int64_t o_h,                                      //
                 uintptr_t c0, int64_t c0_b, int64_t c0_t, int64_t c0_h,                                  //
                 uintptr_t c1, int64_t c1_b, int64_t c1_t, int64_t c1_h,                                  //
                 uintptr_t c2, int64_t c2_b, int64_t c2_t, int64_t c2_h,                                  //
                 uintptr_t initial_state, uintptr_t final_state, uintptr_t border_states, uintptr_t cu_seqlens,  //
                 int64_t B, int64_t T, int64_t N, int64_t Hk, int64_t Hv, int K, int V, int threads) {
  Problem p = common(dtype, rule, l2norm, scale, strided(q, q_b, q_t, q_h), strided(k, k_b, k_t, k_h),
                     strided(v, v_b, v_t, v_h), strided(c0, c0_b, c0_t, c0_h), strided(c1, c1_b, c1_t, c1_h),
                     strided(c2, c2_b, c2_t, c2_h), initial_state, border_states, cu_seqlens, B, T, N, Hk, Hv, K, V, threads);
  p.o = strided(o, o_b, o_t, o_h);
  p.final_state = pointer(final_state);
  nb::gil_scoped_release release;
  return efla::run_forward(p);
}

// Outputs are dense: dq, dk [B,T,Hk,K], dv [B,T,Hv,V], d_c0, d_c1, d_c2 [B,T,Hv] (0: not wanted; in rule mode the
// gradients of log_gate and beta), d_initial_state [N,Hv,K,V].
unsigned backward(int dtype, int rule, bool l2norm, double scale,                                         //
                  uintptr_t q, int64_t q_b, int64_t q_t, int64_t q_h,                                     //
                  uintptr_t k, int64_t k_b, int64_t k_t, int64_t k_h,                                     //
                  uintptr_t v, int64_t v_b, int64_t v_t, int64_t v_h,                                     //
                  uintptr_t d_o, int64_t o_b, int64_t o_t, int64_t o_h,                                   //
                  uintptr_t c0, int64_t c0_b, int64_t c0_t, int64_t c0_h,                                 //
                  uintptr_t c1, int64_t c1_b, int64_t c1_t, int64_t c1_h,                                 //
                  uintptr_t c2, int64_t c2_b, int64_t c2_t, int64_t c2_h,                                 //
                  uintptr_t initial_state, uintptr_t d_final_state, uintptr_t border_states, uintptr_t cu_seqlens,  //
                  uintptr_t dq, uintptr_t dk, uintptr_t dv, uintptr_t d_c0, uintptr_t d_c1, uintptr_t d_c2,  //
                  uintptr_t d_initial_state,                                                              //
                  int64_t B, int64_t T, int64_t N, int64_t Hk, int64_t Hv, int K, int V, int threads) {
  Problem p = common(dtype, rule, l2norm, scale, strided(q, q_b, q_t, q_h), strided(k, k_b, k_t, k_h),
                     strided(v, v_b, v_t, v_h), strided(c0, c0_b, c0_t, c0_h), strided(c1, c1_b, c1_t, c1_h),
                     strided(c2, c2_b, c2_t, c2_h), initial_state, border_states, cu_seqlens, B, T, N, Hk, Hv, K, V, threads);
  p.d_o = strided(d_o, o_b, o_t, o_h);
  p.d_final_state = pointer(d_final_state);
  p.dq = pointer(dq), p.dk = pointer(dk), p.dv = pointer(dv);
  p.d_log_decay = pointer(d_c0), p.d_erase = pointer(d_c1), p.d_write = pointer(d_c2);
  p.d_initial_state = pointer(d_initial_state);
  nb::gil_scoped_release release;
  return efla::run_backward(p);
}

efla::NormProblem norm_problem(int dtype, uintptr_t x, uintptr_t weight, int64_t rows, int width, double factor, double eps) {
  efla::NormProblem p;
  p.dtype = efla::Dtype(dtype);
  p.x = pointer(x), p.weight = pointer(weight);
  p.rows = rows, p.width = width, p.factor = factor, p.eps = eps;
  return p;
}

// x, y: [rows, width] dense; weight (0: ones) in the compute type.
void norm_forward(int dtype, uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int width, double factor, double eps,
                  int threads) {
  efla::NormProblem p = norm_problem(dtype, x, weight, rows, width, factor, eps);
  p.y = pointer(y);
  nb::gil_scoped_release release;
  efla::run_norm_forward(p, threads);
}

// dweight_parts: [groups, width] in the compute type, or 0.
void norm_backward(int dtype, uintptr_t x, uintptr_t weight, uintptr_t dy, uintptr_t dx, uintptr_t dweight_parts,
                   int64_t groups, int64_t rows, int width, double factor, double eps, int threads) {
  efla::NormProblem p = norm_problem(dtype, x, weight, rows, width, factor, eps);
  p.dy = pointer(dy), p.dx = pointer(dx), p.dweight_parts = pointer(dweight_parts), p.groups = groups;
  nb::gil_scoped_release release;
  efla::run_norm_backward(p, threads);
}

efla::ConvProblem conv_problem(int dtype, bool silu, uintptr_t x, int64_t x_b, int64_t x_t, uintptr_t weight, uintptr_t bias,
                               uintptr_t past, uintptr_t cu_seqlens, int64_t B, int64_t T, int64_t N, int C, int W) {
  efla::ConvProblem p;
  p.dtype = efla::Dtype(dtype), p.silu = silu;
  p.x = pointer(x), p.x_batch = x_b, p.x_token = x_t;
  p.weight = pointer(weight), p.bias = pointer(bias), p.past = pointer(past);
  p.cu_seqlens = pointer<const int64_t>(cu_seqlens);
  p.batch = B, p.tokens = T, p.sequences = N, p.channels = C, p.width = W;
  return p;
}

// x: [B, T, C] with contiguous channels; y dense; weight [W, C], bias [C], past [N, W - 1, C] in the compute type.
void conv_forward(int dtype, bool silu, uintptr_t x, int64_t x_b, int64_t x_t, uintptr_t weight, uintptr_t bias, uintptr_t past,
                  uintptr_t y, uintptr_t cu_seqlens, int64_t B, int64_t T, int64_t N, int C, int W, int threads) {
  efla::ConvProblem p = conv_problem(dtype, silu, x, x_b, x_t, weight, bias, past, cu_seqlens, B, T, N, C, W);
  p.y = pointer(y);
  nb::gil_scoped_release release;
  efla::run_conv_forward(p, threads);
}

// dweight_parts: [groups, W + 1, C], the last row of each the bias's; dpast as past, or 0.
void conv_backward(int dtype, bool silu, uintptr_t x, int64_t x_b, int64_t x_t, uintptr_t weight, uintptr_t bias, uintptr_t past,
                   uintptr_t dy, uintptr_t dx, uintptr_t dpast, uintptr_t dweight_parts, int64_t groups, uintptr_t cu_seqlens,
                   int64_t B, int64_t T, int64_t N, int C, int W, int threads) {
  efla::ConvProblem p = conv_problem(dtype, silu, x, x_b, x_t, weight, bias, past, cu_seqlens, B, T, N, C, W);
  p.dy = pointer(dy), p.dx = pointer(dx), p.dpast = pointer(dpast), p.dweight_parts = pointer(dweight_parts);
  p.groups = groups;
  nb::gil_scoped_release release;
  efla::run_conv_backward(p, threads);
}

// gate, up, y, and the gradients: `count` elements, dense.
void gate_forward(int dtype, uintptr_t gate, uintptr_t up, uintptr_t y, int64_t count, int threads) {
  efla::GateProblem p;
  p.dtype = efla::Dtype(dtype), p.count = count;
  p.gate = pointer(gate), p.up = pointer(up), p.y = pointer(y);
  nb::gil_scoped_release release;
  efla::run_gate_forward(p, threads);
}

void gate_backward(int dtype, uintptr_t gate, uintptr_t up, uintptr_t dy, uintptr_t dgate, uintptr_t dup, int64_t count,
                   int threads) {
  efla::GateProblem p;
  p.dtype = efla::Dtype(dtype), p.count = count;
  p.gate = pointer(gate), p.up = pointer(up), p.dy = pointer(dy), p.dgate = pointer(dgate), p.dup = pointer(dup);
  nb::gil_scoped_release release;
  efla::run_gate_backward(p, threads);
}

std::string build_info() {
  return std::string("compiler ") + EFLA_COMPILER + "; flags " + EFLA_FLAGS + "; C++ " + std::to_string(__cplusplus);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of the three-scalar recurrence; see bindings.cpp for the arguments.";
  m.def("forward", &forward, "Run the recurrence; returns status bits: 1 = some beta < 0, 2 = some log_gate > 0.");
  m.def("backward", &backward, "Gradients of forward; returns the same status bits.");
  m.def(
      "border_count",
      [](uintptr_t cu_seqlens, int64_t N, int64_t T, int64_t Hv, int K, int V) {
        return efla::border_size(pointer<const int64_t>(cu_seqlens), N, T, Hv, K, V);
      },
      nb::arg("cu_seqlens"), nb::arg("N"), nb::arg("T"), nb::arg("Hv"), nb::arg("K"), nb::arg("V"),
      "Elements (of the state's type) of the border-state buffer that forward fills for backward.");
  m.def("norm_forward", &norm_forward, "Rows divided by the root of factor * sum of squares + eps, times weight.");
  m.def("norm_backward", &norm_backward, "Gradients of norm_forward; the weight's in `groups` parts to be added.");
  m.def("norm_groups", &efla::norm_groups, nb::arg("rows"));
  m.def("gate_forward", &gate_forward, "SiLU of the gate times up, element by element.");
  m.def("gate_backward", &gate_backward, "Gradients of gate_forward.");
  m.def("conv_forward", &conv_forward, "Depthwise causal convolution, then SiLU.");
  m.def("conv_backward", &conv_backward, "Gradients of conv_forward; the weight's and bias's in `groups` parts to be added.");
  m.def(
      "conv_groups",
      [](uintptr_t cu_seqlens, int64_t N, int64_t T) { return efla::conv_groups(pointer<const int64_t>(cu_seqlens), N, T); },
      nb::arg("cu_seqlens"), nb::arg("N"), nb::arg("T"));
  m.def("simd_levels", &efla::simd_levels, "Instruction sets this CPU can run, best first.");
  m.def("active_simd", &efla::active_simd, "The instruction set in use; EFLA_SIMD forces one.");
  m.def("set_simd", &efla::set_simd, nb::arg("name"));
  m.def("set_parallel_runtime", &efla::set_parallel_runtime, nb::arg("path"),
        "Use the OpenMP runtime already loaded from `path` ('' searches the process); False if it is not there.");
  m.def("has_parallel_runtime", &efla::has_parallel_runtime);
  m.def("build_info", &build_info);
  m.def("set_tensor_type", &efla::set_tensor_type, "Tell `attend` which tensors to take; False if it cannot.");
  m.def("attend", &efla::attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("beta").none(), nb::arg("log_gate").none(),
        nb::arg("rule"), nb::arg("l2norm"), nb::arg("scale").none(), nb::arg("initial_state").none(),
        nb::arg("output_final_state"), nb::arg("in_place"), nb::arg("threads"), "One call for plain inference; see eager.h.");
}
