// The loop over the tokens of sequences that causal_conv1d and causal_conv1d_qkv share.
#pragma once

#include <algorithm>
#include <vector>

#include "causal_conv1d/filter.h"
#include "common/indices.h"
#include "common/parallel.h"
#include "l2norm/normalize.h"

namespace npu_ops {

constexpr int64_t kTokens = 128;  // the most tokens of a Piece

// Sets g[0] to the gradient of a row of the convolution, before the activation. From g[0] and the
// gradients g[j] of the rows before, computes grad_x of the row width - 1 back, and adds `extra`.
// back: the taps from the last to the first.
template <class T, int W, bool SILU, class G>
NPU_OPS_CLONES void gradient_row(Taps<const T, W> x, Taps<const float, W> w, const float* bias,
                                 const G* grad, Taps<float, W> g, Taps<const float, W> back,
                                 const T* extra, T* grad_x, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    float own = load(grad[i]);
    if constexpr (SILU) {
      const float z = convolved<T, W>(x, w, bias, i), gate = sigmoid(z);
      own *= gate * (1.0f + z * (1.0f - gate));
    }
    g[0][i] = own;
    float value = load(extra[i]) + own * back[0][i];
#pragma GCC unroll 8
    for (int j = 1; j < W; ++j) value += g[j][i] * back[j][i];
    store(grad_x + i, value);
  }
}

// Adds a row's share to the gradients of the bias and of the taps.
template <class T, int W>
NPU_OPS_CLONES void add_to_sums(const float* g, Taps<const T, W> x, float* bias,
                                Taps<float, W> sums, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    bias[i] += g[i];
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) sums[j][i] += g[i] * load(x[j][i]);
  }
}

// A sequence has tokens [start, stop) of batch element `batch`.
struct Sequence {
  int64_t index, batch, start, stop;
};

// Tokens [begin, end) of a sequence.
struct Piece : Sequence {
  int64_t begin, end;
};

inline std::vector<Sequence> sequences_of(const Tensor& x,
                                          const std::optional<Tensor>& cu_seqlens) {
  std::vector<Sequence> sequences;
  if (!cu_seqlens) {
    for (int64_t b = 0; b < x.size(0); ++b) sequences.push_back({b, b, 0, x.size(1)});
    return sequences;
  }
  const auto starts = starts_of("cu_seqlens", *cu_seqlens, x.size(1));
  for (int64_t n = 0; n + 1 < static_cast<int64_t>(starts.size()); ++n)
    sequences.push_back({n, 0, starts[n], starts[n + 1]});
  return sequences;
}

// Writes zeros to the rows of a [1, T, ...] tensor that lie after the last sequence.
inline void clear_behind(const Tensor& x, const std::vector<Sequence>& sequences) {
  if (!x.numel()) return;
  const int64_t begin = sequences.empty() ? 0 : sequences.back().stop, count = x.size(1);
  const int64_t width = x.numel() / x.size(0) / count;
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    for (int64_t t = begin; t < count; ++t) std::fill_n(output<T>(x) + t * x.stride(1), width, T{});
  });
}

inline int64_t tokens_of(const std::vector<Sequence>& sequences) {
  int64_t tokens = 0;
  for (const Sequence& s : sequences) tokens += s.stop - s.start;
  return tokens;
}

inline std::vector<Piece> pieces_of(const std::vector<Sequence>& sequences) {
  std::vector<Piece> pieces;
  for (const Sequence& s : sequences)
    for (int64_t begin = s.start; begin < s.stop; begin += kTokens)
      pieces.push_back({s, begin, std::min(begin + kTokens, s.stop)});
  return pieces;
}

// The rows of a [B, T, D] tensor with contiguous channels. data is null if there is no tensor.
template <class T>
struct Tokens {
  explicit Tokens(const std::optional<Tensor>& x) {
    if (!x) return;
    data = const_cast<T*>(input<T>(*x));
    batch_stride = x->stride(0), stride = x->stride(1);
  }
  T* row(const Sequence& s, int64_t t, int64_t c) const {
    return data + s.batch * batch_stride + t * stride + c;
  }
  T* data = nullptr;
  int64_t batch_stride = 0, stride = 0;
};

