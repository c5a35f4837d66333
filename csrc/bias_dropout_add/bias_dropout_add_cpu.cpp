// bias_dropout_add on the CPU. Definition: npu_ops/ops/bias_dropout_add/reference.py
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/parallel.h"
#include "common/partials.h"
#include "common/philox.h"
#include "common/staged.h"
#include "common/widen.h"

namespace npu_ops {
namespace {

struct Dropout {
  Keys keys;
  uint64_t offset;
  uint16_t threshold;  // an element is kept if its draw is at least this; 0 keeps all
  float scale;
};

Dropout make_dropout(const std::optional<Tensor>& rng_state, double p) {
  if (!rng_state) return {Keys(0), 0, 0, 1.0f};
  const auto* words = input<int64_t>(*rng_state);
  const double threshold = std::clamp(__builtin_nearbyint(p * 65536), 1.0, 65535.0);
  return {Keys(static_cast<uint64_t>(words[0])), static_cast<uint64_t>(words[1]),
          static_cast<uint16_t>(threshold), static_cast<float>(65536 / (65536 - threshold))};
}

// One thread's draws. They stay 0, which a threshold of 0 keeps, without dropout; where none are
// read then, there are none.
struct Draws {
  explicit Draws(int64_t width, bool read = true)
      : lane(lane_width(width)), values(read ? kDrawLanes * lane : 0) {}

  const uint16_t* row(int64_t index, const Dropout& dropout, Upcoming upcoming) {
    if (dropout.threshold)
      draw_row(values.data(), lane, static_cast<uint32_t>(index), dropout.offset, dropout.keys,
               upcoming);
    return values.data();
  }

  int64_t lane;
  std::vector<uint16_t> values;
};

// `out` may be `x` or `residual`: an element is read before it is written, hence ivdep.
template <class X, class R, class O, bool DROPS>
NPU_OPS_CLONES void add_row(const X* x, const float* bias, const R* residual, const uint16_t* draws,
                            O* out, int64_t width, uint16_t threshold, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    float kept = load(x[i]) + bias[i];
    if constexpr (DROPS) kept = keep_if(draws[i] >= threshold, kept * scale);
    store(out + i, load(residual[i]) + kept);
  }
}

// Without dropout there is so little to do that it counts what is read: a bias of the others' dtype
// is not widened before, and none is not read.
template <class T, bool BIAS>
NPU_OPS_CLONES void add_plainly(const T* x, const T* bias, const T* residual, T* out,
                                int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float sum = BIAS ? load(x[i]) + load(bias[i]) : load(x[i]);
    store(out + i, load(residual[i]) + sum);
  }
}

template <class T>
void add_row_of(const T* x, const T* bias, const T* residual, T* out, int64_t width) {
  const auto add = bias ? add_plainly<T, true> : add_plainly<T, false>;
  add(x, bias, residual, out, width);
}

// Too little, too, for going through rows of fp32.
NPU_OPS_WITHOUT void add_row_of(const fp16* x, const fp16* bias, const fp16* residual, fp16* out,
                                int64_t width) {
  add_row_of<fp16>(x, bias, residual, out, width);
}

#ifdef NPU_OPS_X86_CLONES
NPU_OPS_WITH_F16C void add_row_of(const fp16* x, const fp16* bias, const fp16* residual, fp16* out,
                                  int64_t width) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    const __m256 sum = bias ? eight(x + i) + eight(bias + i) : eight(x + i);
    put_eight(out + i, eight(residual + i) + sum);
  }
  add_row_of<fp16>(x + i, bias ? bias + i : bias, residual + i, out + i, width - i);
}
#endif

template <class G, class X>
NPU_OPS_CLONES void gradient_row(const G* grad, const uint16_t* draws, X* grad_x, int64_t width,
                                 uint16_t threshold, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i)
    store(grad_x + i, keep_if(draws[i] >= threshold, load(grad[i]) * scale));
}

template <class G, class X>
NPU_OPS_CLONES void gradient_row_and_sum(const G* grad, const uint16_t* draws, X* grad_x,
                                         float* sum, int64_t width, uint16_t threshold,
                                         float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float kept = keep_if(draws[i] >= threshold, load(grad[i]) * scale);
    sum[i] += kept;
    store(grad_x + i, kept);
  }
}

// The bias as float rows: none is a row of zeros, [h] is one row, a full one is widened per row.
struct Bias {
  Bias(const std::optional<Tensor>& bias, int64_t width)
      : width(width), full(bias && bias->numel() > width ? &*bias : nullptr) {
    if (full) return;
    shared = new_row();
    if (bias)
      widen_row(*bias, 0, shared.get());
    else
      std::fill_n(shared.get(), width, 0.0f);
  }

  // A thread's memory for `row`, uninitialised: small calls notice zeros that nobody reads.
  std::unique_ptr<float[]> scratch() const { return full ? new_row() : nullptr; }

  const float* row(int64_t index, float* scratch) const {
    if (!full) return shared.get();
    widen_row(*full, index, scratch);
    return scratch;
  }

  std::unique_ptr<float[]> new_row() const { return std::unique_ptr<float[]>(new float[width]); }

  void widen_row(const Tensor& bias, int64_t index, float* out) const {
    dispatch(bias.scalar_type(), "bias",
             [&]<class T>(T*) { widen(input<T>(bias) + index * width, out, width); });
  }

  std::unique_ptr<float[]> shared;
  int64_t width;
  const Tensor* full;
};

