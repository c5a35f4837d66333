// swiglu on the CPU. Reference: npu_ops/ops/swiglu/reference.py
#include <cmath>
#include <optional>

#include "common/math.h"
#include "common/rows.h"

namespace npu_ops {
namespace {

template <class X>
NPU_OPS_CLONES void forward_row(const X* gate, const X* up, X* out, int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float z = load(gate[i]);
    store(out + i, z * sigmoid(z) * load(up[i]));
  }
}

template <class G, class X>
NPU_OPS_CLONES void backward_row(const G* grad, const X* gate, const X* up, X* grad_gate,
                                 X* grad_up, int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const float z = load(gate[i]), g = load(grad[i]);
    const float e = exp_within(-std::fabs(z)), r = 1.0f / (1.0f + e);
    const float open = z < 0.0f ? e * r : r;
    store(grad_gate + i, g * load(up[i]) * (open + z * (e * r * r)));
    store(grad_up + i, g * (z * open));
  }
}

// Returns the rows of the gate and of up. in_one: each row of `gate` holds the gate, then up.
template <class T>
std::pair<RowsOf<T>, RowsOf<T>> halves(RowsOf<T> gate, RowsOf<T> up, bool in_one) {
  if (in_one) {
    gate.width /= 2;
    up.width = gate.width;
    up.elements += gate.width;
  }
  return {gate, up};
}

void forward(Tensor gate, std::optional<Tensor> up, Tensor out) {
  dispatch(gate.scalar_type(), "gate", [&]<class X>(X*) {
    const auto row = [](auto* z, auto* of_up, auto* to, int64_t width) {
      forward_row(z, of_up, to, width);
    };
    const auto [first, second] = halves(rows_in<X>(gate), rows_in<X>(up ? *up : gate), !up);
    each_row(row, first, second, rows_out<X>(out));
  });
}

void backward(Tensor grad, Tensor gate, std::optional<Tensor> up, Tensor grad_gate,
              std::optional<Tensor> grad_up) {
  const auto row = [](auto* g, auto* z, auto* of_up, auto* to_gate, auto* to_up, int64_t width) {
    backward_row(g, z, of_up, to_gate, to_up, width);
  };
  dispatch(gate.scalar_type(), "gate", [&]<class X>(X*) {
    const auto [z, of_up] = halves(rows_in<X>(gate), rows_in<X>(up ? *up : gate), !up);
    const auto [to_gate, to_up] =
        halves(rows_out<X>(grad_gate), rows_out<X>(grad_up ? *grad_up : grad_gate), !grad_up);
    dispatch(grad.scalar_type(), "grad",
             [&]<class G>(G*) { each_row(row, rows_in<G>(grad), z, of_up, to_gate, to_up); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, CPU, m) {
  m.impl("swiglu_cpu", TORCH_BOX(&forward));
  m.impl("swiglu_backward_cpu", TORCH_BOX(&backward));
}

}  // namespace npu_ops
