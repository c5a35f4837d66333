// causal_conv1d_update for Ascend910B and Ascend910_93. Reference:
// npu_ops/ops/causal_conv1d_update/reference.py
//
// A piece of work is a block of channels of one sequence. A tile is a few tokens of a piece. They
// are loaded, with the W - 1 rows before them, into one buffer. The convolution reads that buffer.
// States and windows (the W - 1 rows after each token, see intermediate_conv_window) are stored
// from it without a conversion. bisheng inserts the barriers inside the vector pipe
// (--cce-auto-sync). Queues order the copies, so a state is read before it is written.
#include "causal_conv1d_update/causal_conv1d_update_tiling.h"
#include "common/ascendc.h"

namespace npu_ops {

using namespace AscendC;

using Floats = LocalTensor<float>;
using Bytes = LocalTensor<uint8_t>;

// The tokens [begin, end) of a sequence, its slot and first column in the pool of states, and its
// row of windows. `good`: the sequence is not skipped, and these indices are valid.
struct Sequence {
  int64_t batch, begin, end, slot, first, window;
  bool good, keeps_windows;
  float nothing;  // the output unless good: 0 if skipped, else NaN
};

class Update {
 public:
  __aicore__ inline Update(GM_ADDR x, GM_ADDR state, GM_ADDR weight, GM_ADDR bias, GM_ADDR indices,
                           GM_ADDR accepted, GM_ADDR starts, GM_ADDR window, GM_ADDR window_indices,
                           GM_ADDR y, const CausalConv1dUpdateTiling& tiling)
      : tiling_(tiling),
        x_(x),
        state_(state),
        weight_(weight),
        bias_(bias),
        indices_(indices),
        accepted_(accepted),
        starts_(starts),
        window_(window),
        window_indices_(window_indices),
        y_(y),
        type_(static_cast<ElementType>(tiling.type)),
        size_(bytes_of(type_)),
        stride_(tiling.block),
        right_(!starts || are_right(starts, tiling.wide_starts, tiling.sequences, tiling.tokens)) {
    pipe_.InitBuffer(rows_queue_, 2, tiling.rows() * stride_ * size_);
    pipe_.InitBuffer(y_queue_, 2, tiling.tile_tokens * stride_ * size_);
    pipe_.InitBuffer(in_queue_, 2, stride_ * tiling.loaded);
    values_ = words<float>(tiling.rows());
    sum_ = words<float>(tiling.tile_tokens);
    scratch_ = words<float>(tiling.tile_tokens);
    taps_ = words<float>(tiling.width);
    offset_ = words<float>(1);
    // Instructions also compute on the padding between a row's last channel and the stride, which
    // no copy writes.
    Duplicate(sum_, 0.0f, tiling.tile_tokens * stride_);
    if (tiling.weight.apart() || tiling.state.apart()) {
      column_ = words<uint8_t>(1);
      at_ = words<int32_t>(1);
      channel_ = words<int32_t>(1);
      CreateVecIndex(channel_, 0, stride_);
    }
    if (tiling.spreads()) PrepareSpread();
  }

  __aicore__ inline void Process() {
    const int64_t share = (tiling_.pieces() + GetBlockNum() - 1) / GetBlockNum();
    const int64_t begin = GetBlockIdx() * share, end = smaller(begin + share, tiling_.pieces());
    int64_t block = -1;
    // Pieces of one block of channels are consecutive, so that its filter is loaded once.
    for (int64_t piece = begin; piece < end; ++piece) {
      if (piece / tiling_.sequences != block) {
        block = piece / tiling_.sequences;
        channel0_ = block * tiling_.block;
        count_ = static_cast<int32_t>(smaller(tiling_.block, tiling_.channels - channel0_));
        LoadFilter();
      }
      const Sequence s = Find(piece % tiling_.sequences);
      for (int64_t token = s.begin; token < s.end; token += tiling_.tile_tokens)
        Run(s, token, static_cast<int32_t>(smaller(tiling_.tile_tokens, s.end - token)));
    }
  }

 private:
  // Returns a buffer of `rows` rows of 32-bit words.
  template <class T>
  __aicore__ inline LocalTensor<T> words(int32_t rows) {
    TBuf<TPosition::VECCALC> buffer;
    pipe_.InitBuffer(buffer, rows * stride_ * sizeof(float));
    return buffer.Get<T>();
  }

