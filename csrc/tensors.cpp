#include "tensors.h"

#include <nanobind/ndarray.h>

#include <cerrno>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/uio.h>
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace efla {
namespace {

Torch torch;
const dlpack::ExchangeApi* api = nullptr;

constexpr const char* kDtypeNames[] = {"float32", "bfloat16", "float16", "float64", "int8"};

dlpack::DataType data_type(Dtype dtype) {
  if (dtype == Dtype::int8) return {dlpack::kInt, 8, 1};
  const bool is_brain = dtype == Dtype::bfloat16;
  const int bits = dtype == Dtype::float64 ? 64 : dtype == Dtype::float32 ? 32 : 16;
  return {is_brain ? dlpack::kBfloat : dlpack::kFloat, uint8_t(bits), 1};
}

bool same(dlpack::DataType a, dlpack::DataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

std::string describe(dlpack::DataType t) {
  const char* kind = t.code == dlpack::kFloat    ? "float"
                     : t.code == dlpack::kBfloat ? "bfloat"
                     : t.code == dlpack::kInt    ? "int"
                                                 : "type";
  return kind + std::to_string(t.bits);
}

template <class Sizes> std::string describe_shape(const Sizes& sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

nb::object call(PyObject* function, PyObject* argument = nullptr) {
  PyObject* answer = PyObject_Vectorcall(function, &argument, argument ? 1 : 0, nullptr);
  if (!answer) throw nb::python_error();
  return nb::steal(answer);
}

// Whether the memory is writable. Asks the operating system, because a store to read-only memory would end the process.
bool can_write(void* data) {
#if defined(__linux__)
  iovec byte{data, 1};
  return process_vm_readv(getpid(), &byte, 1, &byte, 1, 0) == 1 || errno != EFAULT;
#else
  (void)data;
  return true;
#endif
}

// The same with a cache of tensors known to be writable: in decoding, a system call per token costs too much.
bool is_writable(PyObject* tensor, void* data) {
  struct Known {
    PyObject* tensor;
    void* data;
  };
  thread_local Known known[256] = {};
  Known& entry = known[reinterpret_cast<uintptr_t>(tensor) / 16 % 256];
  if (entry.tensor == tensor && entry.data == data) return true;
  if (!can_write(data)) return false;
  entry = {tensor, data};
  return true;
}

}  // namespace

void bind_torch(const Torch& bound, bool use_c_table) {
  torch = bound;
  api = nullptr;
  const nb::handle type(reinterpret_cast<PyObject*>(torch.tensor_type));
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!use_c_table || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
  auto* table = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->version.major == 1 && table->view_object) api = table;
}

bool records_nothing() {
  static PyObject* const current_level = PyUnicode_InternFromString("_current_level");
  if (call(torch.is_grad_enabled).ptr() != Py_False || PyLong_AsLong(call(torch.dispatch_depth).ptr()) != 0)
    return false;
  PyObject* level = PyDict_GetItem(torch.forward_ad, current_level);
  return !level || PyLong_AsLong(level) < 0;
}

int num_threads() { return int(PyLong_AsLong(call(torch.get_num_threads).ptr())); }

void increment_version(nb::handle tensor) {
  call(torch.increment_version, nb::steal(PyTuple_Pack(1, tensor.ptr())).ptr());
}

bool is_plain_tensor(nb::handle object) { return Py_TYPE(object.ptr()) == torch.tensor_type; }

Tensor::Tensor(nb::handle object, const char* name) : object_(object), name_(name) {
  if (object.is_none()) return;
  if (!torch.tensor_type || !PyObject_TypeCheck(object.ptr(), torch.tensor_type))
    throw nb::type_error((std::string(name) + " must be a torch.Tensor").c_str());
  if (call(torch.is_neg, object.ptr()).ptr() != Py_False)
    refuse("is a view that negates its memory; call resolve_neg() first");
  if (api) {
    if (api->view_object(object.ptr(), &view_) != 0) {
      PyErr_Clear();
      refuse("has no memory that the CPU kernels can read");
    }
  } else {
    // Without the C table: the public DLPack protocol, which refuses tensors that require a gradient.
    nb::ndarray<nb::ro> array;
    nb::object detached = object.attr("detach")();
    if (!nb::try_cast(detached, array) || array.ndim() > 8) refuse("has no memory that the CPU kernels can read");
    for (size_t i = 0; i < array.ndim(); ++i) shape_[i] = array.shape(i), strides_[i] = array.stride(i);
    const nb::dlpack::dtype t = array.dtype();
    view_ = {const_cast<void*>(static_cast<const void*>(array.data())),
             {array.device_type(), 0},
             int32_t(array.ndim()),
             {t.code, t.bits, t.lanes},
             shape_,
             strides_,
             0};
    owner_ = detached;
  }
  present_ = true;
  view_.data = static_cast<char*>(view_.data) + view_.byte_offset;
  if (view_.device.type != dlpack::kCpu || !view_.strides) refuse("must be a strided tensor on the CPU");
  int64_t elements = 1;
  for (int i = 0; i < view_.ndim; ++i) elements *= view_.shape[i];
  // A storage resized to 0 has a null pointer, to which torch adds the offset. Real pointers are rarely that small, so the
  // exact check runs only for small ones.
  if (elements && reinterpret_cast<uintptr_t>(view_.data) >> 32 == 0 &&
      nb::cast<uintptr_t>(object.attr("untyped_storage")().attr("data_ptr")()) == 0)
    refuse("has no memory: its storage was resized to 0");
}

void Tensor::refuse(const char* what) const { throw nb::value_error((std::string(name_) + " " + what).c_str()); }

void Tensor::check_shape(Shape shape) const {
  bool fits = view_.ndim == int32_t(shape.size());
  const int64_t* actual = view_.shape;
  for (int64_t size : shape) fits = fits && *actual++ == size;
  if (fits) return;
  const std::vector<int64_t> given(view_.shape, view_.shape + view_.ndim);
  refuse(("must have shape " + describe_shape(shape) + ", got " + describe_shape(given)).c_str());
}

void Tensor::check_dtype(Dtype dtype) const {
  if (same(view_.dtype, data_type(dtype))) return;
  throw nb::type_error(
      (std::string(name_) + " must be " + kDtypeNames[int(dtype)] + ", got " + describe(view_.dtype)).c_str());
}

const Tensor& Tensor::dimensions(int count) const {
  if (!present_) refuse("must be a torch.Tensor, got None");
  if (view_.ndim != count)
    refuse(("must have " + std::to_string(count) + " dimensions, got " + std::to_string(view_.ndim)).c_str());
  return *this;
}

bool Tensor::is(Dtype dtype) const { return present_ && same(view_.dtype, data_type(dtype)); }

Dtype Tensor::dtype() const {
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16, Dtype::float64})
    if (same(view_.dtype, data_type(dtype))) return dtype;
  throw nb::type_error(
      (std::string(name_) + " must be float32, bfloat16, float16 or float64, got " + describe(view_.dtype)).c_str());
}

