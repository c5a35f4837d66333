// qk_norm_rope on the CPU. Reference: npu_ops/ops/qk_norm_rope/reference.py
#include <cmath>
#include <string>

#include "common/partials.h"
#include "common/sum.h"
#include "common/widen.h"
#include "mrope/sections.h"

namespace npu_ops {
namespace {

// Returns the factor of normalised heads, weight or 1 + weight, in fp32.
std::vector<float> multiplier(const Tensor& weight, bool zero_centered) {
  std::vector<float> values(weight.numel());
  dispatch(weight.scalar_type(), "weight", [&]<class W>(W*) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = load(input<W>(weight)[i]) + (zero_centered ? 1.0f : 0.0f);
  });
  return values;
}

// Writes a head to y in fp32, normalised and not yet rotated.
template <class T>
NPU_OPS_CLONES void normalise(const T* x, const float* weight, float* y, int64_t dim, float eps) {
  const float r = reciprocal_rms(x, dim, eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < dim; ++i) y[i] = load(x[i]) * r * weight[i];
}

// Computes the gradient of a head, grad_x, from the gradient of the normalised head, grad_y. Adds
// to the weight's gradient.
template <class T>
NPU_OPS_CLONES void normalise_backward(const float* grad_y, const T* x, const float* weight,
                                       T* grad_x, float* grad_weight, int64_t dim, float eps) {
  const float r = reciprocal_rms(x, dim, eps);
  const float with_x = sum(dim, [&](int64_t i) { return grad_y[i] * weight[i] * load(x[i]); });
  const float along = r * (r * (with_x / static_cast<float>(dim)));
#pragma GCC ivdep
  for (int64_t i = 0; i < dim; ++i) {
    const float value = load(x[i]);
    grad_weight[i] += grad_y[i] * (value * r);
    store(grad_x + i, r * (grad_y[i] * weight[i] - value * along));
  }
}

// Offset and strides of the heads of q, k, v or the gate, in the projection or in a [B, S, N, D]
// tensor.
struct Part {
  // `step`: the distance to the next head of this kind, in heads.
  static Part inside(const Tensor& qkv, int64_t first, int64_t heads, int64_t step, int64_t dim) {
    return {heads, first * dim, qkv.stride(0), qkv.stride(1), step * dim};
  }
  static Part own(const Tensor& x) { return {x.size(2), 0, x.stride(0), x.stride(1), x.stride(2)}; }
  int64_t at(int64_t b, int64_t s, int64_t n) const {
    return first + b * batch_step + s * token_step + n * head_step;
  }
  int64_t heads, first, batch_step, token_step, head_step;
};

// Offsets and strides of q, k, v and the gate in the projection's output.
struct Parts {
  Parts(const Tensor& qkv, int64_t heads, int64_t kv_heads, int64_t dim, bool gated)
      : q(Part::inside(qkv, 0, heads, gated ? 2 : 1, dim)),
        k(Part::inside(qkv, heads * (gated ? 2 : 1), kv_heads, 1, dim)),
        v(Part::inside(qkv, heads * (gated ? 2 : 1) + kv_heads, kv_heads, 1, dim)),
        gate(Part::inside(qkv, 1, gated ? heads : 0, 2, dim)) {}
  Part q, k, v, gate;
};

// Looks up the coefficients of a token's rotation.
class Tables {
 public:
  Tables(const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions,
         const std::vector<int64_t>& section, const std::string& section_layout,
         const std::string& pair_layout, int64_t rotary_dim, int64_t length)
      : pair(pair_layout, rotary_dim, cos.size(-1)),
        cos_(cos),
        sin_(sin),
        rows_(positions, cos.size(2), length),
        spans_(section.empty() ? std::vector<Span>{{0, pair.pairs, 1}}
                               : owned(section, section_layout == "interleaved", pair.pairs)) {}
  template <class C>
  void take_token(int64_t b, int64_t s, Coefficients to, bool inverse) const {
    for (size_t axis = 0; axis < spans_.size(); ++axis) {
      const int64_t row = rows_.at(axis, b, s);
      take(input<C>(cos_) + at(cos_, axis, b, row), input<C>(sin_) + at(sin_, axis, b, row), to,
           spans_[axis], pair.step, pair.shift, inverse);
    }
  }
  PairLayout pair;