  __aicore__ inline Sequence Find(int64_t n) const {
    Sequence s{n, 0, tiling_.tokens, n, 0, n, false, false, 0.0f};
    if (starts_) {  // if starts are invalid, sequence 0 has all tokens
      s.batch = 0;
      s.begin = right_ ? integer(starts_, tiling_.wide_starts, n) : 0;
      s.end = right_ ? integer(starts_, tiling_.wide_starts, n + 1) : n == 0 ? tiling_.tokens : 0;
    }
    if (indices_) s.slot = integer(indices_, tiling_.wide_indices, n);
    if (accepted_) s.first = integer(accepted_, tiling_.wide_accepted, n) - 1;
    if (window_indices_) s.window = integer(window_indices_, tiling_.wide_windows, n);
    const bool skipped = s.slot == tiling_.pad;
    s.good = right_ && !skipped && s.slot >= 0 && s.slot < tiling_.slots && s.first >= 0 &&
             s.first <= tiling_.columns - tiling_.before();
    s.keeps_windows = window_ && s.window >= 0 && s.window < tiling_.windows;
    s.nothing = right_ && skipped ? 0.0f : __builtin_nanf("");
    return s;
  }

  // Computes `count` tokens of a sequence, from `token` on.
  __aicore__ inline void Run(const Sequence& s, int64_t token, int32_t count) {
    if (s.good) {
      TakeRows(s, token, count);
      Convolve(count);
    } else {
      Duplicate(sum_, s.nothing, count * stride_);
    }
    Bytes out = y_queue_.AllocTensor<uint8_t>();
    each_run({count, count_, 0}, stride_,
             [&](int32_t first, int32_t n) { narrow(out, sum_, type_, first, n); });
    y_queue_.EnQue(out);
    out = y_queue_.DeQue<uint8_t>();
    const int64_t at = s.batch * tiling_.y_batch + token * tiling_.y_token + channel0_;
    copy_out(y_ + at * size_, out, type_, {count, count_, tiling_.y_token}, stride_);
    y_queue_.FreeTensor(out);
  }

  // Loads the tile's rows and the W - 1 rows before them. Writes them to `values_`, states and
  // windows.
  __aicore__ inline void TakeRows(const Sequence& s, int64_t token, int32_t count) {
    const int32_t before = tiling_.before();
    const bool starts = token == s.begin, collects = starts && tiling_.state.apart();
    Bytes rows = rows_queue_.AllocTensor<uint8_t>();
    if (!starts) {
      LoadTokens(rows, s, token - before, before + count);
    } else {
      LoadTokens(rows[before * stride_ * size_], s, token, count);
      if (collects)
        LoadApart(state_, HistoryAt(s), tiling_.state, before, type_);
      else
        copy_in(rows, state_ + HistoryAt(s) * size_, type_, {before, count_, tiling_.state.column},
                stride_);
    }
    rows_queue_.EnQue<TPosition::GM, TPosition::VECIN>(rows);
    rows = rows_queue_.DeQue<TPosition::GM, TPosition::VECIN, uint8_t>();
    if (collects) {
      Bytes history = TakeApart(tiling_.state, type_);
      for (int32_t i = 0; i < before; ++i) Collect(rows[i * stride_ * size_], history, i, type_);
      in_queue_.FreeTensor(history);
    }
    each_run({before + count, count_, 0}, stride_,
             [&](int32_t first, int32_t n) { widen(values_, rows, type_, first, n); });
    rows_queue_.EnQue<TPosition::VECOUT, TPosition::GM>(rows);
    rows = rows_queue_.DeQue<TPosition::VECOUT, TPosition::GM, uint8_t>();
    if (tiling_.update) KeepState(rows, s, token, count);
    if (s.keeps_windows) KeepWindows(rows, s, token, count);
    rows_queue_.FreeTensor(rows);
  }

  __aicore__ inline int64_t HistoryAt(const Sequence& s) const {
    return s.slot * tiling_.state_slot + channel0_ * tiling_.state.channel +
           s.first * tiling_.state.column;
  }

  __aicore__ inline void LoadTokens(Bytes to, const Sequence& s, int64_t token, int32_t count) {
    const int64_t pitch = tiling_.x_token;
    GM_ADDR from = x_ + (s.batch * tiling_.x_batch + token * pitch + channel0_) * size_;
    copy_in(to, from, type_, {count, count_, pitch}, stride_);
  }

  // Stores row r of the buffer (W - 1 rows of history, then tokens) to the state's column r - drop,
  // if the state has that column. Earlier tiles have stored the rows before `known`.
  __aicore__ inline void KeepState(Bytes rows, const Sequence& s, int64_t token, int32_t count) {
    const int64_t done = token - s.begin, drop = (accepted_ ? 1 : s.end - s.begin) - done;
    const int64_t known = done ? tiling_.before() : 0, first = drop > known ? drop : known;
    const int64_t last = smaller(tiling_.before() + count, tiling_.columns + drop);
    if (first >= last) return;
    const int64_t at = s.slot * tiling_.state_slot + channel0_ * tiling_.state.channel +
                       (first - drop) * tiling_.state.column;
    Store(state_, at, tiling_.state, rows, static_cast<int32_t>(first),
          static_cast<int32_t>(last - first));
  }

