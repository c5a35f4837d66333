// gated_delta_rule_update for Ascend910B and Ascend910_93. Reference:
// npu_ops/ops/gated_delta_rule_update/reference.py
//
// A piece of work is a block of value columns of one head of one sequence; blocks are independent
// of each other. The state of a piece is loaded once, stays on chip in fp32 for all tokens, and is
// stored where the caller wants it. While a tile is computed, the next tile (of this piece or the
// next one) is already being loaded. bisheng inserts the barriers inside the vector pipe
// (--cce-auto-sync); queues order the copies.
#include "common/activation_ascendc.h"
#include "common/ascendc.h"
#include "gated_delta_rule_update/gated_delta_rule_update_tiling.h"

namespace npu_ops {

using namespace AscendC;

using Floats = LocalTensor<float>;
using Bytes = LocalTensor<uint8_t>;

constexpr int32_t kLanes = 64;     // floats per repeat of a vector instruction
constexpr int32_t kRepeats = 248;  // of one instruction: at most 255, and a multiple of 8
constexpr int32_t kOwnBlock = 16;  // elements on chip for a single number

struct Arguments {
  __gm__ uint8_t *q, *k, *v, *a, *b, *rate, *bias, *state, *indices, *starts, *accepted, *kept,
      *kept_indices, *o;
};

// A few tokens of a piece: `count` from `token` on, out of the sequence's tokens [begin, end).
struct Tile {
  int64_t piece, n, begin, end, token;
  int32_t head, value, width, count;  // width: number of values from `value` on
  int64_t slot, row, accepted;        // row: of the intermediate states, -1 for none
  bool live;                          // the sequence has a state, and its indices are valid
  float nothing;                      // the output if not live: 0 if skipped, else NaN

  __aicore__ inline bool first() const { return token == begin; }
  __aicore__ inline bool last() const { return token + count == end; }
};

class Update {
 public:
  __aicore__ inline Update(const Arguments& given, const GatedDeltaRuleUpdateTiling& tiling)
      : tiling_(tiling),
        given_(given),
        key_stride_(tiling.key_stride()),
        value_stride_(tiling.value_stride()),
        state_stride_(tiling.state_stride()),
        right_(!given.starts ||
               are_right(given.starts, tiling.wide_starts, tiling.sequences, tiling.tokens)) {
    const int32_t tokens = tiling.tile_tokens;
    PlaceTokens();
    const uint32_t state_bytes = tiling.state_elements() * bytes_of(type(tiling.state_type));
    pipe_.InitBuffer(state_queue_, 2, state_bytes);
    pipe_.InitBuffer(kept_queue_, 2, state_bytes);
    pipe_.InitBuffer(o_queue_, 2, tokens * value_stride_ * bytes_of(type(tiling.v_type)));
    state_ = floats(tiling.state_elements());
    partial_ = floats(tiling.partial_elements());
    q_ = floats(tokens * key_stride_);
    k_ = floats(tokens * key_stride_);
    v_ = floats(tokens * value_stride_);
    o_ = floats(tokens * value_stride_);
    change_ = floats(value_stride_);
    recalled_ = floats(value_stride_);
    spread_ = floats(8 * (tiling.v_first ? value_stride_ : key_stride_));
    if (!tiling.v_first) q_spread_ = floats(8 * key_stride_);
    wide_ = floats(kTileTokens * kOwnBlock);
    ones_ = floats(kLanes, 1.0f);
    x_ = floats(kLanes);
    t_ = floats(kLanes);
    root_ = floats(kLanes);
    decay_ = floats(kLanes);
    beta_ = floats(kLanes);
    norm_ = floats(kLanes, 1.0f);
    head_ = floats(kLanes).ReinterpretCast<uint32_t>();
    token_ = floats(kLanes).ReinterpretCast<uint32_t>();
    for (int32_t i = 0; i < kTileTokens; ++i)
      Duplicate(token_.ReinterpretCast<int32_t>()[8 * i],
                static_cast<int32_t>(i * kOwnBlock * sizeof(float)), 8);
  }

  __aicore__ inline void Process() {
    Tile tile = Begin(GetBlockIdx());
    if (Exists(tile)) Load(tile);
    while (Exists(tile)) {
      const Tile next = After(tile);
      if (Exists(next)) Load(next);
      Run(tile);
      tile = next;
    }
  }