// The rows of a [N, D, W] state with contiguous channels. data is null if there is no state.
template <class T>
struct State {
  explicit State(const std::optional<Tensor>& state) {
    if (!state) return;
    data = const_cast<T*>(input<T>(*state));
    sequence_stride = state->stride(0), width = state->size(2), stride = state->stride(2);
  }
  T* row(const Sequence& s, int64_t column, int64_t c) const {
    return data + s.index * sequence_stride + column * stride + c;
  }
  // Returns row t before the start of a sequence, t < s.start.
  T* before(const Sequence& s, int64_t t, int64_t c) const {
    return row(s, width + t - s.start, c);
  }
  // Returns a pointer to row t in the final state, or `none` if the final state does not contain
  // row t.
  T* after(const Sequence& s, int64_t t, int64_t c, T* none) const {
    return data && t >= s.stop - width ? row(s, t - (s.stop - width), c) : none;
  }
  T* data = nullptr;
  int64_t sequence_stride = 0, width = 0, stride = 0;
};

// Returns row t of a sequence: a token, a row of the initial state before the start (zeros without
// a state), or zeros after the end.
template <class T>
const T* input_row(const Tokens<T>& x, const State<T>& state, const Sequence& s, int64_t t,
                   int64_t c, const T* zeros) {
  if (t >= s.stop) return zeros;
  if (t >= s.start) return x.row(s, t, c);
  return state.data ? state.before(s, t, c) : zeros;
}

template <class T>
void copy_final_states(const Tokens<T>& x, const State<T>& state, const State<T>& final_state,
                       const std::vector<Sequence>& sequences, int64_t channels) {
  if (!final_state.data) return;
  const std::vector<T> zeros(channels);
  for (const Sequence& s : sequences)
    for (int64_t t = s.stop - final_state.width; t < s.stop; ++t) {
      const T* row = input_row(x, state, s, t, 0, zeros.data());
      std::copy(row, row + channels, final_state.after(s, t, 0, nullptr));
    }
}

// Channels [column, column + count) of the input, which are processed together. `rows` is the
// output of these channels alone, or its gradient. If head is not 0, every group of `head`
// channels is normalised (l2norm) after the activation.
template <class T>
struct Block {
  int64_t column, count;
  Tokens<T> rows;
  int64_t head;
  float eps;
};

// Appends the blocks for the `width` channels of `rows`. The first of them is channel `column` of
// the input.
template <class T>
void add_blocks(std::vector<Block<T>>& blocks, int64_t column, int64_t width, Tokens<T> rows,
                int64_t head = 0, float eps = 0.0f) {
  const int64_t most = head ? kChannels / head * head : kChannels;
  for (int64_t c = 0; c < width; c += most, rows.data += most)
    blocks.push_back({column + c, std::min(most, width - c), rows, head, eps});
}

// The tensors that the forward of one element type reads besides the filter.
template <class T>
struct Inputs {
  Tokens<T> x, residual;
  State<T> state;
};

// Returns a row for each of W taps: rows t, t - 1, ... of a sequence, and zeros for taps that the
// filter lacks.
template <int W, class T>
Taps<const T, W> rows_back(const Filter& filter, const Tokens<T>& x, const State<T>& state,
                           const Sequence& s, int64_t t, int64_t c, const T* zeros) {
  return Filter::each<W>([&](int64_t j) {
    return j < filter.width ? input_row(x, state, s, t - j, c, zeros) : zeros;
  });
}

template <class T, int W, bool SILU>
void forward_piece(const Filter& filter, const Inputs<T>& in, const Block<T>& block,
                   const Piece& piece, const T* zeros, float* y) {
  const int64_t c = block.column, count = block.count, head = block.head;
  for (int64_t t = piece.begin; t < piece.end; ++t) {
    const auto rows = rows_back<W>(filter, in.x, in.state, piece, t, c, zeros);
    const T* residual = in.residual.data ? in.residual.row(piece, t, c) : zeros;
    T* to = block.rows.row(piece, t, 0);
    const auto convolve = [&](auto* out) {
      convolve_row<T, W, SILU>(rows, filter.taps<W>(c), filter.bias(c), residual, out, count);
    };
    if (!head) {
      convolve(to);
      continue;
    }
    convolve(y);
    for (int64_t i = 0; i < count; i += head) normalize(y + i, to + i, head, block.eps);
  }
}

