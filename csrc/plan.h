// Runs a Problem: splits it into tasks, allocates scratch memory, and runs the tasks on threads.
#pragma once

#include "problem.h"

namespace efla {

// Number of elements (of the state's type) in the buffer of boundary states that forward fills for backward.
int64_t boundary_size(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t value_heads, int K, int V);

// Throws std::invalid_argument unless sizes, rule and cu_seqlens are consistent.
void validate(const Problem& p);

// Both return the status bits of problem.h and throw std::invalid_argument or std::bad_alloc.
// With check_domain, a state is not updated in place unless the status is 0.
unsigned run_forward(const Problem& p);
unsigned run_backward(const Problem& p);

}  // namespace efla