template <class T>
using Read = typename Staged<T>::Element;

template <class T>
void plain_rows(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual,
                const Tensor& out, int64_t begin, int64_t end) {
  const int64_t width = x.size(-1), step = bias && bias->numel() > width ? width : 0;
  const T* biases = bias ? input<T>(*bias) : nullptr;
  for (int64_t row = begin; row < end; ++row)
    add_row_of(input<T>(x) + row * width, biases ? biases + row * step : nullptr,
               input<T>(residual) + row * width, output<T>(out) + row * width, width);
}

template <class X, class R, class O>
void forward_rows(const Tensor& x, const Bias& bias, const Tensor& residual, const Dropout& dropout,
                  const Tensor& out, int64_t begin, int64_t end) {
  const int64_t width = x.size(-1);
  Draws draws(width, dropout.threshold);
  const auto bias_row = bias.scratch();
  const int64_t most = staged_at_once<X, R, O>(width);
  Staged<X> of_x(1, most);
  Staged<R> of_residual(1, most);
  Staged<O> of_out(1, most);
  const auto add = dropout.threshold ? add_row<Read<X>, Read<R>, Read<O>, true>
                                     : add_row<Read<X>, Read<R>, Read<O>, false>;
  for (int64_t row = begin; row < end; ++row) {
    const X* x_row = input<X>(x) + row * width;
    const R* residual_row = input<R>(residual) + row * width;
    const Upcoming upcoming{reinterpret_cast<const char*>(x_row),
                            reinterpret_cast<const char*>(residual_row),
                            width * static_cast<int64_t>(std::min(sizeof(X), sizeof(R)))};
    const uint16_t* drawn = draws.row(row, dropout, upcoming);
    const float* biases = bias.row(row, bias_row.get());
    in_blocks(0, width, most, [&](int64_t i, int64_t count) {
      O* to = output<O>(out) + row * width + i;
      add(of_x.read(x_row + i, count), biases + i, of_residual.read(residual_row + i, count),
          drawn + i, of_out.to(to), count, dropout.threshold, dropout.scale);
      of_out.written(to, count);
    });
  }
}

void forward(Tensor x, std::optional<Tensor> bias, Tensor residual, std::optional<Tensor> rng_state,
             double p, Tensor out) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  prefer_huge_pages(out);
  const bool alike = residual.scalar_type() == x.scalar_type() &&
                     out.scalar_type() == x.scalar_type() &&
                     (!bias || bias->scalar_type() == x.scalar_type());
  if (!rng_state && alike) {
    return dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
      parallel(rows, width, [&](int64_t begin, int64_t end) {
        plain_rows<T>(x, bias, residual, out, begin, end);
      });
    });
  }
  const Dropout dropout = make_dropout(rng_state, p);
  const Bias bias_rows(bias, width);
  dispatch(x.scalar_type(), "x", [&]<class X>(X*) {
    dispatch(residual.scalar_type(), "residual", [&]<class R>(R*) {
      dispatch(out.scalar_type(), "out", [&]<class O>(O*) {
        parallel(rows, width, [&](int64_t begin, int64_t end) {
          forward_rows<X, R, O>(x, bias_rows, residual, dropout, out, begin, end);
        });
      });
    });
  });
}

template <class G, class X>
void backward_rows(const Tensor& grad, const Dropout& dropout, const Tensor& grad_x, float* sum,
                   Draws& draws, int64_t begin, int64_t end) {
  const int64_t width = grad.size(-1);
  const int64_t most = staged_at_once<G, X>(width);
  Staged<G> of_grad(1, most);
  Staged<X> of_grad_x(1, most);
  for (int64_t row = begin; row < end; ++row) {
    const G* grad_row = input<G>(grad) + row * width;
    X* to = output<X>(grad_x) + row * width;
    const Upcoming upcoming{reinterpret_cast<const char*>(grad_row), nullptr,
                            width * static_cast<int64_t>(sizeof(G))};
    const uint16_t* drawn = draws.row(row, dropout, upcoming);
    in_blocks(0, width, most, [&](int64_t i, int64_t count) {
      const auto* read = of_grad.read(grad_row + i, count);
      auto* write = of_grad_x.to(to + i);
      if (sum)
        gradient_row_and_sum(read, drawn + i, write, sum + i, count, dropout.threshold,
                             dropout.scale);
      else
        gradient_row(read, drawn + i, write, count, dropout.threshold, dropout.scale);
      of_grad_x.written(to + i, count);
    });
  }
}

void backward(Tensor grad, std::optional<Tensor> rng_state, double p, Tensor grad_x,
              std::optional<Tensor> grad_bias) {
  const int64_t width = grad.size(-1), rows = grad.numel() / width;
  const Dropout dropout = make_dropout(rng_state, p);
  Partials partials(rows, width, grad_bias.has_value());
  prefer_huge_pages(grad_x);
  dispatch(grad.scalar_type(), "grad", [&]<class G>(G*) {
    dispatch(grad_x.scalar_type(), "grad_x", [&]<class X>(X*) {
      parallel(partials.blocks, partials.block_rows * width, [&](int64_t begin, int64_t end) {
        Draws draws(width);
        for (int64_t index = begin; index < end; ++index)
          backward_rows<G, X>(grad, dropout, grad_x, partials.block(index), draws,
                              index * partials.block_rows,
                              std::min(rows, (index + 1) * partials.block_rows));
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
