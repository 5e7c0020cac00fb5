// The short causal convolution with SiLU, and its gradient, row by row in the layout [tokens, channels].
//
//     z_t = bias + sum_i w_i x_{t-W+1+i},  y = z sigmoid(z)
//     dz = dy sigmoid(z) (1 + z (1 - sigmoid(z))),   dx_t = sum_i w_i dz_{t+W-1-i},   dw_i = sum_t dz_t x_{t-W+1+i}
//
// The backward pass computes z anew: a piece of kConvTokens tokens needs dz of the W - 1 tokens after it as well.
#include "convert.h"
#include "rows.h"
#include "vmath.h"

namespace efla::EFLA_ISA {
namespace {

// One piece of a sequence; tokens are counted from the sequence's start.
struct Piece {
  int64_t sequence, batch, first, length;  // first: index of the sequence's first token in its batch entry
  int64_t begin, end;
};

Piece piece_at(const ConvProblem& p, int64_t item) {
  int64_t low = 0, high = p.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.item_offset[middle] <= item ? low : high) = middle;
  }
  Piece piece;
  piece.sequence = low;
  piece.batch = p.cu_seqlens ? 0 : low;
  piece.first = p.cu_seqlens ? p.cu_seqlens[low] : 0;
  piece.length = p.cu_seqlens ? p.cu_seqlens[low + 1] - piece.first : p.tokens;
  piece.begin = (item - p.item_offset[low]) * kConvTokens;
  piece.end = piece.begin + kConvTokens < piece.length ? piece.begin + kConvTokens : piece.length;
  return piece;
}

// d (z sigmoid(z)) / dz.
template <class T> EFLA_INLINE Vec<T> silu_slope(Vec<T> z) {
  const Vec<T> s = sigmoid<T>(z);
  return s * (T(1) + z * (T(1) - s));
}

template <class E> struct Conv {
  using T = Compute<E>;
  const ConvProblem& p;
  const Piece& piece;

  const T* weight(int i) const { return static_cast<const T*>(p.weight) + int64_t(i) * p.channels; }
  const E* x(int64_t t) const {
    return static_cast<const E*>(p.x) + piece.batch * p.x_batch + (piece.first + t) * p.x_token;
  }
  // Place of token t in the dense tensors.
  int64_t dense(int64_t t) const { return ((p.cu_seqlens ? 0 : piece.batch * p.tokens) + piece.first + t) * p.channels; }

  // Input at token t and column c; before the start the past, or zero.
  EFLA_INLINE Vec<T> input(int64_t t, int c, int left) const {
    if (t >= 0) return load_some(x(t) + c, left);
    if (!p.past) return Vec<T>{};
    return load_some(static_cast<const T*>(p.past) + (piece.sequence * (p.width - 1) + p.width - 1 + t) * p.channels + c, left);
  }

  EFLA_INLINE Vec<T> before_activation(int64_t t, int c, int left) const {
    Vec<T> z = p.bias ? load_some(static_cast<const T*>(p.bias) + c, left) : Vec<T>{};
    if (p.width == 4 && t >= 3 && left >= kLanes<T>) {
      const E* row = x(t) + c;
      EFLA_UNROLL for (int i = 0; i < 4; ++i) z += load(weight(i) + c) * load_elements(row + (i - 3) * p.x_token);
      return z;
    }
    for (int i = 0; i < p.width; ++i) z += load_some(weight(i) + c, left) * input(t - p.width + 1 + i, c, left);
    return z;
  }
};

template <class E> void forward_item(const ConvProblem& p, int64_t item) {
  using T = Compute<E>;
  const Piece piece = piece_at(p, item);
  const Conv<E> conv{p, piece};
  for (int64_t t = piece.begin; t < piece.end; ++t) {
    E* y = static_cast<E*>(p.y) + conv.dense(t);
    for (int c = 0; c < p.channels; c += kLanes<T>) {
      const int left = p.channels - c;
      Vec<T> z = conv.before_activation(t, c, left);
      store_some(y + c, p.silu ? z * sigmoid<T>(z) : z, left);
    }
  }
}

// Adds the sums over a piece, dw_i and in row W the bias's, to one vector of columns.
template <class T> EFLA_INLINE void add_sums(const Vec<T>* sum, int width, int64_t channels, int left, T* dweight) {
  for (int i = 0; i <= width; ++i) {
    T* to = dweight + i * channels;
    store_some(to, load_some(to, left) + sum[i], left);
  }
}

// dw_i += sum_t dz_t x_{t-W+1+i} and, in row W, the bias's sum_t dz_t, for one vector of columns.
template <class E>
EFLA_INLINE void weight_gradient(const Conv<E>& conv, int c, int left, const Compute<E>* dz, Compute<E>* dweight) {
  using T = Compute<E>;
  const int W = conv.p.width;
  Vec<T> sum[kMaxConvWidth + 1] = {}, window[kMaxConvWidth];
  for (int i = 1; i < W; ++i) window[i] = conv.input(conv.piece.begin - W + i, c, left);
  for (int64_t t = conv.piece.begin; t < conv.piece.end; ++t, dz += kConvColumns) {
    const Vec<T> g = load(dz);
    for (int i = 0; i + 1 < W; ++i) window[i] = window[i + 1];
    window[W - 1] = conv.input(t, c, left);
    for (int i = 0; i < W; ++i) sum[i] += g * window[i];
    sum[W] += g;
  }
  add_sums(sum, W, conv.p.channels, left, dweight + c);
}

