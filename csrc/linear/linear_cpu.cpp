// linear on the CPU. Reference: npu_ops/ops/linear/reference.py
//
// Each output element is one dot product, summed in a fixed order, plus its bias. So an element
// depends only on its row of x, its row of weight and its bias.
#include <optional>

#include "common/check.h"
#include "common/parallel.h"
#include "common/sum.h"

namespace npu_ops {
namespace {

// Computes one row of the result.
template <class T>
NPU_OPS_CLONES void multiply_row(const T* x, const T* weight, int64_t weight_stride, const T* bias,
                                 T* out, int64_t columns, int64_t depth) {
  for (int64_t n = 0; n < columns; ++n) {
    const float total = dot(x, weight + n * weight_stride, depth);
    store(out + n, bias ? total + load(bias[n]) : total);
  }
}

// x [M, K], weight [N, K], out [M, N]: columns are contiguous.
void linear(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  const int64_t rows = x.size(0), depth = x.size(1), columns = weight.size(0);
  dispatch(x.scalar_type(), "x", [&]<class T>(T*) {
    const T *from = input<T>(x), *weights = input<T>(weight);
    const T* biases = bias ? input<T>(*bias) : nullptr;
    T* to = output<T>(out);
    parallel(rows, columns * depth, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        multiply_row(from + m * x.stride(0), weights, weight.stride(0), biases,
                     to + m * out.stride(0), columns, depth);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) { m.impl("linear_cpu", TORCH_BOX(&linear)); }

}  // namespace npu_ops
