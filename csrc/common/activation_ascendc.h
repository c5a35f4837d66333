// Sigmoid and what comes of it, on the vector unit. Included by device code alone.
#pragma once

#include <kernel_operator.h>

namespace npu_ops {

// to = 1 / (1 + exp(-x)); exp overflows to infinity, whose reciprocal is the right 0. `ones` holds
// as many ones, because Reciprocal is an estimate. to is not x.
__aicore__ inline void sigmoid(AscendC::LocalTensor<float> to, AscendC::LocalTensor<float> x,
                               AscendC::LocalTensor<float> ones, int32_t count) {
  AscendC::Muls(to, x, -1.0f, count);
  AscendC::Exp(to, to, count);
  AscendC::Adds(to, to, 1.0f, count);
  AscendC::Div(to, ones, to, count);
}

// to = sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|): sigmoid(x) * (1 - sigmoid(x)) would be all
// rounding at large x. to and scratch are not x.
__aicore__ inline void sigmoid_slope(AscendC::LocalTensor<float> to, AscendC::LocalTensor<float> x,
                                     AscendC::LocalTensor<float> scratch, int32_t count) {
  AscendC::Abs(to, x, count);
  AscendC::Muls(to, to, -1.0f, count);
  AscendC::Exp(to, to, count);
  AscendC::Adds(scratch, to, 1.0f, count);
  AscendC::Div(to, to, scratch, count);
  AscendC::Div(to, to, scratch, count);
}

}  // namespace npu_ops