  __aicore__ inline void KeepWindows(Bytes rows, const Sequence& s, int64_t token, int32_t count) {
    const int64_t at = s.window * tiling_.window_row + channel0_ * tiling_.window.channel;
    for (int32_t i = 0; i < count; ++i)
      Store(window_, at + (token + i) * tiling_.window_token, tiling_.window, rows, i + 1,
            tiling_.before());
  }

  // Stores the rows first .. first + count of the buffer as columns of a [channels, columns] matrix
  // in `to` that begins at element `at`. `plane` has its strides.
  __aicore__ inline void Store(GM_ADDR to, int64_t at, const Plane& plane, Bytes rows,
                               int32_t first, int32_t count) {
    if (!plane.apart())
      return copy_out(to + at * size_, rows[first * stride_ * size_], type_,
                      {count, count_, plane.column}, stride_);
    Bytes spread = spread_queue_.AllocTensor<uint8_t>();
    if (size_ == 2)
      Spread<uint16_t>(spread.ReinterpretCast<uint16_t>(), rows.ReinterpretCast<uint16_t>(), first,
                       count);
    else
      Spread<uint32_t>(spread.ReinterpretCast<uint32_t>(), rows.ReinterpretCast<uint32_t>(), first,
                       count);
    spread_queue_.EnQue(spread);
    spread = spread_queue_.DeQue<uint8_t>();
    copy_out(to + at * size_, spread, type_, {count_, count, plane.channel}, kOwnBlock);
    spread_queue_.FreeTensor(spread);
  }

  // Turns rows into columns: each channel gets kOwnBlock elements, of which the first `count` are
  // set.
  template <class T>
  __aicore__ inline void Spread(LocalTensor<T> to, LocalTensor<T> rows, int32_t first,
                                int32_t count) {
    constexpr int32_t lanes = 256 / sizeof(T), channels = lanes / kOwnBlock;
    const int32_t whole = count_ / channels, rest = count_ % channels, done = whole * lanes;
    const uint64_t one = (uint64_t{1} << count) - 1;
    const uint64_t all = one | one << kOwnBlock | one << 2 * kOwnBlock | one << 3 * kOwnBlock;
    const uint32_t base = first * stride_ * sizeof(T);
    uint64_t mask[2] = {all, sizeof(T) == 2 ? all : 0};
    if (whole) Gather(to, rows, spread_, base, mask, static_cast<uint8_t>(whole), 8);
    if (!rest) return;
    mask[0] = rest < 4 ? all & ((uint64_t{1} << rest * kOwnBlock) - 1) : all;
    mask[1] = rest > 4 ? all & ((uint64_t{1} << (rest - 4) * kOwnBlock) - 1) : 0;
    Gather(to[done], rows, spread_[done], base, mask, 1, 8);
  }

  // Prepares the byte offsets for Spread: element j of channel c is element c of row j. The scalar
  // unit sets the offsets of the first channel; vector copies then double the filled part until all
  // channels have theirs.
  __aicore__ inline void PrepareSpread() {
    pipe_.InitBuffer(spread_queue_, 2, kOwnBlock * stride_ * size_);
    const auto offsets = words<int32_t>(kOwnBlock);
    for (int32_t j = 0; j < kOwnBlock; ++j) offsets.SetValue(j, j * stride_ * size_);
    Wait<HardEvent::S_V>();
    for (int32_t filled = 1; filled < stride_; filled *= 2)
      Adds(offsets[filled * kOwnBlock], offsets, static_cast<int32_t>(filled * size_),
           (filled < stride_ - filled ? filled : stride_ - filled) * kOwnBlock);
    spread_ = offsets.ReinterpretCast<uint32_t>();
  }

  // Loads columns of a plane whose channels are not contiguous. Small gaps between channels are
  // loaded too; otherwise each channel gets kOwnBlock elements. Collect then gathers each column.
  __aicore__ inline void LoadApart(GM_ADDR from, int64_t at, const Plane& plane, int32_t columns,
                                   ElementType type) {
    const auto whole = static_cast<int32_t>((count_ - 1) * plane.channel + columns);
    Bytes to = in_queue_.AllocTensor<uint8_t>();
    if (plane.whole())
      copy_in(to, from + at * bytes_of(type), type, {1, whole, whole}, (whole + 15) / 16 * 16);
    else
      copy_in(to, from + at * bytes_of(type), type, {count_, columns, plane.channel}, kOwnBlock);
    in_queue_.EnQue(to);
  }

