// Replacements for newer symbols, so that a library built with a new glibc runs with glibc 2.27,
// and one wheel serves all. To be included in one source file.
#pragma once

#include <sstream>

// In C++20, torch 2.7's headers need this symbol of gcc 11's libstdc++.
template std::string std::stringbuf::str() const&;

// Uses the dynamic loader's functions with the versions that they had before they moved into libc
// (2.34).
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

// libstdc++ reads this variable to learn whether there is one thread; glibc has it since 2.32. Here
// it says that there may be more, so reference counts are atomic.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
