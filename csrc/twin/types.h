// Names of the CCE intrinsic layer that AscendC's headers use: pipes, events, modes. Numbers such
// as 6.3.6.1, here and in the other files of this folder, are sections of the CCE intrinsic guide.
#pragma once

using float32_t = float;  // bisheng defines this name without a header

enum pipe_t {
  PIPE_S = 0,
  PIPE_V = 1,
  PIPE_M = 2,
  PIPE_MTE1 = 3,
  PIPE_MTE2 = 4,
  PIPE_MTE3 = 5,
  PIPE_ALL = 6,
  PIPE_MTE4 = 7,
  PIPE_MTE5 = 8,
  PIPE_V2 = 9,
  PIPE_FIX = 10
};
enum event_t {
  EVENT_ID0 = 0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7
};
enum Order_t { VALUE_INDEX = 0, INDEX_VALUE = 1, ONLY_VALUE = 2, ONLY_INDEX = 3 };  // 6.3.6.1
enum bm_t { BM_DISABLE = 0, BM_ENABLE = 1 };                                        // 6.5.3.3
enum atomic_type_t {  // 6.5.2, with the values that the headers pass
  ATOMIC_NONE = 0,
  ATOMIC_F32,
  ATOMIC_F16,
  ATOMIC_S16,
  ATOMIC_S32,
  ATOMIC_S8,
  ATOMIC_BF16
};
enum atomic_op_t { ATOMIC_SUM = 0 };
enum cache_line_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE = 1 };  // 6.6.5
enum dcci_dst_t { CACHELINE_ALL = 0, CACHELINE_UB = 1, CACHELINE_OUT = 2, CACHELINE_ATOMIC = 3 };
enum mem_dsb_t { DSB_ALL = 0, DSB_DDR, DSB_UB, DSB_SEQ };

// Types of the matrix unit and of sorting. The twin (this CPU build of AscendC kernels) emulates
// neither, but AscendC's headers use the names.
enum class mem_t { L1 = 0, L0A, L0B, L0C, UB, BT };
enum QuantMode_t {
  NoQuant = 0,
  F322F16,
  F322BF16,
  DEQF16,
  VDEQF16,
  QF322B8_PRE,
  VQF322B8_PRE,
  REQ8,
  VREQ8,
  QF322F16_PRE,
  VQF322F16_PRE,
  QF322BF16_PRE,
  VQF322BF16_PRE,
  QF322F32_PRE,
  VQF322F32_PRE,
  QF322HIF8_PRE,
  VQF322HIF8_PRE,
  QF322FP8_PRE,
  VQF322FP8_PRE,
  QS322BF16_PRE,
  VQS322BF16_PRE,
  SHIFTS322S16,
  VSHIFTS322S16
};
enum pad_t {
  PAD_NONE = 0,
  PAD_MODE1,
  PAD_MODE2,
  PAD_MODE3,
  PAD_MODE4,
  PAD_MODE5,
  PAD_MODE6,
  PAD_MODE7,
  PAD_MODE8
};
enum addr_cal_mode_t { inc = 0, dec = 1 };
enum ub_addr8_t { VA0 = 0, VA1, VA2, VA3, VA4, VA5, VA6, VA7 };
enum va_half_t { L128 = 0, H128 = 1 };
struct Literal {
  template <class T>
  constexpr Literal(T) {}
};
