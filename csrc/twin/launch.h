// The C interface of the twin, which runs AscendC kernels on the CPU. csrc/emulator and
// python/npu_ops_emulator/twins.py call it.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// The type of `name`__twin, which the library of kernel `name` exports and which runs one block.
// `arguments` holds the launch's arguments, each at its natural alignment.
using NpuOpsTwinKernel = void (*)(const void* arguments);

// Sets the tensors that later launches may touch. They replace those of the call before.
void npu_ops_twin_regions(const char* const* names, const uint64_t* addresses,
                          const uint64_t* bytes, int64_t count);

// Runs a kernel's blocks one after another and returns the number of findings: at most 64, and one
// for each check and call stack. Until the next launch, npu_ops_twin_findings() returns their text,
// one per line. vector_order, goes_on: see Launch in core.h.
int64_t npu_ops_twin_launch(NpuOpsTwinKernel kernel, int64_t blocks, const void* arguments,
                            int vector_order, int goes_on);
const char* npu_ops_twin_findings();
}
