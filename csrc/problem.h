// A call as plain data, shared by the bindings, the planner and the build of every instruction set. README.md explains the
// words.
//
//     S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,      o_t = scale S_t^T q_t
//
// No code here: kernels/ is compiled several times with different flags, and the linker could choose one build's copy of
// an inline function for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rule_table.h"

namespace efla {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2, float64 = 3, int8 = 4 };  // int8: weights only

// Bits of the status word: inputs outside the rule's domain.
constexpr unsigned kNegativeBeta = 1u;
constexpr unsigned kPositiveLogGate = 2u;

constexpr int kMaxWidth = 256;    // largest K and V
constexpr int kTile = 64;         // tokens whose keys are packed at once; forward saves a state at each tile boundary
constexpr int kBlock = 16;        // tokens per step of the forward loop and per chunk of the backward pass
constexpr int kQuad = 4;          // tokens per sweep over the state
constexpr int kPanel = 32;        // columns of S stored together: scratch states are [panels][padded_K][32]
constexpr int kDecodeTokens = 8;  // sequences up to this length take the decode path (no packing)

// A tensor [B, T, H, width] (or [B, T, H]): strides in elements, the last dimension contiguous.
struct Strided {
  void* data = nullptr;
  int64_t batch = 0, token = 0, head = 0;
};

struct Problem {
  Dtype dtype = Dtype::float32;
  Rule rule = Rule::raw;
  bool normalise_q = false, normalise_k = false;  // x / sqrt(x.x + 1e-6)
  double scale = 1.0;
  Strided q, k, v;
  Strided log_decay, erase, write;  // Rule::raw only; log_decay and erase may be null: zeros
  Strided log_gate, beta;           // all other rules; may be null: zeros and ones
  const void* initial_state = nullptr;
  const int64_t* cu_seqlens = nullptr;
  int64_t batch = 0, tokens = 0, sequences = 0, key_heads = 0, value_heads = 0;
  int K = 0, V = 0;
  int threads = 1;

  // Forward.
  Strided o;
  void* final_state = nullptr;      // may equal initial_state
  bool check_domain = false;        // refuse inputs outside the rule's domain before initial_state is overwritten
  void* boundary_states = nullptr;  // forward writes, backward reads

  // Backward: inputs, then dense outputs (any may be null except dq, dk, dv).
  Strided d_o;
  const void* d_final_state = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void *d_log_decay = nullptr, *d_erase = nullptr, *d_write = nullptr;
  void *d_log_gate = nullptr, *d_beta = nullptr;
  void* d_initial_state = nullptr;
};

// How the work is split. A task is what a thread takes: one sequence, a range of key heads, one head part and one column
// part. In the backward pass the parts depend on the shape only. Forward's parts and task_key_heads also depend on the number
// of threads, and change no result. Neighbouring key heads share a task because their rows are neighbours in memory.
struct Plan {
  int group = 1;         // value heads per key head
  int head_parts = 1;    // ranges into which a group's value heads are split
  int column_parts = 1;  // ranges into which the panels are split
  int panels = 1;
  int padded_K = 16;
  int task_key_heads = 1;  // neighbouring key heads that one task takes
  int64_t tasks = 0;
  bool decode = false;
  bool prefetch_states = false;              // in decoding, during the head before; changes no result
  const int64_t* boundary_offset = nullptr;  // [sequences + 1], in saved states per head
  // Backward with more than one part: partial sums in the compute type.
  void* dq_parts = nullptr;  // [head_parts * column_parts][B, T, Hk, K]
  void* dk_parts = nullptr;
  void* scalar_parts = nullptr;  // [column_parts][3][B, T, Hv], in the order of scalar_gradients (backward.cpp)
};

struct Task {
  int64_t sequence, batch, first_token, length;  // first_token is an index into the token dimension
  int64_t key_begin, key_end;                    // key heads
  int head_offset, heads;  // of each key head, the value heads [offset, offset + heads) of its group
  int panel_begin, panel_end;
  int part, column_part;
};

struct NormProblem;  // rows.h
struct ConvProblem;
struct GateProblem;
struct MixerStep;
struct ProductsProblem;

// Entry points of one instruction set's build (kernels/entry_points.cpp).
struct Kernels {
  const char* name;
  size_t (*forward_scratch)(const Problem&, const Plan&);
  void (*forward)(const Problem&, const Plan&, const Task&, void* scratch, unsigned* status);
  void (*decode)(const Problem&, const Plan&, const Task&, unsigned* status);
  size_t (*backward_scratch)(const Problem&, const Plan&);
  void (*backward)(const Problem&, const Plan&, const Task&, void* scratch, unsigned* status);
  void (*reduce)(const Problem&, const Plan&, int64_t begin, int64_t end);  // rows of [B * T]
  void (*norm_forward)(const NormProblem&, int64_t begin, int64_t end);     // rows
  void (*norm_backward)(const NormProblem&, int64_t part);
  void (*conv_forward)(const ConvProblem&, int64_t tile);
  void (*conv_backward)(const ConvProblem&, int64_t part);
  void (*gate_forward)(const GateProblem&, int64_t begin, int64_t end);  // elements
  void (*gate_backward)(const GateProblem&, int64_t begin, int64_t end);
  void (*mixer_step)(const MixerStep&, int64_t index);                               // sequence * key_heads + key head
  void (*products)(const ProductsProblem&, int weight, int64_t begin, int64_t end);  // columns
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_neon;

}  // namespace efla
