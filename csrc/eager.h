// One call from Python tensors to Python tensors, for inference without autograd, tracing or packing.
#pragma once

#include <nanobind/nanobind.h>

namespace efla {

// Remember torch.Tensor and its DLPack exchange table; false if this torch has none (then attend always declines).
bool set_tensor_type(nanobind::handle tensor_type);

// (o, final_state or None), or None if the call is not plain enough (the caller then takes the general path, which
// also explains what is wrong with bad input), or the status bits of problem.h as an int.
nanobind::object attend(nanobind::handle q, nanobind::handle k, nanobind::handle v, nanobind::handle beta,
                        nanobind::handle log_gate, int rule, bool l2norm, nanobind::handle scale,
                        nanobind::handle initial_state, bool output_final_state, bool in_place, int threads);

}  // namespace efla
