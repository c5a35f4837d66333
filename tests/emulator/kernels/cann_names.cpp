// Uses a type and headers that other projects' kernels use: CANN has them, the vendor's headers do
// not. test_twin.py and test_device_side.py compile this file; nothing runs it.
#include <ascendc/host_api/tiling/template_argument.h>
#include <kernel_operator.h>
#include <lib/matmul_intf.h>
#include <lib/matrix/matmul/tiling.h>

extern "C" __global__ __aicore__ void cann_names(GM_ADDR x) {
  *reinterpret_cast<__gm__ float32_t*>(x) = 1;
}
