// Launches gdn_gate_ascendc.cpp on an NPU.
#include <optional>

#include "common/rows_launch.h"
#include "gdn_gate/gdn_gate_tiling.h"

namespace npu_ops {
namespace {

using Optional = std::optional<Tensor>;

// Returns the rows of a [rows, heads] matrix with contiguous columns.
RowTensor matrix(const Tensor* tensor, const char* argument) {
  if (!tensor) return {};
  return {0, tensor->stride(0), tensor->stride(0), element_type(*tensor, argument)};
}

RowTensor vector(const Tensor* tensor, const char* argument) {
  return tensor ? RowTensor{0, 0, 0, element_type(*tensor, argument)} : RowTensor{};
}

// Returns the tiling without the sizes that cut_rows sets, and without grad_a and grad_b.
GdnGateTiling tiling_of(const Tensor& a, const Tensor& A_log, const Optional& dt_bias,
                        const Optional& b, double scale, const Tensor& g, const Tensor* beta) {
  GdnGateTiling tiling{};
  tiling.rows = {a.size(0), 1, 0, 1, static_cast<int32_t>(a.size(1)), 0, 0, 0, 0};
  tiling.a = matrix(&a, "a");
  tiling.A_log = vector(&A_log, "A_log");
  tiling.dt_bias = vector(pointer(dt_bias), "dt_bias");
  tiling.b = matrix(pointer(b), "b");
  tiling.g = matrix(&g, "g");
  tiling.beta = matrix(beta, "beta");
  tiling.scale = static_cast<float>(scale);
  return tiling;
}

// The unnamed arguments are softplus_beta and softplus_threshold. op.py accepts only calls whose
// softplus is log(1 + exp(x)).
void forward(Tensor a, Tensor A_log, Optional dt_bias, Optional b, double scale, double, double,
             Tensor g, Optional beta, std::string binary, int64_t cores, int64_t ub,
             int64_t stream) {
  auto tiling = tiling_of(a, A_log, dt_bias, b, scale, g, pointer(beta));
  const int64_t queues = kGdnGateQueueBytes + doubled({&g, pointer(beta)});
  cut_rows(tiling.rows, cores, ub, queues + 4 * kGdnGateFloats, 0, kGdnGateFixedBytes);
  launch_ascendc({binary, cores, ub, stream}, "gdn_gate", tiling.rows.pieces(),
                 NPU_OPS_TENSORS(a, A_log, dt_bias, b, g, beta), tiling);
}

void backward(Tensor grad_g, Optional grad_beta, Tensor a, Tensor A_log, Optional dt_bias,
              Optional b, double scale, double, double, Tensor grad_a, Tensor grad_A_log,
              Tensor grad_dt_bias, Optional grad_b, std::string binary, int64_t cores, int64_t ub,
              int64_t stream) {
  auto tiling = tiling_of(a, A_log, dt_bias, b, scale, grad_g, pointer(grad_beta));
  tiling.grad_a = matrix(&grad_a, "grad_a");
  tiling.grad_b = matrix(pointer(grad_b), "grad_b");
  const int64_t queues = 2 * kGdnGateQueueBytes + doubled({&grad_a, pointer(grad_b)});
  const int64_t sums = 2 * 4 * (tiling.rows.width + 2 * kWidestChunk);
  cut_rows(tiling.rows, cores, ub, queues + 4 * kGdnGateBackwardFloats, 0,
           kGdnGateFixedBytes + sums);
  const int64_t pieces = tiling.rows.pieces();
  Tensor A_sums = new_empty(grad_A_log, {pieces, a.size(1)});
  Tensor bias_sums = new_empty(grad_A_log, {pieces, a.size(1)});
  launch_ascendc(
      {binary, cores, ub, stream}, "gdn_gate_backward", pieces,
      NPU_OPS_TENSORS(grad_g, grad_beta, a, A_log, dt_bias, b, grad_a, A_sums, bias_sums, grad_b),
      tiling);
  const int64_t over[] = {0};
  copy_(grad_A_log, sum(A_sums, over));
  copy_(grad_dt_bias, sum(bias_sums, over));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("gdn_gate_ascendc", TORCH_BOX(&forward));
  m.impl("gdn_gate_backward_ascendc", TORCH_BOX(&backward));
}

}  // namespace npu_ops
