// The C interface of the twin: csrc/emulator and python/npu_ops_emulator/twins.py are its callers.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// `name`__twin, which the library of kernel `name` exports: runs one block of the kernel. The
// launch's arguments lie in memory, each at its natural alignment.
using NpuOpsTwinKernel = void (*)(const void* arguments);

// The tensors that the next launches may touch; count 0 forgets them all.
void npu_ops_twin_regions(const char* const* names, const uint64_t* addresses,
                          const uint64_t* bytes, int64_t count);

// Runs a kernel's blocks one after another. Returns how many findings there are; their text, one
// a line, is `npu_ops_twin_findings()` until the next launch.
int64_t npu_ops_twin_launch(NpuOpsTwinKernel kernel, int64_t blocks, const void* arguments,
                            int vector_order, int goes_on);
const char* npu_ops_twin_findings();
}
