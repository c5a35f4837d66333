// Registers, events and scalar instructions.
#pragma once

#include <cstring>

#include "lanes.h"

// 6.3.2 Mask.
inline void set_mask_norm() { npu_ops::twin::registers().mask.counts = false; }
inline void set_mask_count() { npu_ops::twin::registers().mask.counts = true; }
inline void set_vector_mask(uint64_t high, uint64_t low) {
  npu_ops::twin::registers().mask.high = high;
  npu_ops::twin::registers().mask.low = low;
}
inline void set_vector_mask_dup(uint64_t mask) { set_vector_mask(mask, mask); }

// 6.3.3 CMPMASK.
inline void set_cmpmask(void* source) {
  npu_ops::twin::issue("set_cmpmask", PIPE_V);
  npu_ops::twin::touch(npu_ops::twin::Access::kRead, source, 16);
  std::memcpy(npu_ops::twin::registers().compare, source, 16);
}
inline void get_cmpmask(void* target) {
  npu_ops::twin::issue("get_cmpmask", PIPE_V);
  npu_ops::twin::touch(npu_ops::twin::Access::kWrite, target, 16);
  std::memcpy(target, npu_ops::twin::registers().compare, 16);
}

// 6.3.6.2, 6.3.6.5: results that stay in registers.
inline int64_t get_acc_val() { return npu_ops::twin::registers().accumulated; }
inline int64_t get_rsvd_cnt() { return npu_ops::twin::registers().reserved_count; }

// 6.5.2 Atomic.
inline void set_atomic_none() {
  npu_ops::twin::registers().atomic = npu_ops::twin::Atomic::kNone;
  npu_ops::twin::registers().atomic_type = npu_ops::twin::AtomicType::kNone;
}
inline void set_atomic_add() { npu_ops::twin::registers().atomic = npu_ops::twin::Atomic::kAdd; }
inline void set_atomic_max() { npu_ops::twin::registers().atomic = npu_ops::twin::Atomic::kMax; }
inline void set_atomic_min() { npu_ops::twin::registers().atomic = npu_ops::twin::Atomic::kMin; }
#define NPU_OPS_TWIN_ATOMIC(NAME, TYPE)                                       \
  inline void set_atomic_##NAME() {                                           \
    npu_ops::twin::registers().atomic_type = npu_ops::twin::AtomicType::TYPE; \
  }
NPU_OPS_TWIN_ATOMIC(f32, kF32)
NPU_OPS_TWIN_ATOMIC(f16, kF16)
NPU_OPS_TWIN_ATOMIC(s16, kS16)
NPU_OPS_TWIN_ATOMIC(s32, kS32)
NPU_OPS_TWIN_ATOMIC(s8, kS8)
NPU_OPS_TWIN_ATOMIC(bf16, kBf16)
#undef NPU_OPS_TWIN_ATOMIC

// 6.5.9.4: the value that copies pad with.
inline void set_mov_pad_val(uint64_t value) { npu_ops::twin::registers().padding = value; }
inline void set_padding(uint64_t) {}  // for loads of the matrix unit, which the twin lacks

// 6.6 Synchronisation.
template <class Id>
inline void set_flag(pipe_t from, pipe_t to, Id id) {
  npu_ops::twin::set_event(from, to, static_cast<int>(id));
}
template <class Id>
inline void wait_flag(pipe_t from, pipe_t to, Id id) {
  npu_ops::twin::wait_event(from, to, static_cast<int>(id));
}
inline void pipe_barrier(pipe_t pipe) { npu_ops::twin::wait_pipe(pipe); }

// 6.6.5 Caches. The twin has none, so these do nothing.
inline void dsb(mem_dsb_t) {}
template <class... T>
inline void dcci(T...) {}
template <class... T>
inline void dc_preload(T...) {}
template <class... T>
inline void preload(T...) {}

// Scalar functions (guide 4.5), and the core's index.
inline uint64_t get_ctrl() { return npu_ops::twin::registers().control; }
inline void set_ctrl(uint64_t value) { npu_ops::twin::registers().control = value; }
inline uint64_t sbitset0(uint64_t value, int bit) { return value & ~(uint64_t{1} << bit); }
inline uint64_t sbitset1(uint64_t value, int bit) { return value | uint64_t{1} << bit; }
inline int64_t sff0(uint64_t value) { return ~value ? __builtin_ctzll(~value) : -1; }
inline int64_t sff1(uint64_t value) { return value ? __builtin_ctzll(value) : -1; }
inline int64_t bcnt0(uint64_t value) { return 64 - __builtin_popcountll(value); }
inline int64_t bcnt1(uint64_t value) { return __builtin_popcountll(value); }
inline int64_t clz(uint64_t value) { return value ? __builtin_clzll(value) : 64; }
inline int64_t sflbits(int64_t value) {
  return value == 0 || value == -1 ? 63 : __builtin_clrsbll(value);
}
inline uint64_t get_pc() { return 0; }
inline int64_t get_block_idx() { return npu_ops::twin::block_index(); }
inline int64_t get_block_num() { return npu_ops::twin::block_count(); }
inline int64_t get_coreid() { return npu_ops::twin::block_index(); }
inline int64_t get_subblockid() { return 0; }
inline int64_t get_subblockdim() { return 1; }
inline int64_t get_data_main_base() { return 0; }
inline uint64_t get_sys_cnt() {
  static uint64_t count = 0;
  return ++count;
}
