// qk_norm_rope for Ascend910B and Ascend910_93, forward and backward. Reference, with the same
// names: npu_ops/ops/qk_norm_rope/reference.py
//
// Heads of q and k are normalised and rotated in place on chip. Heads of v and the gate are copied
// without vector instructions, in a queue that binds loads to stores. The gradients of weights are
// sums over tokens. Each core writes its sums to a row of `partials`, so that no core waits for
// another. bisheng inserts the barriers inside the vector pipe (--cce-auto-sync); queues order the
// copies.
#include "qk_norm_rope/qk_norm_rope_tiling.h"
#include "rope/angles_ascendc.h"

namespace npu_ops {

using namespace AscendC;

using Address = __gm__ uint8_t*;
struct Projection {
  Address qkv, weight[kNormed];
};
struct Tables {
  Address cos, sin, positions;
};

// Shared by forward and backward: the loop over heads (q, k, v, gate), the weights of q and k, and
// 1 / RMS of each head.
class QkNorm {
 public:
  __aicore__ inline QkNorm(const Projection& given, const Tables& tables,
                           const QkNormRopeTiling& tiling)
      : tiling_(tiling),
        rows_(tiling.rows),
        angles_(rows_, tiling.angles, tables.cos, tables.sin, tables.positions),
        qkv_(given.qkv) {
    const RowTensor heads = of(tiling.inside[0]);
    rows_.make(x_queue_, heads);
    rows_.make(out_queue_, heads);
    rows_.make(copy_queue_, heads);
    rows_.pipe_.InitBuffer(weight_queue_, 2, tiling.rows.stride * sizeof(float));
    x_ = rows_.tile_of_floats();
    scratch_ = rows_.tile_of_floats();
    squares_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    spread_ = rows_.floats(kLanes * ((tiling.rows.tile_rows + 7) / 8));
    ones_ = rows_.float_of_each_row();
    r_ = rows_.float_of_each_row();
    for (int32_t kind = 0; kind < kNormed; ++kind) LoadWeight(kind, given.weight[kind]);
  }

 protected:
  // Calls normed(kind, token, tile) for heads of q and k, copied(kind, token, tile) for heads of v
  // and the gate.
  template <class Normed, class Copied>
  __aicore__ inline void each_part(Normed normed, Copied copied) {
    rows_.each_tile(
        [&](RowTile tile) {
          int64_t first = 0;
          for (int32_t kind = 0; kind < kKinds; ++kind) {
            const int32_t count = tiling_.inside[kind].count;
            const RowTile part = rows_among(tile, first, count);
            first += count;
            if (part.rows <= 0) continue;
            if (kind < kNormed)
              normed(kind, tile.group, part);
            else
              copied(kind, tile.group, part);
          }
        },
        [](int64_t) {});
  }

  __aicore__ inline RowTensor of(const HeadTensor& heads) const {
    return {0, heads.head, heads.head, tiling_.type};
  }

  // Returns the address of a token's first head in a tensor.
  __aicore__ inline GM_ADDR at(GM_ADDR tensor, const HeadTensor& heads, int64_t token) const {
    const auto bytes = bytes_of(static_cast<ElementType>(tiling_.type));
    return tensor + heads.at(token, tiling_.angles.length) * bytes;
  }

  // Loads the factor of normalised heads: weight, or 1 + weight.
  __aicore__ inline void LoadWeight(int32_t kind, GM_ADDR from) {
    const RowTensor weight{0, 0, 0, tiling_.weight_type[kind]};
    const RowTile row{0, 0, 1, 0, tiling_.rows.width};
    multiplier_[kind] = rows_.floats(tiling_.rows.stride);
    rows_.load(weight_queue_, from, weight, row);
    rows_.take(weight_queue_, multiplier_[kind], weight, row);
    if (tiling_.zero_centered) Adds(multiplier_[kind], multiplier_[kind], 1.0f, tiling_.rows.width);
  }

