// Element-wise arithmetic: CCE intrinsic guide, 6.3.4 (two operands), 6.3.5 (one operand), 6.3.8.1,
// 6.3.8.2 and 6.3.9.
//
// Floats narrower than 32 bits are computed in float and rounded once. Integers wrap: the vendor's
// compiler lowers arith.addi and arith.muli, which wrap, to these instructions. exp, ln and sqrt
// are rounded from double; how a device rounds them is not documented.
#pragma once

#include <cmath>
#include <type_traits>

#include "lanes.h"
#include "narrow.h"

namespace npu_ops::twin {

// The type in which operations on T are computed.
template <class T, bool = std::is_integral_v<T>>
struct WideOf {
  using Type = float;
};
template <class T>
struct WideOf<T, true> {
  using Type = std::make_unsigned_t<T>;
};
template <class T>
using Wide = typename WideOf<T>::Type;

template <class D, class A, class B, class F>
void binary(const char* name, const Operand<D>& to, const Operand<A>& a, const Operand<B>& b,
            int repeats, F f) {
  issue(name, PIPE_V);
  aligned(to.base, kBlockBytes, "the target");
  aligned(a.base, kBlockBytes, "the first source");
  aligned(b.base, kBlockBytes, "the second source");
  const Extent extent(repeats, per_repeat<D, A, B>());
  touch(Access::kRead, a, extent);
  touch(Access::kRead, b, extent);
  touch(Access::kWrite, to, extent);
  extent.each([&](int r, int e) { *to.at(r, e) = f(*a.at(r, e), *b.at(r, e), *to.at(r, e)); });
}

template <class D, class A, class F>
void unary(const char* name, const Operand<D>& to, const Operand<A>& a, const Extent& extent, F f) {
  issue(name, PIPE_V);
  aligned(to.base, kBlockBytes, "the target");
  aligned(a.base, kBlockBytes, "the source");
  touch(Access::kRead, a, extent);
  touch(Access::kWrite, to, extent);
  extent.each([&](int r, int e) { *to.at(r, e) = f(*a.at(r, e), *to.at(r, e)); });
}

template <class D, class A, class F>
void unary(const char* name, const Operand<D>& to, const Operand<A>& a, int repeats, F f) {
  unary<D, A>(name, to, a, Extent(repeats, per_repeat<D, A>()), f);
}

// Truncates the fraction to 8 bits, for vrec and vrsqrt. The guide refers to Arm's FRECPE and
// FRSQRTE, which are estimates to about 8 bits.
inline float estimate(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits &= 0xFFFF8000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace npu_ops::twin

// X and Y are the two sources, Z is the target's old value.
#define NPU_OPS_TWIN_BINARY(NAME, EXPRESSION)                                                \
  template <class T>                                                                         \
  inline void NAME(T* to, T* a, T* b, uint8_t repeats, uint8_t to_block, uint8_t a_block,    \
                   uint8_t b_block, uint8_t to_repeat, uint8_t a_repeat, uint8_t b_repeat) { \
    npu_ops::twin::binary<T, T, T>(#NAME, {to, to_block, to_repeat}, {a, a_block, a_repeat}, \
                                   {b, b_block, b_repeat}, repeats, [](T x, T y, T z) {      \
                                     using W = npu_ops::twin::Wide<T>;                       \
                                     [[maybe_unused]] const W X(x), Y(y), Z(z);              \
                                     return npu_ops::twin::narrow<T>(EXPRESSION);            \
                                   });                                                       \
  }
NPU_OPS_TWIN_BINARY(vadd, X + Y)                                       // 6.3.4.1
NPU_OPS_TWIN_BINARY(vsub, X - Y)                                       // 6.3.4.1
NPU_OPS_TWIN_BINARY(vmul, X* Y)                                        // 6.3.4.1
NPU_OPS_TWIN_BINARY(vdiv, X / Y)                                       // 6.3.4.1
NPU_OPS_TWIN_BINARY(vmadd, X* Z + Y)                                   // 6.3.4.4
NPU_OPS_TWIN_BINARY(vaddrelu, T(X + Y) > T(0) ? X + Y : W(0))          // 6.3.4.2
NPU_OPS_TWIN_BINARY(vsubrelu, T(X - Y) > T(0) ? X - Y : W(0))          // 6.3.4.2
NPU_OPS_TWIN_BINARY(vmaddrelu, T(X* Z + Y) > T(0) ? X * Z + Y : W(0))  // 6.3.4.5
NPU_OPS_TWIN_BINARY(vmax, x > y ? X : Y)                               // 6.3.8.1
NPU_OPS_TWIN_BINARY(vmin, x < y ? X : Y)                               // 6.3.8.1
NPU_OPS_TWIN_BINARY(vand, X& Y)                                        // 6.3.9.1
NPU_OPS_TWIN_BINARY(vor, X | Y)                                        // 6.3.9.2
#undef NPU_OPS_TWIN_BINARY

// 6.3.4.3: if the sources are half, the target may be float.
template <class D, class A>
inline void vmla(D* to, A* a, A* b, uint8_t repeats, uint8_t to_block, uint8_t a_block,
                 uint8_t b_block, uint8_t to_repeat, uint8_t a_repeat, uint8_t b_repeat) {
  npu_ops::twin::binary<D, A, A>(
      "vmla", {to, to_block, to_repeat}, {a, a_block, a_repeat}, {b, b_block, b_repeat}, repeats,
      [](A x, A y, D z) { return npu_ops::twin::narrow<D>(float(x) * float(y) + float(z)); });
}

#define NPU_OPS_TWIN_SCALAR(NAME, EXPRESSION)                                                     \
  template <class T, class S>                                                                     \
  inline void NAME(T* to, T* a, S scalar, uint8_t repeats, uint16_t to_block, uint16_t a_block,   \
                   uint16_t to_repeat, uint16_t a_repeat) {                                       \
    const T y = T(scalar);                                                                        \
    npu_ops::twin::unary<T, T>(#NAME, {to, to_block, to_repeat}, {a, a_block, a_repeat}, repeats, \
                               [y](T x, T) {                                                      \
                                 using W = npu_ops::twin::Wide<T>;                                \
                                 const W X(x), Y(y);                                              \
                                 return npu_ops::twin::narrow<T>(EXPRESSION);                     \
                               });                                                                \
  }                                                                                               \
  template <class T, class S>                                                                     \
  inline void NAME(T* to, T* a, S scalar, uint8_t repeats, uint16_t to_block, uint16_t a_block,   \
                   uint16_t to_repeat, uint16_t a_repeat, bool, bool) {                           \
    NAME(to, a, scalar, repeats, to_block, a_block, to_repeat, a_repeat);                         \
  }
NPU_OPS_TWIN_SCALAR(vadds, X + Y)                  // 6.3.4.6
NPU_OPS_TWIN_SCALAR(vmuls, X* Y)                   // 6.3.4.6
NPU_OPS_TWIN_SCALAR(vlrelu, x < T(0) ? X * Y : X)  // 6.3.4.10
NPU_OPS_TWIN_SCALAR(vmaxs, x > y ? X : Y)          // 6.3.8.2
NPU_OPS_TWIN_SCALAR(vmins, x < y ? X : Y)          // 6.3.8.2
#undef NPU_OPS_TWIN_SCALAR

// CCE intrinsic guide, 6.3.4.9.
template <class D, class A, class S>
inline void vaxpy(D* to, A* a, S scalar, uint8_t repeats, uint16_t to_block, uint16_t a_block,
                  uint16_t to_repeat, uint16_t a_repeat) {
  const float y = float(A(scalar));
  npu_ops::twin::unary<D, A>(
      "vaxpy", {to, to_block, to_repeat}, {a, a_block, a_repeat}, repeats,
      [y](A x, D z) { return npu_ops::twin::narrow<D>(float(x) * y + float(z)); });
}

// CCE intrinsic guide, 6.3.4.7.
template <class T>
inline void vshl(T* to, T* a, uint32_t distance, uint8_t repeats, uint16_t to_block,
                 uint16_t a_block, uint16_t to_repeat, uint16_t a_repeat) {
  npu_ops::twin::unary<T, T>(
      "vshl", {to, to_block, to_repeat}, {a, a_block, a_repeat}, repeats, [distance](T x, T) {
        return distance >= sizeof(T) * 8 ? T(0) : T(std::make_unsigned_t<T>(x) << distance);
      });
}

// 6.3.4.8: arithmetic for signed types, with rounding on request; logical for unsigned ones.
template <class T>
inline void vshr(T* to, T* a, int32_t distance, uint8_t repeats, uint16_t to_block,
                 uint16_t a_block, uint16_t to_repeat, uint16_t a_repeat, bool round = false) {
  npu_ops::twin::unary<T, T>(
      "vshr", {to, to_block, to_repeat}, {a, a_block, a_repeat}, repeats, [=](T x, T) {
        const int64_t wide = static_cast<int64_t>(x);
        const int64_t carry =
            round && std::is_signed_v<T> && distance > 0 ? wide >> (distance - 1) & 1 : 0;
        return T((wide >> distance) + carry);
      });
}

#define NPU_OPS_TWIN_UNARY(NAME, EXPRESSION)                                                      \
  template <class T>                                                                              \
  inline void NAME(T* to, T* a, uint8_t repeats, uint16_t to_block, uint16_t a_block,             \
                   uint16_t to_repeat, uint16_t a_repeat) {                                       \
    npu_ops::twin::unary<T, T>(#NAME, {to, to_block, to_repeat}, {a, a_block, a_repeat}, repeats, \
                               [](T x, T) {                                                       \
                                 [[maybe_unused]] const auto X = npu_ops::twin::Wide<T>(x);       \
                                 return npu_ops::twin::narrow<T>(EXPRESSION);                     \
                               });                                                                \
  }
NPU_OPS_TWIN_UNARY(vexp, float(std::exp(double(X))))                      // 6.3.5.1
NPU_OPS_TWIN_UNARY(vsqrt, float(std::sqrt(double(X))))                    // 6.3.5.2
NPU_OPS_TWIN_UNARY(vrsqrt, npu_ops::twin::estimate(1.0f / std::sqrt(X)))  // 6.3.5.3
NPU_OPS_TWIN_UNARY(vrelu, x < T(0) ? T(0) : x)                            // 6.3.5.4
NPU_OPS_TWIN_UNARY(vrec, npu_ops::twin::estimate(1.0f / X))               // 6.3.5.5
NPU_OPS_TWIN_UNARY(vabs, x < T(0) ? -X : X)                               // 6.3.5.6
NPU_OPS_TWIN_UNARY(vln, float(std::log(double(X))))                       // 6.3.5.7
NPU_OPS_TWIN_UNARY(vnot, ~X)                                              // 6.3.9.3
#undef NPU_OPS_TWIN_UNARY

// 6.3.11.6. In counter mode most instructions ignore their repeat count. vcopy does not: it copies
// as many elements per repeat as the mask says. The guide does not mention this; AscendC's
// Broadcast (broadcast_v220_impl.h) relies on it to copy one row per repeat.
template <class T>
inline void vcopy(T* to, T* a, uint8_t repeats, uint16_t to_block, uint16_t a_block,
                  uint16_t to_repeat, uint16_t a_repeat) {
  using namespace npu_ops::twin;
  unary<T, T>("vcopy", {to, to_block, to_repeat}, {a, a_block, a_repeat},
              Extent::of_each_repeat(repeats, per_repeat<T>()), [](T x, T) { return x; });
}
