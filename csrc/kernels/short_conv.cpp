// The short causal convolution with SiLU and its gradient, in the layout [tokens, channels].
//
//     z_t = bias + sum_i w_i x_{t-W+1+i},  y = z sigmoid(z)
//     dz = dy sigmoid(z) (1 + z (1 - sigmoid(z))),   dx_t = sum_i w_i dz_{t+W-1-i},   dw_i = sum_t dz_t x_{t-W+1+i}
//
// The backward pass recomputes z. A tile also needs dz of the W - 1 tokens after it.
#include "convert.h"
#include "rows.h"
#include "vmath.h"

namespace efla::EFLA_ISA {
namespace {

// One tile of a sequence; begin and end count tokens from the start of the sequence.
struct Tile {
  int64_t sequence, batch, first, length;  // first: index of the sequence's first token in its batch entry
  int64_t begin, end;
};

Tile tile_at(const ConvProblem& p, int64_t index) {
  int64_t low = 0, high = p.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.tile_offset[middle] <= index ? low : high) = middle;
  }
  Tile tile;
  tile.sequence = low;
  tile.batch = p.cu_seqlens ? 0 : low;
  tile.first = p.cu_seqlens ? p.cu_seqlens[low] : 0;
  tile.length = p.cu_seqlens ? p.cu_seqlens[low + 1] - tile.first : p.tokens;
  tile.begin = (index - p.tile_offset[low]) * kTile;
  tile.end = tile.begin + kTile < tile.length ? tile.begin + kTile : tile.length;
  return tile;
}

template <class E> struct Conv {
  using T = Compute<E>;
  const ConvProblem& p;
  const Tile& tile;

  const T* weight(int i) const { return static_cast<const T*>(p.weight) + int64_t(i) * p.channels; }
  const E* x(int64_t t) const {
    return static_cast<const E*>(p.x) + tile.batch * p.x_batch + (tile.first + t) * p.x_token;
  }
  // Offset of token t in the dense tensors.
  int64_t dense(int64_t t) const { return ((p.cu_seqlens ? 0 : tile.batch * p.tokens) + tile.first + t) * p.channels; }

  // Input at token t and column c. Negative t reads `past`, or zero without one.
  EFLA_INLINE Vec<T> input(int64_t t, int c, int left) const {
    if (t >= 0) return load_some(x(t) + c, left);
    if (!p.past) return Vec<T>{};
    return load_some(static_cast<const T*>(p.past) + (tile.sequence * (p.width - 1) + p.width - 1 + t) * p.channels + c,
                     left);
  }

  EFLA_INLINE Vec<T> before_activation(int64_t t, int c, int left) const {
    Vec<T> z = p.bias ? load_some(static_cast<const T*>(p.bias) + c, left) : Vec<T>{};
    for (int i = 0; i < p.width; ++i) z += load_some(weight(i) + c, left) * input(t - p.width + 1 + i, c, left);
    return z;
  }
};

template <class E> EFLA_INLINE void store_output(E* y, Vec<Compute<E>> z, bool silu, int left) {
  store_some(y, silu ? z * sigmoid<Compute<E>>(z) : z, left);
}

// The whole vectors of kRows tokens from t on, all of whose inputs are tokens of the sequence. Each vector of inputs and
// weights is loaded once for all of them. Returns the number of columns done.
constexpr int kRows = 4;
template <int Width, class E> int forward_rows(const Conv<E>& conv, int64_t t) {
  using T = Compute<E>;
  const ConvProblem& p = conv.p;
  const T *weight = conv.weight(0), *bias = static_cast<const T*>(p.bias);
  const E* x = conv.x(t - Width + 1);
  E* y = static_cast<E*>(p.y) + conv.dense(t);
  const int64_t channels = p.channels, token = p.x_token;
  const bool silu = p.silu;
  int c = 0;
  for (; c + kLanes<T> <= channels; c += kLanes<T>) {
    Vec<T> w[Width], in[kRows + Width - 1];
    EFLA_UNROLL_FOR (int i = 0; i < Width; ++i) w[i] = load(weight + i * channels + c);
    EFLA_UNROLL_FOR (int i = 0; i < kRows + Width - 1; ++i) in[i] = load_elements(x + i * token + c);
    EFLA_UNROLL_FOR (int row = 0; row < kRows; ++row) {
      Vec<T> z = bias ? load(bias + c) : Vec<T>{};
      EFLA_UNROLL_FOR (int i = 0; i < Width; ++i) z += w[i] * in[row + i];
      store_output(y + row * channels + c, z, silu, kLanes<T>);
    }
  }
  return c;
}

