// Process-wide choices: the instruction set, and the OpenMP runtime whose threads run the kernels.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace efla {

// Names of the instruction sets this CPU can run, best first: "avx512", "avx2", "neon", "baseline".
std::vector<std::string> simd_levels();
std::string active_simd();
// Throws std::invalid_argument for an unknown name or one the CPU does not have.
void set_simd(const std::string& name);
const Kernels& active_kernels();
// Whether AVX-512 is in use on an AMD CPU of family 26 (Zen 5) or later. MKL takes its AVX2 code there.
bool mkl_misses_avx512();

// Uses GOMP_parallel of an OpenMP runtime that is already loaded (torch's). Returns false if there is none.
bool set_parallel_runtime(const std::string& path);
bool has_parallel_runtime();

// Calls body(argument) on each of `threads` threads; body divides the work among them and must not throw. Without a
// runtime, and in a forked child (whose runtime has lost its threads), it runs on the calling thread only.
void run_parallel(int threads, void (*body)(void*), void* argument);

// Inside a body: the number of this thread and the size of its team. A thread keeps its number from call to call.
struct TeamPlace {
  int number, size;
};
TeamPlace team_place();

}  // namespace efla