  // r = 1 / sqrt(mean(x^2) + eps). Uses Sqrt and Div, because Rsqrt is inexact.
  __aicore__ inline void ReciprocalRms(RowTile tile) {
    Mul(scratch_, x_, x_, rows_.count(tile));
    rows_.add_products(squares_, scratch_, tile);
    rows_.finish_sums(r_, squares_, tile);
    Muls(r_, r_, 1.0f / static_cast<float>(tiling_.rows.width), tile.rows);
    Adds(r_, r_, tiling_.eps, tile.rows);
    Sqrt(r_, r_, tile.rows);
    Div(r_, ones_, r_, tile.rows);
  }

  __aicore__ inline void Copy(GM_ADDR from, const HeadTensor& source, GM_ADDR to,
                              const HeadTensor& target, int64_t token, RowTile tile) {
    rows_.load(copy_queue_, at(from, source, token), of(source), tile);
    rows_.unload(copy_queue_, at(to, target, token), of(target), tile);
  }

  QkNormRopeTiling tiling_;
  Rows rows_;
  Angles angles_;
  Address qkv_;
  TQue<TPosition::VECIN, 2> x_queue_, weight_queue_;
  TQue<TPosition::VECOUT, 2> out_queue_;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> copy_queue_;
  Floats x_, scratch_, squares_, spread_, ones_, r_, multiplier_[kNormed];
};

class QkNormRope : private QkNorm {
 public:
  __aicore__ inline QkNormRope(const Projection& given, const Tables& tables, const Address* out,
                               const QkNormRopeTiling& tiling)
      : QkNorm(given, tables, tiling), out_(out) {}

  __aicore__ inline void Process() {
    each_part([&](int32_t kind, int64_t token, RowTile tile) { Normalise(kind, token, tile); },
              [&](int32_t kind, int64_t token, RowTile tile) {
                Copy(qkv_, tiling_.inside[kind], out_[kind], tiling_.own[kind], token, tile);
              });
  }

 private:
  __aicore__ inline void Normalise(int32_t kind, int64_t token, RowTile tile) {
    const HeadTensor &inside = tiling_.inside[kind], &own = tiling_.own[kind];
    rows_.load(x_queue_, at(qkv_, inside, token), of(inside), tile);
    angles_.prepare(token);
    rows_.take(x_queue_, x_, of(inside), tile);
    ReciprocalRms(tile);
    rows_.scale_rows(x_, r_, spread_, tile);
    rows_.times_row(x_, multiplier_[kind], tile);
    angles_.rotate(x_, scratch_, tile);
    rows_.store(out_queue_, at(out_[kind], own, token), of(own), x_, tile);
  }

  const Address* out_;
};

class QkNormRopeBackward : private QkNorm {
 public:
  __aicore__ inline QkNormRopeBackward(const Projection& given, const Tables& tables,
                                       const Address* grads, GM_ADDR grad_qkv, GM_ADDR partials,
                                       const QkNormRopeTiling& tiling)
      : QkNorm(given, tables, tiling), grads_(grads), grad_qkv_(grad_qkv), partials_(partials) {
    rows_.make(grad_queue_, of(tiling.own[0]));
    grad_ = rows_.tile_of_floats();
    grad_n_ = rows_.tile_of_floats();
    products_ = rows_.floats(kLanes * tiling.rows.tile_rows);
    along_ = rows_.float_of_each_row();
    rows_.pipe_.InitBuffer(sum_queue_, 1, kNormed * tiling.rows.stride * sizeof(float));
  }

  __aicore__ inline void Process() {
    sums_ = sum_queue_.AllocTensor<float>();
    Duplicate(sums_, 0.0f, kNormed * tiling_.rows.stride);
    each_part([&](int32_t kind, int64_t token, RowTile tile) { Gradient(kind, token, tile); },
              [&](int32_t kind, int64_t token, RowTile tile) { Rest(kind, token, tile); });
    StoreSums();
  }

