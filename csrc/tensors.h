// The boundary between torch and the kernels: the only way from a Python object to a pointer.
//
// Every accessor takes the shape and the element type that the kernel uses and checks them before it returns a pointer.
// Whatever a caller passes, nothing outside a tensor is read or written.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "dlpack_abi.h"
#include "problem.h"

namespace efla {

using Shape = std::initializer_list<int64_t>;

// torch's own Python callables that this boundary uses. A call costs 20 ns and needs no torch headers.
struct Torch {
  PyTypeObject* tensor_type = nullptr;
  PyObject *is_neg = nullptr, *is_grad_enabled = nullptr, *dispatch_depth = nullptr, *get_num_threads = nullptr,
           *increment_version = nullptr;
  PyObject* forward_ad = nullptr;  // the dictionary of torch.autograd.forward_ad
};

// use_c_table: read tensors through torch's C table (torch 2.10 and later), which makes a call cheaper.
void bind_torch(const Torch& torch, bool use_c_table);

// Whether torch is eager and records nothing: no reverse-mode or forward-mode gradients, no dispatch mode.
bool records_nothing();
int num_threads();
void increment_version(nanobind::handle tensor);

// Whether the object is exactly a torch.Tensor. Subclasses may override operations, which the kernels would bypass.
bool is_plain_tensor(nanobind::handle object);

// A tensor argument, or None. Every mismatch is a ValueError or TypeError that names the argument.
class Tensor {
 public:
  Tensor(nanobind::handle object, const char* name);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  explicit operator bool() const { return present_; }
  int64_t size(int dimension) const { return view_.shape[dimension]; }
  const Tensor& dimensions(int count) const;  // refuses any other number of dimensions
  Dtype dtype() const;                        // refuses types without kernels
  bool is(Dtype dtype) const;

  // The rows of a tensor [B, T, H, D] or [B, T, C]: its last dimension is contiguous. Null if absent.
  Strided rows(Shape shape, Dtype dtype) const;
  // A tensor [B, T, H] of any strides. Null if absent.
  Strided scalars(Shape shape, Dtype dtype) const;
  // Contiguous memory; null if absent.
  void* dense(Shape shape, Dtype dtype) const;
  // The same, for memory of the caller that the kernel overwrites. Refuses read-only memory.
  void* writable(Shape shape, Dtype dtype) const;
  const int64_t* integers(int64_t count) const;

 private:
  [[noreturn]] void refuse(const char* what) const;
  void check_shape(Shape shape) const;
  void check_dtype(Dtype dtype) const;

  nanobind::handle object_;
  nanobind::object owner_;  // keeps the exported memory alive where there is no C table
  dlpack::Tensor view_{};
  const char* name_;
  bool present_ = false;
  int64_t shape_[8], strides_[8];
};

// A new contiguous tensor made by torch, and its memory.
struct Allocated {
  nanobind::object object;
  void* data;
};
bool can_allocate();
Allocated allocate_tensor(Shape shape, Dtype dtype);

}  // namespace efla