Strided Tensor::scalars(Shape shape, Dtype dtype) const {
  if (!present_) return {};
  check_shape(shape);
  check_dtype(dtype);
  return {view_.data, view_.strides[0], view_.strides[1], view_.strides[2]};
}

Strided Tensor::rows(Shape shape, Dtype dtype) const {
  const Strided s = scalars(shape, dtype);
  const int last = view_.ndim - 1;
  if (present_ && view_.shape[last] != 1 && view_.strides[last] != 1)
    refuse("must be contiguous in its last dimension");
  return s;
}

void* Tensor::dense(Shape shape, Dtype dtype) const {
  if (!present_) return nullptr;
  check_shape(shape);
  check_dtype(dtype);
  int64_t expected = 1;
  for (int i = view_.ndim - 1; i >= 0; --i) {
    if (view_.shape[i] != 1 && view_.strides[i] != expected && expected != 0) refuse("must be contiguous");
    expected *= view_.shape[i];
  }
  return view_.data;
}

void* Tensor::writable(Shape shape, Dtype dtype) const {
  void* data = dense(shape, dtype);
  if (data && !is_writable(object_.ptr(), data))
    refuse("is read-only memory and cannot be updated in place; pass a clone()");
  return data;
}

const int64_t* Tensor::integers(int64_t count) const {
  if (!present_) return nullptr;
  check_shape({count});
  if (!same(view_.dtype, {dlpack::kInt, 64, 1}) || (count > 1 && view_.strides[0] != 1))
    refuse("must be contiguous int64");
  return static_cast<const int64_t*>(view_.data);
}

bool can_allocate() { return api != nullptr; }

Allocated allocate_tensor(Shape shape, Dtype dtype) {
  const auto set_error = [](void*, const char*, const char* message) { PyErr_SetString(PyExc_MemoryError, message); };
  dlpack::Tensor prototype{
      nullptr, {dlpack::kCpu, 0}, int32_t(shape.size()), data_type(dtype), const_cast<int64_t*>(shape.begin()), nullptr,
      0};
  dlpack::ManagedTensor* managed = nullptr;
  void* object = nullptr;
  dlpack::Tensor view;
  if (api->allocate(&prototype, &managed, nullptr, set_error) != 0 || api->object_from_managed(managed, &object) != 0)
    throw nb::python_error();
  nb::object owner = nb::steal(static_cast<PyObject*>(object));
  if (api->view_object(object, &view) != 0) throw nb::python_error();
  return {owner, static_cast<char*>(view.data) + view.byte_offset};
}

}  // namespace efla
