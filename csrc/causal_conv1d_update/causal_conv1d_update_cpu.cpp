// causal_conv1d_update on the CPU. Reference: npu_ops/ops/causal_conv1d_update/reference.py
#include "causal_conv1d/filter.h"
#include "common/indices.h"
#include "common/parallel.h"

namespace npu_ops {
namespace {

// The tokens [begin, end) of a sequence, its slot and first column in the pool of states, and its
// row of windows (-1: none).
struct Sequence {
  int64_t batch, begin, end, slot, first, window;
  bool skipped;
};

struct Arguments {
  const Tensor &x, &state, &y;
  const std::optional<Tensor>& window;
  int64_t pad, width;
  bool counted, update;  // counted: num_accepted_tokens is given
};

// Finds and checks all sequences before any state is written, so that an error leaves all
// unchanged.
std::vector<Sequence> find_sequences(const Arguments& all, const Indices& indices,
                                     const Indices& accepted, const std::optional<Tensor>& starts,
                                     const Indices& window_indices) {
  const int64_t length = all.x.size(1), most = all.state.size(2) - all.width + 2;
  std::vector<int64_t> bounds, slots, windows;
  if (starts) bounds = starts_of("query_start_loc", *starts, length);
  const int64_t count = starts ? static_cast<int64_t>(bounds.size()) - 1 : all.x.size(0);
  std::vector<Sequence> found;
  for (int64_t n = 0; n < count; ++n) {
    Sequence one{starts ? 0 : n, starts ? bounds[n] : 0, starts ? bounds[n + 1] : length};
    one.slot = indices.at_or(n, n);
    one.skipped = indices && one.slot == all.pad;
    if (!one.skipped) {
      slots.push_back(within("conv_state_indices", one.slot, 0, all.state.size(0) - 1));
      if (accepted) {
        one.first = within("num_accepted_tokens", accepted.at(n), 1, most) - 1;
        within("query_start_loc (a length)", one.end - one.begin, 0, most);
      }
    }
    if (all.window && !one.skipped) {
      one.window = within("intermediate_state_indices", window_indices.at_or(n, n), -1,
                          all.window->size(0) - 1);
      if (one.window >= 0) windows.push_back(one.window);
    }
    found.push_back(one);
  }
  if (all.update) check_distinct("conv_state_indices", std::move(slots));
  check_distinct("intermediate_state_indices", std::move(windows));
  return found;
}

// Copies a row of `count` channels, which need not be contiguous.
template <class T>
void copy_row(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t count) {
  if (from_stride == 1 && to_stride == 1) return void(std::copy(from, from + count, to));
  for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
}

template <class T>
void skip_outputs(const Arguments& all, const Sequence& s, int64_t c, int64_t count) {
  for (int64_t t = s.begin; t < s.end; ++t) {
    T* row = output<T>(all.y) + s.batch * all.y.stride(0) + t * all.y.stride(1) + c;
    std::fill(row, row + count, T{});
  }
}

// The W - 1 rows of a sequence's history, then its tokens, for a block of channels. `history` is a
// copy of these W - 1 rows, because the update overwrites the state that holds them.
template <class T>
struct Rows {
  Rows(const Arguments& all, const Sequence& s, int64_t c, int64_t count, T* history)
      : history(history),
        tokens(input<T>(all.x) + s.batch * all.x.stride(0) + s.begin * all.x.stride(1) + c),
        stride(all.x.stride(1)),
        before(all.width - 1) {
    const T* from = input<T>(all.state) + s.slot * all.state.stride(0) + c * all.state.stride(1);
    for (int64_t j = 0; j < before; ++j)
      copy_row(from + (s.first + j) * all.state.stride(2), all.state.stride(1),
               history + j * kChannels, 1, count);
  }
  const T* at(int64_t number) const {
    return number < before ? history + number * kChannels : tokens + (number - before) * stride;
  }
  T* history;
  const T* tokens;
  int64_t stride, before;
};

template <class T>
void write_state(const Arguments& all, const Sequence& s, const Rows<T>& rows, int64_t c,
                 int64_t count) {
  const int64_t tokens = s.end - s.begin, drop = all.counted ? 1 : tokens;
  const int64_t columns = std::min(all.state.size(2), all.width - 1 + tokens - drop);
  T* to = output<T>(all.state) + s.slot * all.state.stride(0) + c * all.state.stride(1);
  for (int64_t j = 0; tokens && j < columns; ++j)
    copy_row(rows.at(j + drop), 1, to + j * all.state.stride(2), all.state.stride(1), count);
}

template <class T>
void write_windows(const Arguments& all, const Sequence& s, const Rows<T>& rows, int64_t c,
                   int64_t count) {
  const Tensor& window = *all.window;
  if (s.window < 0) return;
  T* to = output<T>(window) + s.window * window.stride(0) + c * window.stride(2);
  for (int64_t t = 0; t < s.end - s.begin; ++t)
    for (int64_t j = 0; j < all.width - 1; ++j)
      copy_row(rows.at(t + 1 + j), 1, to + t * window.stride(1) + j * window.stride(3),
               window.stride(2), count);
}

template <class T, int W, bool SILU>
void update_sequence(const Arguments& all, const Filter& filter, const Sequence& s, int64_t c,
                     const T* zeros, T* history) {
  const int64_t count = filter.count(c);
  if (s.skipped) return skip_outputs<T>(all, s, c, count);
  const Rows<T> rows(all, s, c, count, history);
  for (int64_t t = 0; t < s.end - s.begin; ++t) {
    const auto back = Filter::each<W>(
        [&](int64_t j) { return j < filter.width ? rows.at(t + filter.width - 1 - j) : zeros; });
    T* to = output<T>(all.y) + s.batch * all.y.stride(0) + (s.begin + t) * all.y.stride(1) + c;
    convolve_row<T, W, SILU>(back, filter.taps<W>(c), filter.bias(c), zeros, to, count);
  }
  if (all.update) write_state(all, s, rows, c, count);
  if (all.window) write_windows(all, s, rows, c, count);
}

void update(Tensor x, Tensor conv_state, Tensor weight, std::optional<Tensor> bias,
            std::optional<Tensor> indices, std::optional<Tensor> accepted,
            std::optional<Tensor> starts, std::optional<Tensor> window,
            std::optional<Tensor> window_indices, int64_t pad, bool silu, bool update, Tensor y) {
  const Filter filter(weight, bias);
  const Arguments all{x, conv_state, y, window, pad, filter.width, accepted.has_value(), update};
  const auto sequences =
      find_sequences(all, Indices(indices), Indices(accepted), starts, Indices(window_indices));
  const int64_t blocks = filter.blocks();
  const int64_t items = static_cast<int64_t>(sequences.size()) * blocks;
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const std::vector<T> zeros(kChannels);
    dispatch_filter(filter.width, silu, [&]<int W, bool SILU>() {
      parallel(items, x.numel() / std::max<int64_t>(1, items), [&](int64_t begin, int64_t end) {
        std::vector<T> history((filter.width - 1) * kChannels);
        for (int64_t item = begin; item < end; ++item)
          update_sequence<T, W, SILU>(all, filter, sequences[item / blocks],
                                      item % blocks * kChannels, zeros.data(), history.data());
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("causal_conv1d_update_cpu", TORCH_BOX(&update));
}

}  // namespace npu_ops
