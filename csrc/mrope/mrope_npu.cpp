// Launches mrope_ascendc.cpp on an NPU.
#include <vector>

#include "rope/rotary_launch.h"

namespace npu_ops {
namespace {

void mrope(Tensor q, Tensor k, Tensor cos, Tensor sin, std::optional<Tensor> positions,
           std::vector<int64_t> section, std::string section_layout, std::string layout,
           std::string pair_layout, bool inverse, int64_t rotary_dim, Tensor q_out, Tensor k_out,
           std::string binary, int64_t cores, int64_t ub) {
  const int64_t t = section[0], h = section[1], w = section[2];
  const bool interleaved = section_layout == "interleaved";
  const auto axis = [=](int64_t pair) {
    if (!interleaved) return pair < t ? 0 : pair < t + h ? 1 : 2;
    if (pair % 3 == 1 && pair < 3 * h) return 1;
    return pair % 3 == 2 && pair < 3 * w ? 2 : 0;
  };
  launch_rotary("mrope",
                {q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out},
                3, axis, {binary, cores, ub});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(npu_ops, PrivateUse1, m) { m.impl("mrope_ascendc", TORCH_BOX(&mrope)); }

}  // namespace npu_ops
