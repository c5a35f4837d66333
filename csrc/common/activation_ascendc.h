// Sigmoid, softplus and functions of them, on the vector unit. Included only by device code.
#pragma once

#include <kernel_operator.h>

namespace npu_ops {

// Sets to = 1 / (1 + exp(-x)). If exp overflows to infinity, the quotient is the correct 0. `ones`
// holds `count` ones, for Div: AscendC's Reciprocal is only an estimate. `to` must not be x.
__aicore__ inline void sigmoid(AscendC::LocalTensor<float> to, AscendC::LocalTensor<float> x,
                               AscendC::LocalTensor<float> ones, int32_t count) {
  AscendC::Muls(to, x, -1.0f, count);
  AscendC::Exp(to, to, count);
  AscendC::Adds(to, to, 1.0f, count);
  AscendC::Div(to, ones, to, count);
}

// Sets to = exp(-|x|). `to` must not be x.
__aicore__ inline void exp_of_minus_abs(AscendC::LocalTensor<float> to,
                                        AscendC::LocalTensor<float> x, int32_t count) {
  AscendC::Abs(to, x, count);
  AscendC::Muls(to, to, -1.0f, count);
  AscendC::Exp(to, to, count);
}

// Sets to = sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|), because sigmoid(x) * (1 - sigmoid(x))
// is inexact at large x. `to` and `scratch` must not be x.
__aicore__ inline void sigmoid_slope(AscendC::LocalTensor<float> to, AscendC::LocalTensor<float> x,
                                     AscendC::LocalTensor<float> scratch, int32_t count) {
  exp_of_minus_abs(to, x, count);
  AscendC::Adds(scratch, to, 1.0f, count);
  AscendC::Div(to, to, scratch, count);
  AscendC::Div(to, to, scratch, count);
}

// Sets to = softplus(x) = max(x, 0) + log(1 + e) with e = exp(-|x|). log(1 + e) = 2 artanh(s) with
// s = e / (2 + e) <= 1/3, computed by its series: Ln(1 + e) would lose the digits of a small e.
// `to`, `s` and `t` must not be x.
__aicore__ inline void softplus(AscendC::LocalTensor<float> to, AscendC::LocalTensor<float> x,
                                AscendC::LocalTensor<float> s, AscendC::LocalTensor<float> t,
                                int32_t count) {
  exp_of_minus_abs(s, x, count);
  AscendC::Adds(t, s, 2.0f, count);
  AscendC::Div(s, s, t, count);
  AscendC::Mul(t, s, s, count);
  AscendC::Muls(to, t, 1.0f / 13, count);
  for (int32_t i = 11; i > 1; i -= 2) {
    AscendC::Adds(to, to, 1.0f / i, count);
    AscendC::Mul(to, to, t, count);
  }
  AscendC::Adds(to, to, 1.0f, count);
  AscendC::Mul(to, to, s, count);
  AscendC::Muls(to, to, 2.0f, count);
  AscendC::Maxs(t, x, 0.0f, count);
  AscendC::Add(to, to, t, count);
}

// Splits x so that exp(A_log) * softplus(x) = exp(A_log + far) * softplus(near). If the product is
// representable in fp32, neither factor overflows or vanishes. On return, x holds near = max(x,
// -17), and far is min(x + 17, 0), because softplus(x) is exp(x) below -17. t is scratch.
__aicore__ inline void part_softplus(AscendC::LocalTensor<float> x, AscendC::LocalTensor<float> far,
                                     AscendC::LocalTensor<float> t, int32_t count) {
  constexpr float kFar = -17.0f;
  AscendC::Adds(far, x, -kFar, count);
  AscendC::Mins(far, far, 0.0f, count);
  // t = 0, or NaN if x is NaN. It is added below because Maxs may turn a NaN into a number.
  exp_of_minus_abs(t, x, count);
  AscendC::Muls(t, t, 0.0f, count);
  AscendC::Maxs(x, x, kFar, count);
  AscendC::Add(x, x, t, count);
}

}  // namespace npu_ops
