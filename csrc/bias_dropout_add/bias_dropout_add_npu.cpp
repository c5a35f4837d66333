// Launches bias_dropout_add_ascendc.cpp on an NPU.
#include <algorithm>
#include <cmath>
#include <optional>

#include "bias_dropout_add/bias_dropout_add_tiling.h"
#include "common/ascendc_launch.h"

namespace npu_ops {
namespace {

BiasDropoutAddTiling tiling_of(const Tensor& x, bool drops, double p, int64_t cores, int64_t ub,
                               bool sums) {
  BiasDropoutAddTiling tiling{};
  tiling.width = x.size(-1);
  tiling.rows = x.numel() / tiling.width;
  tiling.drops = drops;
  const double threshold = std::clamp(std::nearbyint(p * 65536), 1.0, 65535.0);
  tiling.threshold = static_cast<int32_t>(threshold);
  tiling.scale = static_cast<float>(65536 / (65536 - threshold));
  cut(tiling, static_cast<int32_t>(cores), static_cast<int32_t>(ub), sums);
  return tiling;
}

void forward(Tensor x, std::optional<Tensor> bias, Tensor residual, std::optional<Tensor> rng_state,
             double p, Tensor out, std::string binary, int64_t cores, int64_t ub_bytes,
             int64_t stream) {
  auto tiling = tiling_of(x, rng_state.has_value(), p, cores, ub_bytes, false);
  tiling.x_type = element_type(x, "x");
  tiling.residual_type = element_type(residual, "residual");
  tiling.out_type = element_type(out, "out");
  if (bias) {
    tiling.bias_type = element_type(*bias, "bias");
    tiling.bias_kind = bias->numel() == tiling.width ? kRowBias : kFullBias;
  }
  launch_ascendc({binary, cores, ub_bytes, stream}, "bias_dropout_add", tiling.pieces(),
                 NPU_OPS_TENSORS(x, bias, residual, rng_state, out), tiling);
}

void backward(Tensor grad, std::optional<Tensor> rng_state, double p, Tensor grad_x,
              std::optional<Tensor> grad_bias, std::string binary, int64_t cores, int64_t ub_bytes,
              int64_t stream) {
  auto tiling = tiling_of(grad, rng_state.has_value(), p, cores, ub_bytes, grad_bias.has_value());
  tiling.x_type = element_type(grad, "grad");
  tiling.out_type = element_type(grad_x, "grad_x");
  std::optional<Tensor> partials;
  if (grad_bias) partials = new_empty(*grad_bias, {tiling.row_pieces(), tiling.width});
  launch_ascendc({binary, cores, ub_bytes, stream}, "bias_dropout_add_backward", tiling.pieces(),
                 NPU_OPS_TENSORS(grad, rng_state, grad_x, partials), tiling);
  if (grad_bias) {
    const int64_t rows[] = {0};
    copy_(*grad_bias, sum(*partials, rows));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("bias_dropout_add_ascendc", TORCH_BOX(&forward));
  m.impl("bias_dropout_add_backward_ascendc", TORCH_BOX(&backward));
}

}  // namespace npu_ops
