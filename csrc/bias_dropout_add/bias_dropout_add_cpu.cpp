// bias_dropout_add on the CPU. Reference: npu_ops/ops/bias_dropout_add/reference.py
#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/parallel.h"
#include "common/partials.h"
#include "common/philox.h"
#include "common/widen.h"

namespace npu_ops {
namespace {

// Elements of an fp16 row that are copied to fp32 at once: the copies stay in the L1 cache.
constexpr int64_t kPiece = 256;

struct Dropout {
  Dropout(const std::optional<Tensor>& rng_state, double p, int64_t width) : width(width) {
    if (!rng_state) return;
    const auto* words = input<uint64_t>(*rng_state);
    const double least = std::clamp(__builtin_nearbyint(p * 65536), 1.0, 65535.0);
    philox.emplace(words[0], words[1], lane_width(width));
    threshold = static_cast<uint16_t>(least);
    scale = static_cast<float>(65536 / (65536 - least));
  }
  int64_t width;
  std::optional<Philox> philox;  // none where all elements are kept
  uint16_t threshold = 0;        // an element is kept if its draw is at least this
  float scale = 1.0f;
};

// The dropout mask of a row, for one thread: all ones for an element that is kept.
class Mask {
 public:
  explicit Mask(const Dropout& dropout)
      : dropout_(dropout), mask_(kDrawLanes * lane_width(dropout.width), 0xffff) {}
  const uint16_t* row(int64_t index) {
    if (dropout_.philox)
      dropout_.philox->keep_row(static_cast<uint32_t>(index), dropout_.threshold, mask_.data());
    return mask_.data();
  }

 private:
  const Dropout& dropout_;
  std::vector<uint16_t> mask_;
};

NPU_OPS_INLINE float masked(uint16_t mask, float value) {
  const auto all = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(mask)));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & all);
}

// `out` may be `x` or `residual`. ivdep is valid because each element is read before it is written.
template <bool DROPS, class X, class R, class O>
NPU_OPS_CLONES void add_row(const X* x, const float* bias, const R* residual, const uint16_t* mask,
                            O* out, int64_t width, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float value = load(x[i]) + bias[i];
    store(out + i, load(residual[i]) + (DROPS ? masked(mask[i], value * scale) : value));
  }
}

template <class G, class X>
NPU_OPS_CLONES void gradient_row(const G* grad, const uint16_t* mask, X* grad_x, float* sum,
                                 int64_t width, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float value = masked(mask[i], load(grad[i]) * scale);
    sum[i] += value;
    store(grad_x + i, value);
  }
}

template <class T>
using Element = typename Row<T>::Element;

// Runs body(first, count) for the pieces of a row. The row is one piece if no T needs a copy in
// fp32.
template <class... T, class Body>
void in_pieces(int64_t width, const Body& body) {
  const int64_t most = (Row<T>::kCopied || ...) ? kPiece : width;
  for (int64_t at = 0; at < width; at += most) body(at, std::min(most, width - at));
}

// One thread's bias as rows of fp32; zeros without a bias.
class Bias {
 public:
  Bias(const std::optional<Tensor>& bias, int64_t width) : bias_(bias), row_(width) {
    if (bias) read(0);
  }
  const float* row(int64_t index) {
    if (bias_ && bias_->numel() > static_cast<int64_t>(row_.size())) read(index);
    return row_.data();
  }

 private:
  void read(int64_t index) {
    const auto width = static_cast<int64_t>(row_.size());
    dispatch(bias_->scalar_type(), "bias",
             [&]<class T>(T*) { widen(input<T>(*bias_) + index * width, row_.data(), width); });
  }
  const std::optional<Tensor>& bias_;
  std::vector<float> row_;
};

void forward(Tensor x, std::optional<Tensor> bias, Tensor residual, std::optional<Tensor> rng_state,
             double p, Tensor out) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const Dropout dropout(rng_state, p, width);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(residual.scalar_type(), "residual", [&]<class R>(R*) {
      dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
        parallel(rows, width, [&](int64_t begin, int64_t end) {
          Mask masks(dropout);
          Bias biases(bias, width);
          Row<X> of_x(kPiece);
          Row<R> of_residual(kPiece);
          Row<O> of_out(kPiece);
          const auto add = dropout.philox ? add_row<true, Element<X>, Element<R>, Element<O>>
                                          : add_row<false, Element<X>, Element<R>, Element<O>>;
          for (int64_t row = begin; row < end; ++row) {
            const uint16_t* mask = masks.row(row);
            const float* of_bias = biases.row(row);
            in_pieces<X, R, O>(width, [&](int64_t first, int64_t count) {
              const int64_t at = row * width + first;
              add(of_x.read(input<X>(x) + at, count), of_bias + first,
                  of_residual.read(input<R>(residual) + at, count), mask + first,
                  of_out.to(output<O>(out) + at), count, dropout.scale);
              of_out.written(output<O>(out) + at, count);
            });
          }
        });
      });
    });
  });
}

void backward(Tensor grad, std::optional<Tensor> rng_state, double p, Tensor grad_x,
              std::optional<Tensor> grad_bias) {
  const int64_t width = grad.size(-1), rows = grad.numel() / width;
  const Dropout dropout(rng_state, p, width);
  Partials partials(rows, width, width);
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(grad_x.scalar_type(), "grad_x", [&]<class X>(X*) {
      partials.each_block([&](int64_t begin, int64_t end, float* sum) {
        Mask masks(dropout);
        Row<G> of_grad(kPiece);
        Row<X> of_grad_x(kPiece);
        for (int64_t row = begin; row < end; ++row) {
          const uint16_t* mask = masks.row(row);
          in_pieces<G, X>(width, [&](int64_t first, int64_t count) {
            X* to = output<X>(grad_x) + row * width + first;
            gradient_row(of_grad.read(input<G>(grad) + row * width + first, count), mask + first,
                         of_grad_x.to(to), sum + first, count, dropout.scale);
            of_grad_x.written(to, count);
          });
        }
      });
    });
  });
  if (grad_bias) partials.total(output<float>(*grad_bias));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("bias_dropout_add_cpu", TORCH_BOX(&forward));
  m.impl("bias_dropout_add_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
