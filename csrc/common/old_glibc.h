// Replacements for newer symbols, so that a library built with a new glibc runs with glibc 2.27 or
// newer, and one wheel serves all. Include it in exactly one source file.
#pragma once

#include <sstream>

// Instantiates a symbol that torch 2.7's headers need in C++20: libstdc++ has it only since gcc 11.
template std::string std::stringbuf::str() const&;

// Binds the dynamic loader's functions to the symbol versions that they had before glibc 2.34 moved
// them into libc.
#if defined(__GLIBC__) && defined(__x86_64__)
#define NPU_OPS_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define NPU_OPS_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif

#ifdef NPU_OPS_OLD
NPU_OPS_OLD(dlopen);
NPU_OPS_OLD(dlsym);
NPU_OPS_OLD(dlerror);
#undef NPU_OPS_OLD

// libstdc++ skips atomic reference counts if this variable, new in glibc 2.32, is not 0. It is 0
// here, because other threads may run.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