// All gradients of a convolution of width 4 in one whole vector of columns: one walk down the tokens of a piece and the three
// after it, with the last four inputs and gradients in registers.
template <class E> void backward_vector(const Conv<E>& conv, int c, Compute<E>* dweight) {
  using T = Compute<E>;
  constexpr int W = 4;
  const ConvProblem& p = conv.p;
  const Piece& piece = conv.piece;
  const Vec<T> bias = p.bias ? load(static_cast<const T*>(p.bias) + c) : Vec<T>{};
  Vec<T> weight[W], x[W], dz[W] = {}, sum[W + 1] = {};
  for (int i = 0; i < W; ++i) weight[i] = load(conv.weight(i) + c);
  for (int i = 1; i < W; ++i) x[i] = conv.input(piece.begin - W + i, c, kLanes<T>);
  const int64_t first = piece.begin == 0 && p.dpast ? 1 - W : piece.begin;  // the first piece answers for the past too
  for (int64_t t = piece.begin; t < piece.end + W - 1; ++t) {
    EFLA_UNROLL for (int i = 0; i + 1 < W; ++i) x[i] = x[i + 1], dz[i] = dz[i + 1];
    dz[W - 1] = Vec<T>{};
    if (t < piece.length) {
      const E *row = conv.x(t) + c, *dy = static_cast<const E*>(p.dy) + conv.dense(t) + c;
      __builtin_prefetch(row + kLanes<T>), __builtin_prefetch(dy + kLanes<T>);  // for the next vector of columns
      x[W - 1] = load_elements(row), dz[W - 1] = load_elements(dy);
      if (p.silu) {
        Vec<T> z = bias;
        EFLA_UNROLL for (int i = 0; i < W; ++i) z += weight[i] * x[i];
        dz[W - 1] *= silu_slope<T>(z);
      }
    }
    if (t < piece.end) {
      EFLA_UNROLL for (int i = 0; i < W; ++i) sum[i] += dz[W - 1] * x[i];
      sum[W] += dz[W - 1];
    }
    const int64_t done = t - W + 1;
    if (done < first) continue;
    Vec<T> dx{};
    EFLA_UNROLL for (int i = 0; i < W; ++i) dx += weight[i] * dz[W - 1 - i];
    if (done >= 0) {
      store_elements(static_cast<E*>(p.dx) + conv.dense(done) + c, dx);
    } else {
      store(static_cast<T*>(p.dpast) + (piece.sequence * (W - 1) + W - 1 + done) * p.channels + c, dx);
    }
  }
  add_sums(sum, W, p.channels, kLanes<T>, dweight + c);
}

// Gradients of one piece in the columns [begin, end); dz has room for kConvTokens + W - 1 rows of kConvColumns.
template <class E> void backward_columns(const ConvProblem& p, const Piece& piece, int begin, int end, Compute<E>* dz,
                                         Compute<E>* dweight) {
  using T = Compute<E>;
  const Conv<E> conv{p, piece};
  const int W = p.width;
  const int64_t last = piece.end + W - 1 < piece.length ? piece.end + W - 1 : piece.length;  // rows of dz end here
  for (int64_t t = piece.begin; t < last; ++t) {
    const E* dy = static_cast<const E*>(p.dy) + conv.dense(t);
    T* to = dz + (t - piece.begin) * kConvColumns - begin;
    for (int c = begin; c < end; c += kLanes<T>) {
      const int left = end - c;
      Vec<T> g = load_some(dy + c, left);
      if (p.silu) g *= silu_slope<T>(conv.before_activation(t, c, left));
      store(to + c, g);
    }
  }
  for (int c = begin; c < end; c += kLanes<T>) weight_gradient(conv, c, end - c, dz + (c - begin), dweight);
  // The first piece answers for the past too.
  for (int64_t t = piece.begin ? piece.begin : p.dpast ? 1 - W : 0; t < piece.end; ++t) {
    for (int c = begin; c < end; c += kLanes<T>) {
      const int left = end - c;
      Vec<T> sum{};
      for (int i = 0; i < W; ++i) {
        const int64_t later = t + W - 1 - i;
        if (later < 0 || later >= last) continue;
        sum += load_some(conv.weight(i) + c, left) * load(dz + (later - piece.begin) * kConvColumns - begin + c);
      }
      if (t >= 0) {
        store_some(static_cast<E*>(p.dx) + conv.dense(t) + c, sum, left);
      } else {
        store_some(static_cast<T*>(p.dpast) + (piece.sequence * (W - 1) + W - 1 + t) * p.channels + c, sum, left);
      }
    }
  }
}

template <class E> void backward_group(const ConvProblem& p, int64_t group) {
  using T = Compute<E>;
  alignas(64) T dz[(kConvTokens + kMaxConvWidth - 1) * kConvColumns];
  const int64_t sums = int64_t(p.width + 1) * p.channels, items = p.item_offset[p.sequences];
  T* dweight = static_cast<T*>(p.dweight_parts) + group * sums;
  for (int64_t i = 0; i < sums; ++i) dweight[i] = 0;
  for (int64_t item = items * group / p.groups; item < items * (group + 1) / p.groups; ++item) {
    const Piece piece = piece_at(p, item);
    int c = 0;
    if (p.width == 4) {
      for (; c + kLanes<T> <= p.channels; c += kLanes<T>) backward_vector(Conv<E>{p, piece}, c, dweight);
    }
    for (; c < p.channels; c += kConvColumns)
      backward_columns<E>(p, piece, c, p.channels - c < kConvColumns ? p.channels : c + kConvColumns, dz, dweight);
  }
}

}  // namespace

void conv_forward(const ConvProblem& p, int64_t item) {
  with_elements(p.dtype, [&]<class E>(E) { forward_item<E>(p, item); });
}

void conv_backward(const ConvProblem& p, int64_t group) {
  with_elements(p.dtype, [&]<class E>(E) { backward_group<E>(p, group); });
}

}  // namespace efla::EFLA_ISA
