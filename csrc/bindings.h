// What the Python bindings share. tensors.h checks every tensor that a kernel reads or writes.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "tensors.h"

namespace nb = nanobind;
using efla::Dtype;
using efla::Rule;
using efla::Tensor;

// Sums, states and scalars of half-precision tensors are float32.
inline Dtype compute_type(Dtype dtype) { return dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32; }

inline void check(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

// What attend's caller says of q and k (True, False, "q" or "k"), as `problem` takes it.
inline std::string normalised(nb::handle which) {
  if (which.ptr() == Py_True) return "qk";
  if (which.ptr() == Py_False) return "";
  const std::string name = nb::cast<std::string>(which);
  if (name != "q" && name != "k") throw std::invalid_argument("the general path names the mistake");
  return name;
}

// Every tensor argument may be None.
inline auto tensor_argument(const char* name) { return nb::arg(name).none(); }

// bindings_rows.cpp: norm, convolution, gate, products and the decoding steps of layers.
void add_rows(nb::module_& m);
