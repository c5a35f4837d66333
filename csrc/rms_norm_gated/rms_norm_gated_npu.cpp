// Launches rms_norm_gated_ascendc.cpp on an NPU.
#include <optional>

#include "common/rows_launch.h"
#include "rms_norm_gated/rms_norm_gated_tiling.h"

namespace npu_ops {
namespace {

struct Arguments {
  const Tensor *grad, *x, *weight, *z, *out, *grad_z;
};

// Returns the tiling. weight is [groups, width]: each of its rows scales one group of rows of x.
RmsNormGatedTiling tiling_of(const Arguments& given, double eps, bool norm_before_gate,
                             const std::string& activation, const KernelTarget& target) {
  const auto groups = static_cast<int32_t>(given.weight->size(0));
  RmsNormGatedTiling tiling{};
  tiling.rows = grouped_rows_of(*given.x, groups);
  const auto tensor = [&](const Tensor* of, const char* argument) {
    return of ? grouped_row_tensor(*of, groups, argument) : RowTensor{};
  };
  tiling.grad = tensor(given.grad, "grad");
  tiling.x = tensor(given.x, "x");
  tiling.z = tensor(given.z, "z");
  tiling.out = tensor(given.out, given.grad ? "grad_x" : "out");
  tiling.grad_z = tensor(given.grad_z, "grad_z");
  tiling.weight = {tiling.rows.width, 0, 0, element_type(*given.weight, "weight")};
  tiling.eps = static_cast<float>(eps);
  tiling.norm_before_gate = norm_before_gate;
  tiling.silu = activation == "silu";
  const int64_t queues = doubled({given.grad, given.x, given.z, given.out, given.grad_z});
  const int64_t floats = given.grad ? kRmsNormGatedBackwardFloats : kRmsNormGatedFloats;
  const int64_t sums = given.grad ? 4 * (tiling.rows.width + 2 * kWidestChunk) : 0;
  cut_rows(tiling.rows, target.cores, target.ub_bytes, queues + 4 * floats, kRmsNormGatedRowBytes,
           kRmsNormGatedFixedBytes + sums);
  return tiling;
}

void forward(Tensor x, Tensor weight, Tensor z, double eps, bool norm_before_gate,
             std::string activation, Tensor out, std::string binary, int64_t cores, int64_t ub,
             int64_t stream) {
  const KernelTarget target{binary, cores, ub, stream};
  const auto tiling = tiling_of({nullptr, &x, &weight, &z, &out, nullptr}, eps, norm_before_gate,
                                activation, target);
  launch_ascendc(target, "rms_norm_gated", tiling.rows.pieces(), NPU_OPS_TENSORS(x, weight, z, out),
                 tiling);
}

void backward(Tensor grad, Tensor x, Tensor weight, Tensor z, double eps, bool norm_before_gate,
              std::string activation, Tensor grad_x, Tensor grad_weight, Tensor grad_z,
              std::string binary, int64_t cores, int64_t ub, int64_t stream) {
  const KernelTarget target{binary, cores, ub, stream};
  const auto tiling = tiling_of({&grad, &x, &weight, &z, &grad_x, &grad_z}, eps, norm_before_gate,
                                activation, target);
  Tensor partials = new_empty(
      grad_weight, {tiling.rows.groups, tiling.rows.pieces_of_group(), tiling.rows.width});
  launch_ascendc(target, "rms_norm_gated_backward", tiling.rows.pieces(),
                 NPU_OPS_TENSORS(grad, x, weight, z, grad_x, partials, grad_z), tiling);
  const int64_t pieces[] = {1};
  copy_(grad_weight, sum(partials, pieces));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("rms_norm_gated_ascendc", TORCH_BOX(&forward));
  m.impl("rms_norm_gated_backward_ascendc", TORCH_BOX(&backward));
}

}  // namespace npu_ops