 private:
  static int64_t at(const Tensor& table, int64_t axis, int64_t b, int64_t row) {
    return (table.size(0) == 1 ? 0 : axis * table.stride(0)) +
           (table.size(1) == 1 ? 0 : b * table.stride(1)) + row * table.stride(2);
  }
  const Tensor &cos_, &sin_;
  Rows rows_;
  std::vector<Span> spans_;
};

// A thread's memory: one token's coefficients, and one head.
template <class T>
struct Scratch {
  Scratch(const PairLayout& pair, int64_t dim)
      : values(pair.row_size() + dim),
        coefficients(values.data(), pair.pairs),
        head(values.data() + pair.row_size()),
        x(dim),
        grad_x(dim) {}
  std::vector<float> values;
  Coefficients coefficients;
  float* head;
  Row<T> x, grad_x;
};

template <class T>
void copy_heads(const T* from, const Part& source, T* to, const Part& target, int64_t b, int64_t s,
                int64_t dim) {
  for (int64_t n = 0; n < target.heads; ++n)
    std::memcpy(to + target.at(b, s, n), from + source.at(b, s, n), dim * sizeof(T));
}

void forward(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,
             std::optional<Tensor> positions, int64_t heads, int64_t kv_heads, double eps,
             bool zero_centered, bool gated, std::vector<int64_t> section,
             std::string section_layout, std::string pair_layout, int64_t rotary_dim, Tensor q,
             Tensor k, std::optional<Tensor> v, std::optional<Tensor> gate) {
  const int64_t length = qkv.size(1), tokens = qkv.size(0) * length, dim = q_weight.numel();
  const Tables tables(cos, sin, positions, section, section_layout, pair_layout, rotary_dim,
                      length);
  const auto of_q = multiplier(q_weight, zero_centered), of_k = multiplier(k_weight, zero_centered);
  const Parts from(qkv, heads, kv_heads, dim, gated);
  dispatch(qkv.scalar_type(), "qkv", [&]<class T>(T*) {
    const T* x = input<T>(qkv);
    const auto one = [&](const Part& part, const Tensor& to, const float* weight, int64_t b,
                         int64_t s, Scratch<T>& scratch) {
      const Part target = Part::own(to);
      for (int64_t n = 0; n < part.heads; ++n) {
        const auto* head = scratch.x.read(x + part.at(b, s, n), dim);
        normalise(head, weight, scratch.head, dim, static_cast<float>(eps));
        rotate_head(scratch.head, scratch.head, scratch.coefficients, tables.pair);
        narrow(scratch.head, output<T>(to) + target.at(b, s, n), dim);
      }
    };
    dispatch(cos.scalar_type(), "cos", [&]<class C>(C*) {
      parallel(tokens, 2 * qkv.size(2), [&](int64_t begin, int64_t end) {
        Scratch<T> scratch(tables.pair, dim);
        for (int64_t token = begin; token < end; ++token) {
          const int64_t b = token / length, s = token % length;
          tables.take_token<C>(b, s, scratch.coefficients, false);
          one(from.q, q, of_q.data(), b, s, scratch);
          one(from.k, k, of_k.data(), b, s, scratch);
          if (v) copy_heads(x, from.v, output<T>(*v), Part::own(*v), b, s, dim);
          if (gate) copy_heads(x, from.gate, output<T>(*gate), Part::own(*gate), b, s, dim);
        }
      });
    });
  });
}

// Writes the gradient of copied heads (v or gate), or zeros if there is none.
template <class T>
void fill_heads(const std::optional<Tensor>& grad, T* to, const Part& target, int64_t b, int64_t s,
                int64_t dim) {
  if (grad) return copy_heads(input<T>(*grad), Part::own(*grad), to, target, b, s, dim);
  for (int64_t n = 0; n < target.heads; ++n)
    std::memset(to + target.at(b, s, n), 0, dim * sizeof(T));
}

void backward(Tensor grad_q, Tensor grad_k, std::optional<Tensor> grad_v,
              std::optional<Tensor> grad_gate, Tensor qkv, Tensor q_weight, Tensor k_weight,
              Tensor cos, Tensor sin, std::optional<Tensor> positions, int64_t heads,
              int64_t kv_heads, double eps, bool zero_centered, bool gated,
              std::vector<int64_t> section, std::string section_layout, std::string pair_layout,
              int64_t rotary_dim, Tensor grad_qkv, Tensor grad_q_weight, Tensor grad_k_weight) {
  const int64_t length = qkv.size(1), tokens = qkv.size(0) * length, dim = q_weight.numel();
  const Tables tables(cos, sin, positions, section, section_layout, pair_layout, rotary_dim,
                      length);
  const auto of_q = multiplier(q_weight, zero_centered), of_k = multiplier(k_weight, zero_centered);
  const Parts from(qkv, heads, kv_heads, dim, gated), to(grad_qkv, heads, kv_heads, dim, gated);
  Partials sums(tokens, 2 * dim, 3 * qkv.size(2));
  dispatch(qkv.scalar_type(), "qkv", [&]<class T>(T*) {
    const T* x = input<T>(qkv);
    T* result = output<T>(grad_qkv);
    const auto one = [&](const Part& part, const Part& target, const Tensor& grad,
                         const float* weight, float* total, int64_t b, int64_t s,
                         Scratch<T>& scratch) {
      const Part source = Part::own(grad);
      for (int64_t n = 0; n < part.heads; ++n) {
        widen(input<T>(grad) + source.at(b, s, n), scratch.head, dim);
        rotate_head(scratch.head, scratch.head, scratch.coefficients, tables.pair);
        const auto* head = scratch.x.read(x + part.at(b, s, n), dim);
        T* to = result + target.at(b, s, n);
        normalise_backward(scratch.head, head, weight, scratch.grad_x.to(to), total, dim,
                           static_cast<float>(eps));
        scratch.grad_x.written(to, dim);
      }
    };
    dispatch(cos.scalar_type(), "cos", [&]<class C>(C*) {
      sums.each_block([&](int64_t begin, int64_t end, float* total) {
        Scratch<T> scratch(tables.pair, dim);
        for (int64_t token = begin; token < end; ++token) {
          const int64_t b = token / length, s = token % length;
          tables.take_token<C>(b, s, scratch.coefficients, true);
          one(from.q, to.q, grad_q, of_q.data(), total, b, s, scratch);
          one(from.k, to.k, grad_k, of_k.data(), total + dim, b, s, scratch);
          fill_heads(grad_v, result, to.v, b, s, dim);
          fill_heads(grad_gate, result, to.gate, b, s, dim);
        }
      });
    });
  });
  std::vector<float> both(2 * dim);
  sums.total(both.data());
  std::copy_n(both.data(), dim, output<float>(grad_q_weight));
  std::copy_n(both.data() + dim, dim, output<float>(grad_k_weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("qk_norm_rope_cpu", TORCH_BOX(&forward));
  m.impl("qk_norm_rope_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
