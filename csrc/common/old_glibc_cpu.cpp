// What a library built with a new glibc and libstdc++ would ask of the machine that it runs on, so
// that one wheel serves glibc 2.28 (manylinux_2_28).

// libstdc++'s counters of references look here whether there is one thread only; glibc has it since
// 2.32. Never: the counters are then atomic always.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
