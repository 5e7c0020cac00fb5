// The part of the DLPack 1.x binary interface that tensors.cpp uses to read torch's tensors from C++.
#pragma once

#include <cstdint>

namespace efla::dlpack {

constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4;

struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct Version {
  uint32_t major, minor;
};
struct ManagedTensor;  // opaque: made by the framework and returned to it

// The table behind type.__dlpack_c_exchange_api__, a capsule named "dlpack_exchange_api".
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out);
  int (*view_object)(void* object, Tensor* out);  // non-owning, valid while the object is
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace efla::dlpack