 private:
  __aicore__ inline void Gradient(int32_t kind, int64_t token, RowTile tile) {
    const HeadTensor &inside = tiling_.inside[kind], &own = tiling_.own[kind];
    const HeadTensor& to = tiling_.grad[kind];
    const int32_t count = rows_.count(tile), width = tiling_.rows.width;
    rows_.load(grad_queue_, at(grads_[kind], own, token), of(own), tile);
    rows_.load(x_queue_, at(qkv_, inside, token), of(inside), tile);
    angles_.prepare(token);
    rows_.take(grad_queue_, grad_, of(own), tile);
    rows_.take(x_queue_, x_, of(inside), tile);
    angles_.rotate(grad_, scratch_, tile);  // grad_y
    rows_.times_row(grad_n_, grad_, multiplier_[kind], width, tile);
    ReciprocalRms(tile);
    Along(tile);
    Mul(grad_, grad_, x_, count);
    rows_.scale_rows(grad_, r_, spread_, tile);  // grad_y * n, with n = x * r
    rows_.add_rows(sums_[kind * tiling_.rows.stride], grad_, tile);
    rows_.scale_rows(x_, along_, spread_, tile);
    Sub(grad_n_, grad_n_, x_, count);
    rows_.scale_rows(grad_n_, r_, spread_, tile);
    rows_.store(out_queue_, at(grad_qkv_, to, token), of(to), grad_n_, tile);
  }

  // Computes along = mean(grad_n * n) * r; then grad_x = r * (grad_n - x * along).
  __aicore__ inline void Along(RowTile tile) {
    Mul(scratch_, grad_n_, x_, rows_.count(tile));
    rows_.add_products(products_, scratch_, tile);
    rows_.finish_sums(along_, products_, tile);
    Muls(along_, along_, 1.0f / static_cast<float>(tiling_.rows.width), tile.rows);
    Mul(along_, along_, r_, tile.rows);
    Mul(along_, along_, r_, tile.rows);
  }

  // Writes the gradient of copied heads (v or gate), or zeros if there is none.
  __aicore__ inline void Rest(int32_t kind, int64_t token, RowTile tile) {
    const HeadTensor& to = tiling_.grad[kind];
    if (grads_[kind]) return Copy(grads_[kind], tiling_.own[kind], grad_qkv_, to, token, tile);
    Duplicate(scratch_, 0.0f, rows_.count(tile));
    rows_.store(out_queue_, at(grad_qkv_, to, token), of(to), scratch_, tile);
  }

  __aicore__ inline void StoreSums() {
    const int32_t width = tiling_.rows.width, bytes = kNormed * width * sizeof(float);
    sum_queue_.EnQue(sums_);
    sums_ = sum_queue_.DeQue<float>();
    copy_out(partials_ + GetBlockIdx() * bytes, sums_.ReinterpretCast<uint8_t>(), kFloat32,
             {kNormed, width, width}, tiling_.rows.stride);
    sum_queue_.FreeTensor(sums_);
  }

  const Address* grads_;
  Address grad_qkv_, partials_;
  TQue<TPosition::VECIN, 2> grad_queue_;
  TQue<TPosition::VECOUT, 1> sum_queue_;
  Floats grad_, grad_n_, products_, along_, sums_;
};

}  // namespace npu_ops

extern "C" __global__ __aicore__ void qk_norm_rope(GM_ADDR qkv, GM_ADDR q_weight, GM_ADDR k_weight,
                                                   GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
                                                   GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR gate,
                                                   npu_ops::QkNormRopeTiling tiling) {
  const npu_ops::Address out[] = {q, k, v, gate};
  npu_ops::QkNormRope({qkv, {q_weight, k_weight}}, {cos, sin, positions}, out, tiling).Process();
}

extern "C" __global__ __aicore__ void qk_norm_rope_backward(
    GM_ADDR grad_q, GM_ADDR grad_k, GM_ADDR grad_v, GM_ADDR grad_gate, GM_ADDR qkv,
    GM_ADDR q_weight, GM_ADDR k_weight, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions,
    GM_ADDR grad_qkv, GM_ADDR partials, npu_ops::QkNormRopeTiling tiling) {
  const npu_ops::Address grads[] = {grad_q, grad_k, grad_v, grad_gate};
  npu_ops::QkNormRopeBackward({qkv, {q_weight, k_weight}}, {cos, sin, positions}, grads, grad_qkv,
                              partials, tiling)
      .Process();
}