 private:
  __aicore__ static inline ElementType type(int32_t number) {
    return static_cast<ElementType>(number);
  }

  __aicore__ inline Floats floats(int32_t count, float value = 0.0f) {
    TBuf<TPosition::VECCALC> buffer;
    pipe_.InitBuffer(buffer, (count + 7) / 8 * 8 * sizeof(float));
    Floats made = buffer.Get<float>();
    Duplicate(made, value, count);
    return made;
  }

  // ---- the order of tiles ----

  __aicore__ inline bool Exists(const Tile& tile) const { return tile.piece < tiling_.pieces(); }

  // Returns the first tile of this core's first piece, from `piece` on, that has tokens.
  __aicore__ inline Tile Begin(int64_t piece) const {
    Tile tile{};
    for (; piece < tiling_.pieces(); piece += GetBlockNum()) {
      tile = Find(piece);
      if (tile.begin < tile.end) return tile;
    }
    tile.piece = piece;
    return tile;
  }

  __aicore__ inline Tile After(Tile tile) const {
    if (tile.last()) return Begin(tile.piece + GetBlockNum());
    tile.token += tile.count;
    tile.count = Count(tile);
    return tile;
  }

  __aicore__ inline int32_t Count(const Tile& tile) const {
    return static_cast<int32_t>(smaller(tiling_.tile_tokens, tile.end - tile.token));
  }

  __aicore__ inline Tile Find(int64_t piece) const {
    const int32_t blocks = tiling_.blocks();
    Tile tile{};
    tile.piece = piece;
    tile.n = piece / blocks / tiling_.value_heads;
    tile.head = static_cast<int32_t>(piece / blocks % tiling_.value_heads);
    tile.value = static_cast<int32_t>(piece % blocks) * tiling_.block;
    tile.width = static_cast<int32_t>(smaller(tiling_.block, tiling_.values - tile.value));
    FindTokens(tile);
    tile.token = tile.begin;
    tile.count = Count(tile);
    const bool nobodys = tile.n == tiling_.sequences;
    const bool found = !nobodys && FindState(tile);
    tile.live = right_ && found;
    const bool skipped = right_ && (nobodys || tile.slot == -1);
    tile.nothing = skipped ? 0.0f : __builtin_nanf("");
    return tile;
  }

  // Finds where a sequence begins and ends. One more sequence, after the last, has the tokens of no
  // sequence: those after the last sequence, or all tokens if starts are invalid.
  __aicore__ inline void FindTokens(Tile& tile) const {
    if (!given_.starts) {
      tile.begin = tile.n * tiling_.length;
      tile.end = tile.begin + tiling_.length;
      return;
    }
    const bool nobodys = tile.n == tiling_.sequences;
    tile.begin = right_ ? integer(given_.starts, tiling_.wide_starts, tile.n) : 0;
    tile.end = nobodys  ? tiling_.tokens
               : right_ ? integer(given_.starts, tiling_.wide_starts, tile.n + 1)
                        : 0;
  }

  // Finds the indices of the states that a sequence reads and writes, and returns whether they are
  // valid.
  __aicore__ inline bool FindState(Tile& tile) const {
    const int64_t steps = tiling_.steps, count = tile.end - tile.begin;
    if (given_.accepted) tile.accepted = integer(given_.accepted, tiling_.wide_accepted, tile.n);
    bool right = tile.accepted >= 0;
    int64_t column = 0;
    if (tiling_.slot_per_token) {
      right = right && count <= steps;
      if (given_.accepted) {
        right = right && tile.accepted >= 1 && tile.accepted <= steps;
        column = tile.accepted < 1 ? 0 : smaller(tile.accepted, steps) - 1;
      }
    }
    tile.slot = Slot(tile.n, column);
    tile.row = -1;
    if (given_.kept) {
      tile.row =
          given_.kept_indices ? integer(given_.kept_indices, tiling_.wide_kept, tile.n) : tile.n;
      right = right && tile.row >= (tile.accepted > 0 ? 0 : -1) && tile.row < tiling_.rows &&
              count <= steps && tile.accepted <= steps;
    }
    return right && tile.slot >= 0 && tile.slot < tiling_.slots;
  }

  __aicore__ inline int64_t Slot(int64_t n, int64_t column) const {
    return integer(given_.indices, tiling_.wide_indices,
                   n * tiling_.index_sequence + column * tiling_.index_token);
  }

