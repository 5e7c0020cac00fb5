// Instruction-set selection by cpuid, and parallel regions on an OpenMP runtime that is already in the process.
//
// Threads come from torch's own OpenMP runtime through the stable entry point GOMP_parallel, which libgomp, libomp and
// libiomp5 export. A second pool next to torch's spinning workers is up to two times slower.
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#if defined(EFLA_X86)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace efla {
namespace {

using ParallelEntry = void (*)(void (*)(void*), void*, unsigned, unsigned);
using CountEntry = int (*)();

std::atomic<ParallelEntry> g_parallel{nullptr};
std::atomic<CountEntry> g_thread_number{nullptr}, g_team_size{nullptr};
std::atomic<bool> g_forked{false};

struct Level {
  const Kernels* kernels;
  const char* name;
  bool available;
};

// Best first. Users know the portable build as "baseline": plain x86-64, or what the compiler targets elsewhere.
const std::vector<Level>& levels() {
  static const std::vector<Level> all = [] {
    std::vector<Level> found;
#if defined(EFLA_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    found.push_back({&kernels_avx512, "avx512", avx512});
    found.push_back({&kernels_avx2, "avx2", avx2});
#elif defined(EFLA_AARCH64)
    found.push_back({&kernels_neon, "neon", true});
#endif
    found.push_back({&kernels_portable, "baseline", true});
    return found;
  }();
  return all;
}

const Level& find_level(const std::string& name) {
  std::string known;
  for (const Level& level : levels()) {
    if (name == level.name) {
      if (!level.available) throw std::invalid_argument("this CPU does not have the instruction set '" + name + "'");
      return level;
    }
    known += std::string(known.empty() ? "" : ", ") + level.name;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; known here: " + known);
}

const Level& default_level() {
  if (const char* forced = std::getenv("EFLA_SIMD"); forced && *forced) return find_level(forced);
  for (const Level& level : levels())
    if (level.available) return level;
  return levels().back();
}

std::atomic<const Level*> g_level{nullptr};

const Level& current_level() {
  const Level* level = g_level.load(std::memory_order_acquire);
  if (!level) {
    level = &default_level();
    g_level.store(level, std::memory_order_release);
  }
  return *level;
}

}  // namespace

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels())
    if (level.available) names.push_back(level.name);
  return names;
}

std::string active_simd() { return current_level().name; }

bool mkl_misses_avx512() {
#if defined(EFLA_X86)
  static const bool is_zen5_or_later = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    return ((a >> 8) & 0xf) + ((a >> 20) & 0xff) >= 26;
  }();
  return is_zen5_or_later && current_level().kernels == &kernels_avx512;
#else
  return false;
#endif
}

void set_simd(const std::string& name) { g_level.store(&find_level(name), std::memory_order_release); }
const Kernels& active_kernels() { return *current_level().kernels; }

bool set_parallel_runtime(const std::string& path) {
  // RTLD_NOLOAD finds a runtime that is already loaded and never loads a second one.
  void* library = path.empty() ? RTLD_DEFAULT : dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (!path.empty() && !library) return false;
  auto entry = reinterpret_cast<ParallelEntry>(dlsym(library, "GOMP_parallel"));
  auto thread_number = reinterpret_cast<CountEntry>(dlsym(library, "omp_get_thread_num"));
  auto team_size = reinterpret_cast<CountEntry>(dlsym(library, "omp_get_num_threads"));
  if (!entry || !thread_number || !team_size) return false;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forked.store(true); });
  if (registered != 0) return false;
  g_thread_number.store(thread_number);
  g_team_size.store(team_size);
  g_parallel.store(entry);
  return true;
}

bool has_parallel_runtime() { return g_parallel.load() != nullptr && !g_forked.load(); }

void run_parallel(int threads, void (*body)(void*), void* argument) {
  ParallelEntry entry = g_parallel.load();
  if (threads > 1 && entry && !g_forked.load()) {
    entry(body, argument, unsigned(threads), 0);
  } else {
    body(argument);
  }
}

TeamPlace team_place() {
  CountEntry number = g_thread_number.load(), size = g_team_size.load();
  if (!number || !size || g_forked.load()) return {0, 1};
  return {number(), size()};
}

}  // namespace efla
