// Launches l2norm_ascendc.cpp on an NPU.
#include "common/rows_launch.h"
#include "l2norm/l2norm_tiling.h"

namespace npu_ops {
namespace {

L2NormTiling tiling_of(const Tensor* grad, const Tensor& x, const Tensor& out, double eps,
                       const KernelTarget& target) {
  L2NormTiling tiling{};
  tiling.rows = rows_of(x);
  tiling.x = row_tensor(x, "x");
  tiling.out = row_tensor(out, "out");
  if (grad) tiling.grad = row_tensor(*grad, "grad");
  tiling.eps = static_cast<float>(eps);
  const int64_t queues = doubled({grad, &x, &out});
  const int64_t floats = grad ? kL2NormBackwardFloats : kL2NormFloats;
  cut_rows(tiling.rows, target.cores, target.ub_bytes, queues + 4 * floats, kL2NormRowBytes,
           kL2NormFixedBytes);
  return tiling;
}

void forward(Tensor x, double eps, Tensor out, std::string binary, int64_t cores, int64_t ub,
             int64_t stream) {
  const KernelTarget target{binary, cores, ub, stream};
  const auto tiling = tiling_of(nullptr, x, out, eps, target);
  launch_ascendc(target, "l2norm", tiling.rows.pieces(), NPU_OPS_TENSORS(x, out), tiling);
}

void backward(Tensor grad, Tensor x, double eps, Tensor grad_x, std::string binary, int64_t cores,
              int64_t ub, int64_t stream) {
  const KernelTarget target{binary, cores, ub, stream};
  const auto tiling = tiling_of(&grad, x, grad_x, eps, target);
  launch_ascendc(target, "l2norm_backward", tiling.rows.pieces(), NPU_OPS_TENSORS(grad, x, grad_x),
                 tiling);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) {
  m.impl("l2norm_ascendc", TORCH_BOX(&forward));
  m.impl("l2norm_backward_ascendc", TORCH_BOX(&backward));
}

}  // namespace npu_ops