  // ---- loads ----

  // Computes the byte offsets of q, k, v, a, b, A_log and dt_bias in one buffer.
  __aicore__ inline void PlaceTokens() {
    const int32_t tokens = tiling_.tile_tokens;
    k_at_ = tokens * key_stride_ * bytes_of(type(tiling_.q_type));
    v_at_ = k_at_ + tokens * key_stride_ * bytes_of(type(tiling_.k_type));
    a_at_ = v_at_ + tokens * value_stride_ * bytes_of(type(tiling_.v_type));
    b_at_ = a_at_ + tokens * kOwnBlock * sizeof(float);
    rate_at_ = b_at_ + tokens * kOwnBlock * sizeof(float);
    bias_at_ = rate_at_ + kOwnBlock * sizeof(float);
    pipe_.InitBuffer(token_queue_, 2, bias_at_ + kOwnBlock * sizeof(float));
  }

  __aicore__ inline void Load(const Tile& tile) {
    if (!tile.live) return;
    LoadTokens(tile);
    if (tile.first()) LoadState(tile);
  }

  __aicore__ inline void LoadTokens(const Tile& tile) {
    const int32_t keys = tiling_.keys;
    const int64_t key_head = tile.head / (tiling_.value_heads / tiling_.heads) * keys;
    Bytes to = token_queue_.AllocTensor<uint8_t>();
    const auto load = [&](int32_t at, GM_ADDR from, int32_t of, int64_t pitch, int64_t first,
                          int32_t columns, int32_t stride) {
      GM_ADDR row = from + (tile.token * pitch + first) * bytes_of(type(of));
      copy_in(to[at], row, type(of), {tile.count, columns, pitch}, stride);
    };
    load(0, given_.q, tiling_.q_type, tiling_.q_token, key_head, keys, key_stride_);
    load(k_at_, given_.k, tiling_.k_type, tiling_.k_token, key_head, keys, key_stride_);
    load(v_at_, given_.v, tiling_.v_type, tiling_.v_token,
         int64_t{tile.head} * tiling_.values + tile.value, tile.width, value_stride_);
    load(a_at_, given_.a, tiling_.a_type, tiling_.a_token, tile.head, 1, kOwnBlock);
    load(b_at_, given_.b, tiling_.b_type, tiling_.b_token, tile.head, 1, kOwnBlock);
    LoadOfHead(to[rate_at_], given_.rate, tiling_.rate_type, tile.head);
    LoadOfHead(to[bias_at_], given_.bias, tiling_.bias_type, tile.head);
    token_queue_.EnQue(to);
  }

  __aicore__ inline void LoadOfHead(Bytes to, GM_ADDR from, int32_t of, int32_t head) {
    copy_in(to, from + head * bytes_of(type(of)), type(of), {1, 1, 1}, kOwnBlock);
  }

  // A tile's part of a state: its rows in memory (StateShape), and the offset of its first element
  // (Within).
  __aicore__ inline TileShape StateShape(const Tile& tile) const {
    if (tiling_.v_first) return {tile.width, tiling_.keys, tiling_.keys};
    return {tiling_.keys, tile.width, tiling_.values};
  }
  __aicore__ inline int64_t Within(const Tile& tile) const {
    return int64_t{tile.head} * tiling_.keys * tiling_.values +
           int64_t{tile.value} * (tiling_.v_first ? tiling_.keys : 1);
  }
  __aicore__ inline GM_ADDR InPool(const Tile& tile, int64_t slot) const {
    return given_.state +
           (slot * tiling_.state_slot + Within(tile)) * bytes_of(type(tiling_.state_type));
  }
  __aicore__ inline GM_ADDR InKept(const Tile& tile, int64_t step) const {
    return given_.kept + (tile.row * tiling_.kept_row + step * tiling_.kept_step + Within(tile)) *
                             bytes_of(type(tiling_.state_type));
  }

  __aicore__ inline void LoadState(const Tile& tile) {
    const bool kept = given_.kept && tile.accepted > 0;
    Bytes to = state_queue_.AllocTensor<uint8_t>();
    copy_in(to, kept ? InKept(tile, tile.accepted - 1) : InPool(tile, tile.slot),
            type(tiling_.state_type), StateShape(tile), state_stride_);
    state_queue_.EnQue(to);
  }

