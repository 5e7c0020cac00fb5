// The shortest way from torch tensors to the kernels: shapes are read through DLPack's C table, results are allocated
// by torch through the same table, and no Python runs in between. In decoding, that is most of a call's cost.
#include "eager.h"

#include <cmath>

#include "dlpack_abi.h"
#include "runtime.h"
#include "scan.h"

namespace nb = nanobind;

namespace efla {
namespace {

PyTypeObject* tensor_type = nullptr;
const dlpack::ExchangeApi* api = nullptr;

int dtype_code(dlpack::DataType dtype) {
  if (dtype.lanes != 1) return -1;
  if (dtype.code == dlpack::kFloat && dtype.bits == 32) return int(Dtype::float32);
  if (dtype.code == dlpack::kFloat && dtype.bits == 64) return int(Dtype::float64);
  if (dtype.code == dlpack::kFloat && dtype.bits == 16) return int(Dtype::float16);
  if (dtype.code == dlpack::kBfloat && dtype.bits == 16) return int(Dtype::bfloat16);
  return -1;
}

// A plain CPU tensor seen without owning it; false if it is anything else.
bool view(nb::handle object, int ndim, dlpack::Tensor& out) {
  if (Py_TYPE(object.ptr()) != tensor_type) return false;
  if (api->view_object(object.ptr(), &out) != 0) {
    PyErr_Clear();
    return false;
  }
  out.data = static_cast<char*>(out.data) + out.byte_offset;
  return out.device.type == dlpack::kCpu && out.ndim == ndim && out.strides != nullptr && dtype_code(out.dtype) >= 0;
}

Strided strided(const dlpack::Tensor& t) { return {t.data, t.strides[0], t.strides[1], t.strides[2]}; }

bool rows_contiguous(const dlpack::Tensor& t) { return t.strides[3] == 1 || t.shape[3] == 1; }

bool same_shape(const dlpack::Tensor& a, const dlpack::Tensor& b, int ndim) {
  for (int i = 0; i < ndim; ++i)
    if (a.shape[i] != b.shape[i]) return false;
  return true;
}

bool dense(const dlpack::Tensor& t) {
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

// A scalar per token and value head in the compute type, present exactly if the rule wants it.
bool scalar(nb::handle object, bool wanted, const dlpack::Tensor& v, dlpack::DataType compute, dlpack::Tensor& storage,
            Strided& out) {
  if (object.is_none()) return !wanted;
  if (!wanted || !view(object, 3, storage) || !same_shape(storage, v, 3)) return false;
  if (storage.dtype.code != compute.code || storage.dtype.bits != compute.bits) return false;
  out = strided(storage);
  return true;
}

void set_error(void*, const char*, const char* message) { PyErr_SetString(PyExc_MemoryError, message); }

nb::object allocate(int ndim, int64_t* shape, dlpack::DataType dtype, dlpack::Tensor& seen) {
  dlpack::Tensor prototype{nullptr, {dlpack::kCpu, 0}, ndim, dtype, shape, nullptr, 0};
  dlpack::ManagedTensor* managed = nullptr;
  void* object = nullptr;
  if (api->allocate(&prototype, &managed, nullptr, set_error) != 0 || api->object_from_managed(managed, &object) != 0 ||
      api->view_object(object, &seen) != 0) {
    if (object) Py_DECREF(static_cast<PyObject*>(object));
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

bool needs_beta(Rule rule) { return rule != Rule::linear; }

bool needs_gate(Rule rule) {
  return rule == Rule::ssd || rule == Rule::gated_delta || rule == Rule::gated_efla || rule == Rule::gated_efla_log;
}

}  // namespace

bool set_tensor_type(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return false;
  auto* table = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->version.major != 1 || !table->view_object) return false;
  tensor_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  api = table;
  return true;
}

nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle beta, nb::handle log_gate, int rule, bool l2norm,
                  nb::handle scale, nb::handle initial_state, bool output_final_state, bool in_place, int threads) {
  dlpack::Tensor tq, tk, tv, tb, tg, ts, to;
  if (!api || !view(k, 4, tk) || !view(q, 4, tq) || !view(v, 4, tv)) return nb::none();
  Problem p;
  p.dtype = Dtype(dtype_code(tk.dtype));
  p.rule = Rule(rule);
  const dlpack::DataType compute{dlpack::kFloat, uint8_t(p.dtype == Dtype::float64 ? 64 : 32), 1};
  if (dtype_code(tq.dtype) != int(p.dtype) || dtype_code(tv.dtype) != int(p.dtype) || !same_shape(tq, tk, 4) ||
      !same_shape(tv, tk, 2) || tk.shape[0] == 0 || tk.shape[1] == 0 || tk.shape[2] == 0 || tv.shape[2] == 0 || tv.shape[2] % tk.shape[2] || tk.shape[3] == 0 ||
      tv.shape[3] == 0 || tk.shape[3] > kMaxWidth || tv.shape[3] > kMaxWidth || !rows_contiguous(tq) ||
      !rows_contiguous(tk) || !rows_contiguous(tv) || !scalar(beta, needs_beta(p.rule), tv, compute, tb, p.erase) ||
      !scalar(log_gate, needs_gate(p.rule), tv, compute, tg, p.log_decay))
    return nb::none();
  p.l2norm = l2norm;
  p.scale = scale.is_none() ? 1.0 / std::sqrt(double(tk.shape[3])) : PyFloat_AsDouble(scale.ptr());
  if (PyErr_Occurred()) throw nb::python_error();
  p.q = strided(tq), p.k = strided(tk), p.v = strided(tv);
  p.batch = p.sequences = tk.shape[0], p.tokens = tk.shape[1], p.key_heads = tk.shape[2], p.value_heads = tv.shape[2];
  p.K = int(tk.shape[3]), p.V = int(tv.shape[3]), p.threads = threads;
  int64_t state_shape[4] = {p.sequences, p.value_heads, p.K, p.V};
  if (!initial_state.is_none()) {
    if (!view(initial_state, 4, ts) || ts.dtype.code != compute.code || ts.dtype.bits != compute.bits || !dense(ts))
      return nb::none();
    for (int i = 0; i < 4; ++i)
      if (ts.shape[i] != state_shape[i]) return nb::none();
    p.initial_state = ts.data;
  }
  nb::object o = allocate(4, tv.shape, tv.dtype, to);
  p.o = strided(to);
  nb::object final_state = nb::none();
  if (in_place && p.initial_state) {
    p.final_state = ts.data;
    final_state = nb::borrow(initial_state);
  } else if (output_final_state) {
    dlpack::Tensor tf;
    final_state = allocate(4, state_shape, compute, tf);
    p.final_state = tf.data;
  }
  unsigned status;
  {
    nb::gil_scoped_release release;
    status = run_forward(p);
  }
  if (status) return nb::int_(status);
  return nb::make_tuple(o, output_final_state ? final_state : nb::none());
}

}  // namespace efla
