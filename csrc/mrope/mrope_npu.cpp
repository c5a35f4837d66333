// Launches mrope_ascendc.cpp on an NPU.
#include "mrope/sections.h"
#include "rope/rotary_launch.h"

namespace npu_ops {
namespace {

void mrope(Tensor q, Tensor k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
           std::vector<int64_t> section, std::string section_layout, std::string layout,
           std::string pair_layout, bool inverse, int64_t rotary_dim, Tensor q_out, Tensor k_out,
           std::string binary, int64_t cores, int64_t ub, int64_t stream) {
  launch_rotary(
      "mrope", {q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out},
      owned(section, section_layout == "interleaved", rotary_dim / 2), {binary, cores, ub, stream});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) { m.impl("mrope_ascendc", TORCH_BOX(&mrope)); }

}  // namespace npu_ops