  // ---- a tile ----

  __aicore__ inline void Run(const Tile& tile) {
    if (tile.live) {
      TakeTokens(tile);
      if (tile.first()) TakeState(tile);
      for (int32_t i = 0; i < tile.count; ++i) {
        Advance(tile, i);
        Keep(tile, i);
      }
      if (tile.last() && tiling_.update && !tiling_.slot_per_token)
        StoreState(InPool(tile, tile.slot), tile);
    } else {
      Duplicate(o_, tile.nothing, tile.count * value_stride_);
    }
    StoreOutput(tile);
  }

  __aicore__ inline void TakeTokens(const Tile& tile) {
    Bytes from = token_queue_.DeQue<uint8_t>();
    Widen(q_, from, tiling_.q_type, {tile.count, tiling_.keys, 0}, key_stride_);
    Widen(k_, from[k_at_], tiling_.k_type, {tile.count, tiling_.keys, 0}, key_stride_);
    Widen(v_, from[v_at_], tiling_.v_type, {tile.count, tile.width, 0}, value_stride_);
    Gates(from, tile.count);
    token_queue_.FreeTensor(from);
    if (tiling_.normalize) {
      Normalize(q_, tile.count, tiling_.scale);
      Normalize(k_, tile.count, 1.0f);
    } else {
      Muls(q_, q_, tiling_.scale, tile.count * key_stride_);
    }
  }

  __aicore__ inline void Widen(Floats to, Bytes from, int32_t of, TileShape shape, int32_t stride) {
    each_run(shape, stride,
             [&](int32_t first, int32_t count) { widen(to, from, type(of), first, count); });
  }

  // Computes decay = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), in eight lanes
  // for each token.
  __aicore__ inline void Gates(Bytes from, int32_t count) {
    Numbers(x_, from[a_at_], tiling_.a_type, count, token_);
    Numbers(t_, from[bias_at_], tiling_.bias_type, 1, head_);
    Add(x_, x_, t_, kLanes);
    part_softplus(x_, root_, t_, kLanes);
    Numbers(t_, from[rate_at_], tiling_.rate_type, 1, head_);
    Add(root_, root_, t_, kLanes);
    Muls(root_, root_, 0.5f, kLanes);
    Exp(root_, root_, kLanes);
    softplus(decay_, x_, beta_, t_, kLanes);
    Mul(decay_, decay_, root_, kLanes);
    Mul(decay_, decay_, root_, kLanes);
    Muls(decay_, decay_, -1.0f, kLanes);
    Exp(decay_, decay_, kLanes);
    Numbers(x_, from[b_at_], tiling_.b_type, count, token_);
    Muls(x_, x_, -1.0f, kLanes);
    Exp(x_, x_, kLanes);
    Adds(x_, x_, 1.0f, kLanes);
    Div(beta_, ones_, x_, kLanes);
  }

  // Widens `count` single numbers. Sets each lane of `to` to the number at the lane's offset in
  // `lanes`.
  __aicore__ inline void Numbers(Floats to, Bytes from, int32_t of, int32_t count,
                                 LocalTensor<uint32_t> lanes) {
    Widen(wide_, from, of, {count, 1, 0}, kOwnBlock);
    Gather(to, wide_, lanes, 0, static_cast<uint32_t>(kLanes));
  }

  // Computes rows *= scale / sqrt(sum of squares + 1e-6), without Rsqrt, which is inexact.
  __aicore__ inline void Normalize(Floats rows, int32_t count, float scale) {
    const auto apart = static_cast<uint8_t>(key_stride_ / 8);
    SumOfProducts(norm_, rows, rows, count, key_stride_, key_stride_);
    Adds(norm_, norm_, 1e-6f, 8);
    Sqrt(norm_, norm_, 8);
    Div(norm_, ones_, norm_, 8);
    Muls(norm_, norm_, scale, 8);
    Brcb(x_, norm_, 1, {1, 8});
    each_lanes(tiling_.keys, [&](int32_t at, int32_t lanes) {
      Mul(rows[at], rows[at], x_, lanes, count, {1, 1, 0, apart, apart, 1});
    });
  }