template <class E> void forward_tile(const ConvProblem& p, int64_t index) {
  using T = Compute<E>;
  const Tile tile = tile_at(p, index);
  const Conv<E> conv{p, tile};
  for (int64_t t = tile.begin; t < tile.end;) {
    const bool together = p.width == 4 && t >= 3 && t + kRows <= tile.end;
    const int done = together ? forward_rows<4>(conv, t) : 0;
    const int64_t next = together ? t + kRows : t + 1;
    for (; t < next; ++t) {
      E* y = static_cast<E*>(p.y) + conv.dense(t);
      for (int c = done; c < p.channels; c += kLanes<T>) {
        const int left = p.channels - c;
        store_output(y + c, conv.before_activation(t, c, left), p.silu, left);
      }
    }
  }
}

// All gradients of one vector of columns, in one pass over the tile's tokens and the W - 1 after it, with the last W inputs
// and gradients in registers. Width = 0 takes any width, and columns that do not fill a vector.
template <int Width, class E> void backward_vector(const Conv<E>& conv, int c, Compute<E>* dweight) {
  using T = Compute<E>;
  constexpr int room = Width ? Width : kMaxConvWidth;
  const ConvProblem& p = conv.p;
  const Tile& tile = conv.tile;
  const int W = Width ? Width : p.width, left = Width ? kLanes<T> : p.channels - c;
  if (W > room) __builtin_unreachable();  // checked by check_conv in rows.cpp
  const Vec<T> bias = p.bias ? load_some(static_cast<const T*>(p.bias) + c, left) : Vec<T>{};
  Vec<T> weight[room], x[room], dz[room] = {}, sum[room + 1] = {};
  for (int i = 0; i < W; ++i) weight[i] = load_some(conv.weight(i) + c, left);
  for (int i = 1; i < W; ++i) x[i] = conv.input(tile.begin - W + i, c, left);
  const int64_t first = tile.begin == 0 && p.dpast ? 1 - W : tile.begin;  // the first tile also computes dpast
  for (int64_t t = tile.begin; t < tile.end + W - 1; ++t) {
    EFLA_UNROLL_FOR (int i = 0; i + 1 < W; ++i) x[i] = x[i + 1], dz[i] = dz[i + 1];
    dz[W - 1] = Vec<T>{};
    if (t < tile.length) {
      const E *row = conv.x(t) + c, *dy = static_cast<const E*>(p.dy) + conv.dense(t) + c;
      __builtin_prefetch(row + kLanes<T>), __builtin_prefetch(dy + kLanes<T>);  // for the next vector of columns
      x[W - 1] = load_some(row, left), dz[W - 1] = load_some(dy, left);
      if (p.silu) {
        Vec<T> z = bias;
        EFLA_UNROLL_FOR (int i = 0; i < W; ++i) z += weight[i] * x[i];
        dz[W - 1] *= silu_slope<T>(z, sigmoid<T>(z));
      }
    }
    if (t < tile.end) {
      EFLA_UNROLL_FOR (int i = 0; i < W; ++i) sum[i] += dz[W - 1] * x[i];
      sum[W] += dz[W - 1];
    }
    const int64_t done = t - W + 1;
    if (done < first) continue;
    Vec<T> dx{};
    EFLA_UNROLL_FOR (int i = 0; i < W; ++i) dx += weight[i] * dz[W - 1 - i];
    if (done >= 0) {
      store_some(static_cast<E*>(p.dx) + conv.dense(done) + c, dx, left);
    } else {
      store_some(static_cast<T*>(p.dpast) + (tile.sequence * (W - 1) + W - 1 + done) * p.channels + c, dx, left);
    }
  }
  for (int i = 0; i <= W; ++i) {
    T* to = dweight + int64_t(i) * p.channels + c;
    store_some(to, load_some(to, left) + sum[i], left);
  }
}

template <class E> void backward_part(const ConvProblem& p, int64_t part) {
  using T = Compute<E>;
  const int64_t sums = int64_t(p.width + 1) * p.channels, tiles = p.tile_offset[p.sequences];
  T* dweight = static_cast<T*>(p.dweight_parts) + part * sums;
  for (int64_t i = 0; i < sums; ++i) dweight[i] = 0;
  for (int64_t index = tiles * part / p.parts; index < tiles * (part + 1) / p.parts; ++index) {
    const Tile tile = tile_at(p, index);
    const Conv<E> conv{p, tile};
    int c = 0;
    if (p.width == 4) {
      for (; c + kLanes<T> <= p.channels; c += kLanes<T>) backward_vector<4>(conv, c, dweight);
    }
    for (; c < p.channels; c += kLanes<T>) backward_vector<0>(conv, c, dweight);
  }
}

}  // namespace

void conv_forward(const ConvProblem& p, int64_t index) {
  with_elements(p.dtype, [&]<class E>(E) { forward_tile<E>(p, index); });
}

void conv_backward(const ConvProblem& p, int64_t part) {
  with_elements(p.dtype, [&]<class E>(E) { backward_part<E>(p, part); });
}

}  // namespace efla::EFLA_ISA