template <class T>
void walk(const Filter& filter, const Inputs<T>& in, const std::vector<Block<T>>& blocks,
          const std::vector<Sequence>& sequences, bool silu) {
  const auto pieces = pieces_of(sequences);
  const int64_t across = static_cast<int64_t>(blocks.size());
  const int64_t items = static_cast<int64_t>(pieces.size()) * across;
  const int64_t elements = tokens_of(sequences) * filter.channels;
  dispatch_filter(filter.width, silu, [&]<int W, bool SILU>() {
    parallel(items, elements / std::max<int64_t>(1, items), [&](int64_t begin, int64_t end) {
      const std::vector<T> zeros(kChannels);
      std::vector<float> y(kChannels);
      for (int64_t item = begin; item < end; ++item)
        forward_piece<T, W, SILU>(filter, in, blocks[item % across], pieces[item / across],
                                  zeros.data(), y.data());
    });
  });
}

// The gradients of taps and bias are summed in up to kGroups groups of pieces. The number of groups
// does not depend on the number of threads, so the sums do not either.
constexpr int64_t kGroups = 32;

struct Sums {
  Sums(const Filter& filter, const std::vector<Sequence>& sequences)
      : filter(filter),
        pieces(pieces_of(sequences)),
        groups(std::clamp<int64_t>(pieces.size(), 1, kGroups)),
        size((filter.width + 1) * filter.channels),
        values(groups * size, 0.0f) {}

  // Returns the index of the first piece of a group.
  int64_t first_piece(int64_t group) const {
    return group * static_cast<int64_t>(pieces.size()) / groups;
  }
  // Returns row j of a group's sums from channel c on: sums of the tap for the token j back, or of
  // the bias for j >= width.
  float* row(int64_t group, int64_t j, int64_t c) {
    return values.data() + group * size + std::min(j, filter.width) * filter.channels + c;
  }

  void total(const Tensor& grad_weight, const std::optional<Tensor>& grad_bias) {
    for (int64_t group = 1; group < groups; ++group)
      for (int64_t i = 0; i < size; ++i) values[i] += values[group * size + i];
    for (int64_t j = 0; j < filter.width; ++j)
      narrow(row(0, j, 0), grad_weight, (filter.width - 1 - j) * grad_weight.stride(1));
    if (grad_bias) narrow(row(0, filter.width, 0), *grad_bias, 0);
  }

  void narrow(const float* from, const Tensor& to, int64_t offset) const {
    dispatch(to.scalar_type(), "weight", [&]<class T>(T*) {
      for (int64_t i = 0; i < filter.channels; ++i)
        store(output<T>(to) + offset + i * to.stride(0), from[i]);
    });
  }

  const Filter& filter;
  const std::vector<Piece> pieces;
  const int64_t groups, size;
  std::vector<float> values;
};

// The tensors that the backward of one element type reads and writes besides the blocks of the
// gradient.
template <class T>
struct Gradients {
  Tokens<T> x, grad_x;
  State<T> grad_final_state, state, grad_initial_state;
};

// Rows of one block of channels:
// - zeros, no_gradient: zeros to read.
// - unwanted, unwanted_sums: written and never used.
// - y, grad_y: a row before its norm, and its gradient.
// - g: the gradients of the last W rows of the convolution.
template <class T, int W>
struct Scratch {
  std::vector<T> zeros = std::vector<T>(kChannels), unwanted = zeros;
  std::vector<float> y = std::vector<float>(kChannels), grad_y = y, unwanted_sums = y,
                     no_gradient = y;
  std::vector<float> g = std::vector<float>(W * kChannels);
  float* gradient(int64_t t) { return g.data() + (t & (W - 1)) * kChannels; }
};