  // Sums rows * others along `keys` into `sums`. If others_stride is 0, `others` is one row for all
  // rows.
  __aicore__ inline void SumOfProducts(Floats sums, Floats rows, Floats others, int32_t count,
                                       int32_t stride, int32_t others_stride) {
    const BinaryRepeatParams apart{
        1, 1, 1, 8, static_cast<uint8_t>(stride / 8), static_cast<uint8_t>(others_stride / 8)};
    each_lanes(tiling_.keys, [&](int32_t at, int32_t lanes) {
      if (at == 0)
        Mul(partial_, rows, others, lanes, count, apart);
      else
        MulAddDst(partial_, rows[at], others[at], lanes, count, apart);
    });
    WholeReduceSum(sums, partial_, tiling_.keys < kLanes ? tiling_.keys : kLanes, count, 1, 1, 8);
  }

  __aicore__ inline void TakeState(const Tile& tile) {
    Bytes from = state_queue_.DeQue<uint8_t>();
    Widen(state_, from, tiling_.state_type, StateShape(tile), state_stride_);
    state_queue_.FreeTensor(from);
  }

  // Computes the state S, [keys, values], after token i, and the output S^T q.
  __aicore__ inline void Advance(const Tile& tile, int32_t i) {
    const Floats q = q_[i * key_stride_], k = k_[i * key_stride_], o = o_[i * value_stride_];
    const int32_t rows = StateShape(tile).rows;
    Times(state_, decay_[8 * i], rows * state_stride_);
    if (tiling_.v_first) {
      SumOfProducts(recalled_, state_, k, rows, state_stride_, 0);
    } else {
      Spread(spread_, k, tiling_.keys);
      Spread(q_spread_, q, tiling_.keys);
      SumOverKeys(recalled_, spread_, tile.width);
    }
    Sub(change_, v_[i * value_stride_], recalled_, tile.width);
    Times(change_, beta_[8 * i], tile.width);
    if (tiling_.v_first) {
      Spread(spread_, change_, tile.width);
      AddOuter(k, tile);
      SumOfProducts(o, state_, q, rows, state_stride_, 0);
    } else {
      AddOuter(change_, tile);
      SumOverKeys(o, q_spread_, tile.width);
    }
  }

  // Writes each number eight times, as a block of 32 bytes.
  __aicore__ inline void Spread(Floats to, Floats from, int32_t count) {
    Brcb(to, from, static_cast<uint8_t>((count + 7) / 8), {1, 8});
  }

  // Computes values *= a number, which `block` holds eight times.
  __aicore__ inline void Times(Floats values, Floats block, int32_t count) {
    for (int32_t at = 0; at < count;) {
      const int32_t left = (count - at) / kLanes;
      const int32_t repeats = left == 0 ? 1 : left < kRepeats ? left : kRepeats;
      const int32_t lanes = left == 0 ? count - at : kLanes;
      Mul(values[at], values[at], block, lanes, repeats, {1, 1, 0, 8, 8, 0});
      at += repeats * lanes;
    }
  }

  // Computes state += spread * row, where spread has a block for each of the state's rows.
  __aicore__ inline void AddOuter(Floats row, const Tile& tile) {
    const TileShape shape = StateShape(tile);
    const auto apart = static_cast<uint8_t>(state_stride_ / 8);
    for (int32_t first = 0; first < shape.rows; first += kRepeats) {
      const int32_t left = shape.rows - first, rows = left < kRepeats ? left : kRepeats;
      each_lanes(shape.columns, [&](int32_t at, int32_t lanes) {
        MulAddDst(state_[first * state_stride_ + at], row[at], spread_[8 * first], lanes, rows,
                  {1, 1, 0, apart, 0, 1});
      });
    }
  }

  // Sums the state's rows, one per key, each times its block of `spread`, into `sums`. Rows
  // kSumRows apart are added first.
  __aicore__ inline void SumOverKeys(Floats sums, Floats spread, int32_t width) {
    const int32_t keys = tiling_.keys;
    const auto apart = static_cast<uint8_t>(state_stride_ / 8);
    for (int32_t first = 0; first < keys; first += kSumRows) {
      const int32_t rows = keys - first < kSumRows ? keys - first : kSumRows;
      each_lanes(width, [&](int32_t at, int32_t lanes) {
        const Floats from = state_[first * state_stride_ + at];
        if (first == 0)
          Mul(partial_[at], from, spread, lanes, rows, {1, 1, 0, apart, apart, 1});
        else
          MulAddDst(partial_[at], from, spread[8 * first], lanes, rows, {1, 1, 0, apart, apart, 1});
      });
    }
    int32_t left = keys < kSumRows ? keys : kSumRows;
    while (left > 1) {
      const int32_t half = left / 2;
      left -= half;
      Add(partial_, partial_, partial_[left * state_stride_], half * state_stride_);
    }
    Muls(sums, partial_, 1.0f, width);
  }

