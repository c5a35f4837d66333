// The dynamic loader's functions by the versions that glibc had before they moved into libc (2.34),
// so that one wheel serves glibc 2.28 (manylinux_2_28).
#pragma once

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
#endif
