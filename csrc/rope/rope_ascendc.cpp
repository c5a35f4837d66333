// rope for Ascend910B and Ascend910_93; its gradient is the inverse rotation by the same kernel.
// See rope/rotary_ascendc.h.
#include "rope/rotary_ascendc.h"

extern "C" __global__ __aicore__ void rope(GM_ADDR q, GM_ADDR k, GM_ADDR cos, GM_ADDR sin,
                                           GM_ADDR positions, GM_ADDR q_out, GM_ADDR k_out,
                                           npu_ops::RotaryTiling tiling) {
  npu_ops::Rotary(q, k, cos, sin, positions, q_out, k_out, tiling).Process();
}