  // Calls f(column, lanes) for each 64 columns.
  template <class F>
  __aicore__ inline void each_lanes(int32_t columns, F f) {
    for (int32_t at = 0; at < columns; at += kLanes)
      f(at, columns - at < kLanes ? columns - at : kLanes);
  }

  // ---- stores ----

  // Stores the state after token i if the caller keeps the state of every token. If the token's
  // slot is invalid, the token's output becomes NaN.
  __aicore__ inline void Keep(const Tile& tile, int32_t i) {
    const int64_t step = tile.token - tile.begin + i;
    if (tile.row >= 0) StoreState(InKept(tile, step), tile);
    if (!tiling_.slot_per_token) return;
    const int64_t slot = Slot(tile.n, step);
    if (slot < -1 || slot >= tiling_.slots)
      Duplicate(o_[i * value_stride_], __builtin_nanf(""), tile.width);
    else if (tiling_.update && slot >= 0)
      StoreState(InPool(tile, slot), tile);
  }

  __aicore__ inline void StoreState(GM_ADDR to, const Tile& tile) {
    const ElementType of = type(tiling_.state_type);
    const TileShape shape = StateShape(tile);
    Bytes from = kept_queue_.AllocTensor<uint8_t>();
    each_run(shape, state_stride_,
             [&](int32_t first, int32_t count) { narrow(from, state_, of, first, count); });
    kept_queue_.EnQue(from);
    from = kept_queue_.DeQue<uint8_t>();
    copy_out(to, from, of, shape, state_stride_);
    kept_queue_.FreeTensor(from);
  }

  __aicore__ inline void StoreOutput(const Tile& tile) {
    const ElementType of = type(tiling_.v_type);
    const int64_t pitch = int64_t{tiling_.value_heads} * tiling_.values;
    const int64_t at = tile.token * pitch + int64_t{tile.head} * tiling_.values + tile.value;
    const TileShape shape{tile.count, tile.width, pitch};
    Bytes from = o_queue_.AllocTensor<uint8_t>();
    each_run(shape, value_stride_,
             [&](int32_t first, int32_t count) { narrow(from, o_, of, first, count); });
    o_queue_.EnQue(from);
    from = o_queue_.DeQue<uint8_t>();
    copy_out(given_.o + at * bytes_of(of), from, of, shape, value_stride_);
    o_queue_.FreeTensor(from);
  }

  TPipe pipe_;
  GatedDeltaRuleUpdateTiling tiling_;
  Arguments given_;
  int32_t key_stride_, value_stride_, state_stride_;  // of rows on chip, elements
  bool right_;                                        // starts are valid or absent
  int32_t k_at_, v_at_, a_at_, b_at_, rate_at_, bias_at_;
  TQue<TPosition::VECIN, 2> token_queue_, state_queue_;
  TQue<TPosition::VECOUT, 2> kept_queue_, o_queue_;
  Floats state_, partial_, q_, k_, v_, o_, change_, recalled_, spread_, q_spread_;
  Floats wide_, ones_, x_, t_, root_, decay_, beta_, norm_;
  LocalTensor<uint32_t> head_, token_;  // offsets, for Numbers
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void gated_delta_rule_update(
    GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR a, GM_ADDR b, GM_ADDR A_log, GM_ADDR dt_bias,
    GM_ADDR state, GM_ADDR state_indices, GM_ADDR cu_seqlens, GM_ADDR num_accepted_tokens,
    GM_ADDR intermediate_states, GM_ADDR intermediate_state_indices, GM_ADDR o,
    npu_ops::GatedDeltaRuleUpdateTiling tiling) {
  const npu_ops::Arguments given{q,
                                 k,
                                 v,
                                 a,
                                 b,
                                 A_log,
                                 dt_bias,
                                 state,
                                 state_indices,
                                 cu_seqlens,
                                 num_accepted_tokens,
                                 intermediate_states,
                                 intermediate_state_indices,
                                 o};
  npu_ops::Update(given, tiling).Process();
}
