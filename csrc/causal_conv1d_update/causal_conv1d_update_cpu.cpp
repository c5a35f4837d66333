// causal_conv1d_update on the CPU. Definition: npu_ops/ops/causal_conv1d_update/reference.py
#include <limits>

#include "causal_conv1d/filter.h"
#include "common/parallel.h"

namespace npu_ops {
namespace {

// An optional vector of int32 or int64.
struct Integers {
  explicit Integers(const std::optional<Tensor>& tensor)
      : tensor(tensor), wide(tensor && tensor->scalar_type() == ScalarType::Long) {}
  int64_t at(int64_t index, int64_t otherwise) const {
    if (!tensor) return otherwise;
    const int64_t offset = index * tensor->stride(0);
    return wide ? input<int64_t>(*tensor)[offset] : input<int32_t>(*tensor)[offset];
  }
  const std::optional<Tensor>& tensor;
  bool wide;
};

// Where a sequence's tokens, state and windows are; `good` unless it is skipped or wrong.
struct Sequence {
  int64_t batch, begin, end, slot, first, window;
  bool good, skipped;
};

struct Arguments {
  const Tensor &x, &state, &y;
  const std::optional<Tensor>& window;
  Integers indices, accepted, starts, window_indices;
  int64_t pad, width;
  bool update;

  int64_t count() const { return starts.tensor ? starts.tensor->size(0) - 1 : x.size(0); }

  Sequence sequence(int64_t n) const {
    const int64_t first = accepted.at(n, 1) - 1, slot = indices.at(n, n);
    const int64_t begin = std::max<int64_t>(starts.at(n, 0), 0);
    const int64_t end = std::min(starts.at(n + 1, x.size(1)), x.size(1));
    const bool good = slot != pad && slot >= 0 && slot < state.size(0) && first >= 0 &&
                      first + width - 1 <= state.size(2);
    return {starts.tensor ? 0 : n,   begin, end,        slot, first,
            window_indices.at(n, n), good,  slot == pad};
  }
};

// A row whose channels may lie apart.
template <class T>
void copy_row(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t count) {
  if (from_stride == 1 && to_stride == 1) return void(std::copy(from, from + count, to));
  for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
}

template <class T>
void fill_outputs(const Arguments& all, const Sequence& s, int64_t c, int64_t count) {
  T value;
  store(&value, s.skipped ? 0.0f : std::numeric_limits<float>::quiet_NaN());
  for (int64_t t = s.begin; t < s.end; ++t) {
    T* row = output<T>(all.y) + s.batch * all.y.stride(0) + t * all.y.stride(1) + c;
    std::fill(row, row + count, value);
  }
}

// The W - 1 rows of a sequence's history and then its tokens, for a block of channels. The history
// is a copy: the state is overwritten.
template <class T>
struct Rows {
  Rows(const Arguments& all, const Sequence& s, int64_t c, int64_t count)
      : history((all.width - 1) * kChannels),
        tokens(input<T>(all.x) + s.batch * all.x.stride(0) + s.begin * all.x.stride(1) + c),
        stride(all.x.stride(1)),
        before(all.width - 1) {
    const T* from = input<T>(all.state) + s.slot * all.state.stride(0) + c * all.state.stride(1);
    for (int64_t j = 0; j < before; ++j)
      copy_row(from + (s.first + j) * all.state.stride(2), all.state.stride(1),
               history.data() + j * kChannels, 1, count);
  }
  // A filter with fewer taps reads none from before the history.
  const T* at(int64_t number) const {
    if (number >= before) return tokens + (number - before) * stride;
    return number < 0 ? nullptr : history.data() + number * kChannels;
  }
  std::vector<T> history;
  const T* tokens;
  int64_t stride, before;
};

template <class T>
void write_state(const Arguments& all, const Sequence& s, const Rows<T>& rows, int64_t c,
                 int64_t count) {
  const int64_t tokens = s.end - s.begin, drop = all.accepted.tensor ? 1 : tokens;
  const int64_t columns = std::min(all.state.size(2), all.width - 1 + tokens - drop);
  T* to = output<T>(all.state) + s.slot * all.state.stride(0) + c * all.state.stride(1);
  for (int64_t j = 0; tokens && j < columns; ++j)
    copy_row(rows.at(j + drop), 1, to + j * all.state.stride(2), all.state.stride(1), count);
}

template <class T>
void write_windows(const Arguments& all, const Sequence& s, const Rows<T>& rows, int64_t c,
                   int64_t count) {
  const Tensor& window = *all.window;
  if (s.window < 0 || s.window >= window.size(0)) return;
  T* to = output<T>(window) + s.window * window.stride(0) + c * window.stride(2);
  for (int64_t t = 0; t < s.end - s.begin; ++t)
    for (int64_t j = 0; j < all.width - 1; ++j)
      copy_row(rows.at(t + 1 + j), 1, to + t * window.stride(1) + j * window.stride(3),
               window.stride(2), count);
}

template <class T, int W, bool SILU>
void update_sequence(const Arguments& all, const Filter& filter, const Sequence& s, int64_t c,
                     const T* zeros) {
  const int64_t count = filter.count(c);
  if (!s.good) return fill_outputs<T>(all, s, c, count);
  const Rows<T> rows(all, s, c, count);
  for (int64_t t = 0; t < s.end - s.begin; ++t) {
    const int64_t row = t + W - 1;
    T* to = output<T>(all.y) + s.batch * all.y.stride(0) + (s.begin + t) * all.y.stride(1) + c;
    convolve_row<T, W, SILU>(rows.at(row), rows.at(row - 1), rows.at(row - 2), rows.at(row - 3),
                             filter.tap(0, c), filter.tap(1, c), filter.tap(2, c), filter.tap(3, c),
                             filter.bias(c), zeros, to, count);
  }
  if (all.update) write_state(all, s, rows, c, count);
  if (all.window) write_windows(all, s, rows, c, count);
}

void update(Tensor x, Tensor conv_state, Tensor weight, std::optional<Tensor> bias,
            std::optional<Tensor> indices, std::optional<Tensor> accepted,
            std::optional<Tensor> starts, std::optional<Tensor> window,
            std::optional<Tensor> window_indices, int64_t pad, bool silu, bool update, Tensor y) {
  const Filter filter(weight, bias);
  const Arguments all{x,
                      conv_state,
                      y,
                      window,
                      Integers(indices),
                      Integers(accepted),
                      Integers(starts),
                      Integers(window_indices),
                      pad,
                      filter.width,
                      update};
  const int64_t blocks = filter.blocks(), items = all.count() * blocks;
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const std::vector<T> zeros(kChannels);
    dispatch_filter(filter.width, silu, [&]<int W, bool SILU>() {
      parallel(items, x.numel() / std::max<int64_t>(1, items), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item)
          update_sequence<T, W, SILU>(all, filter, all.sequence(item / blocks),
                                      item % blocks * kChannels, zeros.data());
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("causal_conv1d_update_cpu", TORCH_BOX(&update));
}

}  // namespace npu_ops
