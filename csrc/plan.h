// Running a Problem: split, allocate, parallelise.
#pragma once

#include "problem.h"

namespace efla {

// Number of elements (of the state's type) of the border-state buffer that forward fills for backward.
int64_t boundary_size(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t value_heads, int K, int V);

// Throws std::invalid_argument unless sizes, rule and cu_seqlens are consistent.
void validate(const Problem& p);

// Both return the status bits of problem.h. They throw std::invalid_argument, std::bad_alloc.
// With check_domain, an update in place of a state is not begun if the status is not 0.
unsigned run_forward(const Problem& p);
unsigned run_backward(const Problem& p);

}  // namespace efla
