// Mistakes that g++ accepts and a device does not. The macro MISTAKE, a number of the enum Mistake,
// selects one; with 0 the kernel is right. test_device_side.py has the expected finding for each.
#include <kernel_operator.h>

#include <algorithm>
#include <cmath>

#ifndef MISTAKE
#define MISTAKE 0
#endif

namespace npu_ops {

enum Mistake {
  kNone,
  kDouble,
  kStandardLibrary,
  kMathLibrary,
  kRecursion,
  kGlobalForPlain,
  kPlainForGlobal,
  kBufferForGlobal,
  kDeepStack,
  kOfTheHost,
  kUnknownCall,
  kGlobalConstructor,
  kHeap,
  kCast,
};

struct Shared {
  int32_t count;
#if MISTAKE == 9
  inline int32_t half() const { return count / 2; }
#else
  __aicore__ inline int32_t half() const { return count / 2; }
#endif
};

__aicore__ inline int32_t plain_sum(const int32_t* values) { return values[0] + values[1]; }
__aicore__ inline int32_t global_sum(const __gm__ int32_t* values) { return values[0] + values[1]; }
__aicore__ int32_t factorial(int32_t n) { return n < 2 ? 1 : n * factorial(n - 1); }
__aicore__ inline int32_t twice(int32_t n) { return 2 * n; }
__aicore__ inline int32_t thrice(int32_t n) { return 3 * n; }

class Kernel {
 public:
  __aicore__ inline explicit Kernel(GM_ADDR x) : x_(x) {}

  __aicore__ inline int32_t Run(Shared shared) {
    const auto* values = reinterpret_cast<__gm__ int32_t*>(x_);
    const int32_t own[2] = {shared.half(), 1};
    int32_t result = plain_sum(own) + global_sum(values);
    [[maybe_unused]] const float scale = static_cast<float>(result);
    switch (MISTAKE) {
      case kNone:
        break;
#if MISTAKE == 1
      case kDouble:
        return static_cast<int32_t>(scale * 0.1);
#elif MISTAKE == 2
      case kStandardLibrary:
        return std::max(result, shared.count);
#elif MISTAKE == 3
      case kMathLibrary:
        return static_cast<int32_t>(::sinf(scale));
#elif MISTAKE == 4
      case kRecursion:
        return factorial(result);
#elif MISTAKE == 5
      case kGlobalForPlain:
        return plain_sum(values);
#elif MISTAKE == 6
      case kPlainForGlobal:
        return global_sum(own);
#elif MISTAKE == 7
      case kBufferForGlobal: {
        AscendC::LocalTensor<int32_t> tensor;
        return global_sum(tensor.GetPhyAddr());
      }
#elif MISTAKE == 8
      case kDeepStack: {
        volatile int32_t many[10000];
        for (int32_t i = 0; i < 10000; ++i) many[i] = i;
        return many[result];
      }
#elif MISTAKE == 10
      case kUnknownCall: {
        int32_t (*const functions[])(int32_t) = {twice, thrice};
        return functions[result % 2](result);
      }
#elif MISTAKE == 12
      case kHeap:
        return *new int32_t(result);
#elif MISTAKE == 13
      case kCast:
        return plain_sum((const int32_t*)values);
#endif
    }
    return result;
  }

 private:
  GM_ADDR x_;
};

#if MISTAKE == 11
struct Constructed {
  int64_t value;
  __aicore__ inline Constructed() : value(AscendC::GetBlockIdx()) {}
};
Constructed constructed;
#endif

}  // namespace npu_ops

extern "C" __global__ __aicore__ void device_mistakes(GM_ADDR x, npu_ops::Shared shared) {
  auto* values = reinterpret_cast<__gm__ int32_t*>(x);
  values[0] = npu_ops::Kernel(x).Run(shared);
}
