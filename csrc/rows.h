// Row kernels of the layers around the scan: norm over the last axis, short causal convolution, feed-forward gate.
//
// Plain data and declarations only, for the reason given in problem.h.
#pragma once

#include "problem.h"

namespace efla {

// y = x * weight / sqrt(factor * sum(x^2) + eps) for `rows` dense rows, times silu(gate) if there is one. weight and its gradient
// have the compute type.
struct NormProblem {
  Dtype dtype = Dtype::float32;
  int64_t rows = 0;
  int width = 0;
  double factor = 1, eps = 0;
  const void* x = nullptr;
  const void* weight = nullptr;  // may be null: ones
  const void* gate = nullptr;    // [rows, width], may be null
  void* y = nullptr;
  const void* dy = nullptr;
  void* dx = nullptr;
  void* dgate = nullptr;
  void* dweight_parts = nullptr;  // [parts][width], may be null
  int64_t parts = 1;
};

// y_t = act( bias + sum_i weight[i] x_{t - W + 1 + i} ) in each channel; `past` holds the W - 1 inputs before the first.
// weight, bias, past and their gradients have the compute type; y, dy, dx are dense.
struct ConvProblem {
  Dtype dtype = Dtype::float32;
  bool silu = true;
  int64_t batch = 0, tokens = 0, sequences = 0;
  int channels = 0, width = 0;
  const void* x = nullptr;
  int64_t x_batch = 0, x_token = 0;  // strides in elements; channels are contiguous
  const void* weight = nullptr;      // [W, C]
  const void* bias = nullptr;        // [C] or null
  const void* past = nullptr;        // [sequences, W - 1, C] or null: zeros
  const int64_t* cu_seqlens = nullptr;
  void* y = nullptr;
  const void* dy = nullptr;
  void* dx = nullptr;
  void* dpast = nullptr;
  void* dweight_parts = nullptr;  // [parts][W + 1, C]: weight, then bias
  int64_t parts = 1;
  const int64_t* tile_offset = nullptr;  // [sequences + 1]: index of each sequence's first tile
};

// y = silu(gate) * up, element by element; all dense.
struct GateProblem {
  Dtype dtype = Dtype::float32;
  int64_t count = 0;
  const void* gate = nullptr;
  const void* up = nullptr;
  void* y = nullptr;
  const void* dy = nullptr;
  void* dgate = nullptr;
  void* dup = nullptr;
};

// A matrix [columns, width] in the element type of the rows that it multiplies. For float32 rows it may be float16, or int8 with
// a scale for each column: each row of the matrix is then width numbers and the bytes of a float32 that they are multiplied by.
struct Weight {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
};
constexpr int kScaleBytes = 4;

// Products of a few rows with several weights: y_i = x W_i^T, or y_0 = silu(x W_0^T) * (x W_1^T) if gated, or with a residual
// y_0 = residual + x W_0^T. All dense; the weights of gate and up have one type. A result does not depend on the number of rows, so a
// sequence decodes alike in every batch.
struct ProductsProblem {
  static constexpr int kMaxWeights = 8;
  Dtype dtype = Dtype::float32;
  bool gated = false;
  int64_t rows = 0, width = 0;
  const void* x = nullptr;  // [rows, width]
  int count = 0;
  Weight weight[kMaxWeights] = {};  // [columns, width]
  void* y[kMaxWeights] = {};        // [rows, columns]
  int64_t columns[kMaxWeights] = {};
  const void* residual = nullptr;  // [rows, columns], or null; may not overlap y
};

// One decoded token of a linear-attention or Mamba-2 layer; see kernels/mixer_step.cpp. Inputs [B, 1, columns] have contiguous
// columns and `batch` strides; parameters and states are dense. All but the memory have the element type.
struct MixerStep {
  Dtype dtype = Dtype::float32;
  Rule rule = Rule::raw;
  bool normalise_q = false, normalise_k = false;
  double scale = 1, beta_factor = 1, eps = 0;
  int64_t batch = 0, key_heads = 0, value_heads = 0;
  int K = 0, V = 0;
  int conv_width = 0;                                   // 0: no convolution
  int conv_kept = 0;                                    // inputs in conv_state: W - 1, or W as transformers keeps
  int64_t conv_channels = 0;                            // 2 Hk K + Hv V
  int64_t q_channel = 0, k_channel = 0, v_channel = 0;  // where each begins in conv_state
  Strided q, k, v;
  Strided b, a, g;  // of beta, the forget gate and the output gate; each may be null
  const void *q_weight = nullptr, *k_weight = nullptr, *v_weight = nullptr;  // [C, W]
  const void *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;        // [C], or null
  void* conv_state = nullptr;                                                // [B, conv_channels, conv_kept], updated
  void* memory = nullptr;                                                    // [B, Hv, K, V], updated
  const void *A_log = nullptr, *dt_bias = nullptr;  // [Hv]; null: the gate is logsigmoid(a) / 16
  const void* D = nullptr;                          // [Hv]; not null: a Mamba-2 layer, in float32 or float64
  const void* norm_weight = nullptr;                // [V], Mamba-2: [Hv V]
  void* y = nullptr;                                // [B, 1, Hv V]
};

// One decoded token of a block: hidden = x + Wo mixer(norm(x)), y = hidden + Wd (silu(Wg n) * (Wu n)) with n = norm(hidden).
// Without an MLP (inner = 0), y = hidden. All dense; norm weights have the compute type.
struct BlockStep {
  MixerStep mixer;  // without the inputs q ... g and the output y, which are scratch memory here
  int64_t width = 0, inner = 0;
  double eps = 0, mlp_eps = 0;
  const void* x = nullptr;                                        // [B, width]
  const void *norm_weight = nullptr, *mlp_norm_weight = nullptr;  // [width]
  Weight projections[6] = {};                                     // of q, k, v, b, a, g: [columns, width], or null
  Weight o_weight;                                                // [width, Hv V]
  Weight gate_weight, up_weight;                                  // [inner, width]
  Weight down_weight;                                             // [width, inner]
  void* y = nullptr;                                              // [B, width]
};

constexpr int kMaxConvWidth = 16;

// Throws std::invalid_argument unless sizes and cu_seqlens are consistent.
void check_conv(const ConvProblem& p);

void run_norm_forward(const NormProblem& p, int threads);
void run_norm_backward(const NormProblem& p, int threads);
void run_conv_forward(ConvProblem p, int threads);
void run_conv_backward(ConvProblem p, int threads);
void run_gate_forward(const GateProblem& p, int threads);
void run_gate_backward(const GateProblem& p, int threads);
void run_mixer_step(const MixerStep& p, int threads);
void run_products(const ProductsProblem& p, int threads);
void run_block_step(const BlockStep& p, int threads);

// Number of partial sums of the weights' gradients. Depends on the shape only.
int64_t norm_parts(int64_t rows);
int64_t conv_parts(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens);

}  // namespace efla