// Let g be the gradient of the convolution. The gradient of row p needs g of the rows p to p +
// width - 1, so the loop can compute it when it is at row t = p + width - 1. The loop therefore
// ends width - 1 rows after the piece. At the start of a sequence, the first width - 1 rows p are
// rows of the state.
template <class T, int W, bool SILU>
void backward_piece(const Filter& filter, const Gradients<T>& all, Sums& sums, int64_t group,
                    const Block<T>& block, const Piece& piece, Scratch<T, W>& scratch) {
  const int64_t c = block.column, count = block.count, head = block.head, before = filter.width - 1;
  const T* zeros = scratch.zeros.data();
  const auto taps = filter.taps<W>(c);
  const auto taps_back = Filter::each<W>([&](int64_t j) { return filter.tap(before - j, c); });
  const auto sum_rows = Filter::each<W>([&](int64_t j) {
    return j < filter.width ? sums.row(group, j, c) : scratch.unwanted_sums.data();
  });
  const auto target = [&](int64_t p) {
    if (p >= piece.begin && p < piece.end) return all.grad_x.row(piece, p, c);
    const bool in_state =
        p < piece.begin && piece.begin == piece.start && all.grad_initial_state.data;
    return in_state ? all.grad_initial_state.before(piece, p, c) : scratch.unwanted.data();
  };
  std::fill(scratch.g.begin(), scratch.g.end(), 0.0f);
  for (int64_t t = piece.begin; t < piece.end + before; ++t) {
    const auto rows = rows_back<W>(filter, all.x, all.state, piece, t, c, zeros);
    const auto g = Filter::each<W>([&](int64_t j) {
      return j < filter.width ? scratch.gradient(t - j) : scratch.no_gradient.data();
    });
    const T* extra = all.grad_final_state.after(piece, t - before, c, const_cast<T*>(zeros));
    const auto step = [&](const auto* grad) {
      gradient_row<T, W, SILU>(rows, taps, filter.bias(c), grad, g, taps_back, extra,
                               target(t - before), count);
    };
    const T* grad = t < piece.stop ? block.rows.row(piece, t, 0) : zeros;
    if (head && t < piece.stop) {
      float *y = scratch.y.data(), *grad_y = scratch.grad_y.data();
      convolve_row<T, W, SILU>(rows, taps, filter.bias(c), zeros, y, count);
      for (int64_t i = 0; i < count; i += head)
        normalize_backward(grad + i, y + i, grad_y + i, head, block.eps);
      step(grad_y);
    } else {
      step(grad);
    }
    if (t < piece.end)
      add_to_sums<T, W>(g[0], rows, sums.row(group, filter.width, c), sum_rows, count);
  }
}

// Writes the columns of the initial state's gradient that the loop does not reach: column 0, and
// all columns if the sequence has no tokens.
template <class T>
void fill_state_gradient(const State<T>& grad_initial_state, const State<T>& grad_final_state,
                         const std::vector<Sequence>& sequences, int64_t channels) {
  for (const Sequence& s : sequences) {
    const bool empty = s.start == s.stop;
    for (int64_t column = 0; column < (empty ? grad_initial_state.width : 1); ++column) {
      T* to = grad_initial_state.row(s, column, 0);
      if (empty && grad_final_state.data) {
        const T* from = grad_final_state.row(s, column, 0);
        std::copy(from, from + channels, to);
      } else {
        std::fill(to, to + channels, T{});
      }
    }
  }
}

template <class T>
void walk_backward(const Filter& filter, const Gradients<T>& all, Sums& sums,
                   const std::vector<Block<T>>& blocks, const std::vector<Sequence>& sequences,
                   bool silu) {
  if (all.grad_initial_state.data)
    fill_state_gradient(all.grad_initial_state, all.grad_final_state, sequences, filter.channels);
  const int64_t across = static_cast<int64_t>(blocks.size());
  const int64_t items = sums.groups * across;
  const int64_t elements = tokens_of(sequences) * filter.channels;
  dispatch_filter(filter.width, silu, [&]<int W, bool SILU>() {
    parallel(items, elements / std::max<int64_t>(1, items), [&](int64_t begin, int64_t end) {
      Scratch<T, W> scratch;
      for (int64_t item = begin; item < end; ++item)
        for (int64_t index = sums.first_piece(item / across);
             index < sums.first_piece(item / across + 1); ++index)
          backward_piece<T, W, SILU>(filter, all, sums, item / across, blocks[item % across],
                                     sums.pieces[index], scratch);
    });
  });
}

}  // namespace npu_ops