  // Returns the buffer that LoadApart loaded; the caller collects its columns and frees it.
  __aicore__ inline Bytes TakeApart(const Plane& plane, ElementType type) {
    Muls(at_, channel_, static_cast<int32_t>(pitch_on_chip(plane) * bytes_of(type)), count_);
    return in_queue_.DeQue<uint8_t>();
  }

  __aicore__ inline void Collect(Bytes to, Bytes from, int32_t column, ElementType type) {
    const auto at = at_.ReinterpretCast<uint32_t>();
    const uint32_t base = column * bytes_of(type), count = count_;
    if (bytes_of(type) == 2)
      Gather(to.ReinterpretCast<uint16_t>(), from.ReinterpretCast<uint16_t>(), at, base, count);
    else
      Gather(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(), at, base, count);
  }

  // Computes sum = act(bias + filter * rows); the first tap multiplies the oldest row.
  __aicore__ inline void Convolve(int32_t count) {
    const int32_t last = tiling_.before(), all = count * stride_;
    for (int32_t t = 0; t < count; ++t) {
      const Floats sum = sum_[t * stride_], rows = values_[t * stride_];
      Mul(sum, rows[last * stride_], taps_[last * stride_], count_);
      for (int32_t i = last - 1; i >= 0; --i)
        MulAddDst(sum, rows[i * stride_], taps_[i * stride_], count_);
      if (bias_) Add(sum, sum, offset_, count_);
    }
    if (!tiling_.silu) return;
    Muls(scratch_, sum_, -1.0f, all);
    Exp(scratch_, scratch_, all);
    Adds(scratch_, scratch_, 1.0f, all);
    Div(sum_, sum_, scratch_, all);
  }

  __aicore__ inline void LoadFilter() {
    const auto type = static_cast<ElementType>(tiling_.weight_type);
    const Plane& plane = tiling_.weight;
    const int64_t at = channel0_ * plane.channel;
    if (plane.apart()) {
      LoadApart(weight_, at, plane, tiling_.width, type);
      Bytes loaded = TakeApart(plane, type);
      for (int32_t i = 0; i < tiling_.width; ++i) {
        Collect(column_, loaded, i, type);
        widen(taps_[i * stride_], column_, type, 0, count_);
      }
      in_queue_.FreeTensor(loaded);
    } else {
      LoadParameter(taps_, weight_ + at * bytes_of(type), type,
                    {tiling_.width, count_, plane.column});
    }
    const auto of_bias = static_cast<ElementType>(tiling_.bias_type);
    if (bias_)
      LoadParameter(offset_, bias_ + channel0_ * bytes_of(of_bias), of_bias, {1, count_, count_});
  }

  __aicore__ inline void LoadParameter(Floats to, GM_ADDR from, ElementType type, TileShape shape) {
    Bytes loaded = in_queue_.AllocTensor<uint8_t>();
    copy_in(loaded, from, type, shape, stride_);
    in_queue_.EnQue(loaded);
    loaded = in_queue_.DeQue<uint8_t>();
    each_run(shape, stride_, [&](int32_t first, int32_t n) { widen(to, loaded, type, first, n); });
    in_queue_.FreeTensor(loaded);
  }

  TPipe pipe_;
  CausalConv1dUpdateTiling tiling_;
  __gm__ uint8_t *x_, *state_, *weight_, *bias_, *indices_, *accepted_, *starts_, *window_,
      *window_indices_, *y_;
  ElementType type_;
  int32_t size_, stride_;  // bytes per element; elements per row on chip
  bool right_;             // starts are valid or absent
  int64_t channel0_ = 0;   // first channel of the block
  int32_t count_ = 0;      // channels of the block
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> rows_queue_;
  TQue<TPosition::VECIN, 2> in_queue_;
  TQue<TPosition::VECOUT, 2> y_queue_, spread_queue_;
  Floats values_, sum_, scratch_, taps_, offset_;
  Bytes column_;
  LocalTensor<int32_t> channel_, at_;
  LocalTensor<uint32_t> spread_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void causal_conv1d_update(
    GM_ADDR x, GM_ADDR conv_state, GM_ADDR weight, GM_ADDR bias, GM_ADDR indices, GM_ADDR accepted,
    GM_ADDR starts, GM_ADDR window, GM_ADDR window_indices, GM_ADDR y,
    npu_ops::CausalConv1dUpdateTiling tiling) {
  npu_ops::Update(x, conv_state, weight, bias, indices, accepted, starts, window, window_indices, y,
                  tiling)
      .Process();
}
