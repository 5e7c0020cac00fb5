// The process-wide choices: which instruction set, and whose threads.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace efla {

// Names of the instruction sets this CPU can run, best first: "avx512", "avx2", "baseline".
std::vector<std::string> simd_levels();
std::string active_simd();
// Throws std::invalid_argument for an unknown name or one the CPU does not have.
void set_simd(const std::string& name);
const Kernels& active_kernels();

// Takes GOMP_parallel from an OpenMP runtime that is already loaded (torch's); false if it is not there.
bool set_parallel_runtime(const std::string& path);
bool has_parallel_runtime();

// body(argument) on each of `threads` threads, which share the work among themselves; on the calling thread alone without
// a runtime, or in a forked child, whose runtime has lost its threads. body must not throw.
void run_parallel(int threads, void (*body)(void*), void* argument);

// Inside a body: which of how many threads this is. The numbers are stable from call to call.
struct TeamPlace {
  int number, size;
};
TeamPlace team_place();

}  // namespace efla
