// Runs one instruction of the twin on an image of the unified buffer. test_instructions.py in
// tests/emulator selects the instruction and checks the image afterwards.
#include <kernel_operator.h>

#include <cstring>

namespace npu_ops {

constexpr int32_t kBytes = 64 * 1024;

// Offsets are in bytes from the start of the image, strides in blocks.
struct Call {
  char name[32];
  uint64_t low, high;  // the mask
  int64_t counts;      // whether the mask is in counter mode
  double scalar;
  int32_t to, a, b, repeats;
  int32_t to_block, a_block, b_block, to_repeat, a_repeat, b_repeat;
  int32_t more[6];
};

// Registers after the instruction.
struct Left {
  uint64_t compare[2], accumulated, kept;
};

struct Place {
  char *ub, *in, *other;  // the image, the tensor it is copied from, another tensor
  template <class T>
  T* at(int32_t offset) const {
    return reinterpret_cast<T*>(ub + offset);
  }
};

template <class T>
T scalar_of(const Call& c) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(c.scalar);
  else
    return T(static_cast<float>(c.scalar));
}

struct Entry {
  const char* name;
  void (*run)(const Call&, const Place&);
};

#define ENTRY(NAME, ...) {NAME, [](const Call& c, const Place& p) { __VA_ARGS__; }},
#define BINARY(NAME, T) BINARY_TO(#NAME "." #T, NAME, T, T)
#define BINARY_TO(LABEL, NAME, D, T)                                                             \
  ENTRY(LABEL, NAME(p.at<D>(c.to), p.at<T>(c.a), p.at<T>(c.b), c.repeats, c.to_block, c.a_block, \
                    c.b_block, c.to_repeat, c.a_repeat, c.b_repeat))
#define SCALAR(NAME, T) SCALAR_TO(#NAME "." #T, NAME, T, T)
#define SCALAR_TO(LABEL, NAME, D, T)                                                    \
  ENTRY(LABEL, NAME(p.at<D>(c.to), p.at<T>(c.a), scalar_of<T>(c), c.repeats, c.to_block, \
                    c.a_block, c.to_repeat, c.a_repeat))
#define UNARY(NAME, T)                                                                         \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), p.at<T>(c.a), c.repeats, c.to_block, c.a_block,      \
                           c.to_repeat, c.a_repeat))
#define CONVERT(NAME, D, S)                                                                    \
  ENTRY(#NAME, NAME(p.at<D>(c.to), p.at<S>(c.a), c.repeats, c.to_block, c.a_block, c.to_repeat, \
                    c.a_repeat))
#define CONVERT_5(NAME, D, S) \
  CONVERT(NAME##r, D, S)      \
  CONVERT(NAME##a, D, S)      \
  CONVERT(NAME##f, D, S)      \
  CONVERT(NAME##c, D, S)      \
  CONVERT(NAME##z, D, S)
#define CONVERT_6(NAME, D, S) CONVERT(NAME, D, S) CONVERT_5(NAME, D, S)
#define ONE(NAME, D)                                                                     \
  ENTRY(#NAME, const D value = NAME(static_cast<float>(c.scalar));                        \
        std::memcpy(&npu_ops::twin::registers().accumulated, &value, sizeof(D)))
#define COMPARE(MODE, T)                                                                          \
  ENTRY("vcmpv_" #MODE "." #T,                                                                    \
        vcmpv_##MODE(p.at<uint8_t>(c.to), p.at<T>(c.a), p.at<T>(c.b), c.repeats, 1, c.a_block,    \
                     c.b_block, 8, c.a_repeat, c.b_repeat))                                       \
  ENTRY("vcmpvs_" #MODE "." #T, vcmpvs_##MODE(p.at<uint8_t>(c.to), p.at<T>(c.a), scalar_of<T>(c), \
                                              c.repeats, 1, c.a_block, 8, c.a_repeat))            \
  ENTRY("vcmp_" #MODE "." #T, vcmp_##MODE(p.at<T>(c.a), p.at<T>(c.b), 1, 1, c.a_block, c.b_block, \
                                          8, c.a_repeat, c.b_repeat))
#define COMPARES(T) \
  COMPARE(lt, T)    \
  COMPARE(gt, T)    \
  COMPARE(le, T)    \
  COMPARE(ge, T)    \
  COMPARE(eq, T)    \
  COMPARE(ne, T)
#define BY_BLOCK(NAME, T)                                                                     \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), p.at<T>(c.a), c.repeats, c.to_repeat, c.a_block,    \
                           c.a_repeat))
#define BEST(NAME, T)                                                                         \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), p.at<T>(c.a), c.repeats, c.to_repeat, c.a_block,    \
                           c.a_repeat, static_cast<Order_t>(c.more[0])))
#define FLOATS(KIND, NAME) KIND(NAME, half) KIND(NAME, float)
#define NUMBERS(KIND, NAME) FLOATS(KIND, NAME) KIND(NAME, int16_t) KIND(NAME, int32_t)
#define WORDS(KIND, NAME) \
  KIND(NAME, int16_t) KIND(NAME, uint16_t) KIND(NAME, int32_t) KIND(NAME, uint32_t)

// The mask of vsel: in CMPMASK for mode 0; in `b` for mode 1, whose scalar is in CMPMASK;
// where CMPMASK points for mode 2.
template <class T>
void select(const Call& c, const Place& p) {
  const int32_t mode = c.more[0], bits = c.more[1], mask = c.more[2];
  if (mode == 2) *p.at<uint64_t>(mask) = reinterpret_cast<uint64_t>(p.ub + bits);
  if (mode == 1) *p.at<T>(mask) = scalar_of<T>(c);
  set_cmpmask(p.ub + (mode == 0 ? bits : mask));
  vsel(p.at<T>(c.to), p.at<T>(c.a), p.at<T>(mode == 1 ? bits : c.b), c.repeats, c.to_block,
       c.a_block, c.b_block, c.to_repeat, c.a_repeat, c.b_repeat, mode);
}

template <class T>
void reduce(const Call& c, const Place& p) {
  vreducev2(p.at<T>(c.to), p.at<T>(c.a), p.at<T>(c.b), c.repeats, c.a_block, c.more[0], c.a_repeat,
            c.b_repeat);
}

// At `b` are the offsets of the target's and the source's sixteen blocks.
void point_to_blocks(const Call& c, const Place& p) {
  for (int32_t i = 0; i < 4; ++i) {
    uint64_t addresses[8];
    for (int32_t j = 0; j < 8; ++j)
      addresses[j] = reinterpret_cast<uint64_t>(p.ub + p.at<uint32_t>(c.b)[8 * i + j]);
    set_va_reg_sb(static_cast<ub_addr8_t>(i), addresses);
  }
}

void set_atomic(const Call& c) {
  void (*const kinds[])() = {set_atomic_none, set_atomic_add, set_atomic_max, set_atomic_min};
  void (*const types[])() = {set_atomic_f32, set_atomic_f16, set_atomic_bf16,
                             set_atomic_s32, set_atomic_s16, set_atomic_s8};
  kinds[c.more[4]]();
  if (c.more[4]) types[c.more[5]]();
}

#define PADDED(SUFFIX)                                                                            \
  ENTRY("copy_gm_to_ubuf_align_" #SUFFIX, set_mov_pad_val(static_cast<uint64_t>(c.scalar));        \
        copy_gm_to_ubuf_align_##SUFFIX(p.at<char>(c.to), p.in + c.a, 0, c.repeats, c.more[0],      \
                                       c.more[1], c.more[2], c.a_repeat, c.to_repeat))             \
  ENTRY("copy_ubuf_to_gm_align_" #SUFFIX, set_atomic(c);                                           \
        copy_ubuf_to_gm_align_##SUFFIX(p.other + c.to, p.at<char>(c.a), 0, c.repeats, c.more[0],   \
                                       0, 0, c.a_repeat, c.to_repeat))

const Entry kEntries[] = {
    // clang-format off
    NUMBERS(BINARY, vadd) NUMBERS(BINARY, vsub) NUMBERS(BINARY, vmul) FLOATS(BINARY, vdiv)
    FLOATS(BINARY, vmadd) FLOATS(BINARY, vaddrelu) FLOATS(BINARY, vsubrelu)
    BINARY(vaddrelu, int16_t) BINARY(vsubrelu, int16_t)
    FLOATS(BINARY, vmaddrelu) NUMBERS(BINARY, vmax) NUMBERS(BINARY, vmin)
    BINARY(vand, int16_t) BINARY(vand, uint16_t) BINARY(vor, int16_t) BINARY(vor, uint16_t)
    FLOATS(BINARY, vmla) BINARY_TO("vmla.float.half", vmla, float, half)
    NUMBERS(SCALAR, vadds) NUMBERS(SCALAR, vmuls) FLOATS(SCALAR, vlrelu)
    NUMBERS(SCALAR, vmaxs) NUMBERS(SCALAR, vmins)
    FLOATS(SCALAR, vaxpy) SCALAR_TO("vaxpy.float.half", vaxpy, float, half)
    WORDS(SCALAR, vshl)
    FLOATS(UNARY, vexp) FLOATS(UNARY, vsqrt) FLOATS(UNARY, vrsqrt) FLOATS(UNARY, vrec)
    FLOATS(UNARY, vabs) FLOATS(UNARY, vln) FLOATS(UNARY, vrelu) UNARY(vrelu, int32_t)
    UNARY(vnot, int16_t) UNARY(vnot, uint16_t) WORDS(UNARY, vcopy)
    CONVERT_5(vconv_f322f32, float, float) CONVERT_6(vconv_f322f16, half, float)
    CONVERT(vconv_f322f16o, half, float) CONVERT_5(vconv_f322bf16, bfloat16_t, float)
    CONVERT_5(vconv_f322s64, int64_t, float) CONVERT_5(vconv_f322s32, int32_t, float)
    CONVERT_5(vconv_f322s16, int16_t, float) CONVERT_5(vconv_f162s32, int32_t, half)
    CONVERT_5(vconv_f162s16, int16_t, half) CONVERT_6(vconv_f162s8, int8_t, half)
    CONVERT_6(vconv_f162u8, uint8_t, half) CONVERT_5(vconv_bf162s32, int32_t, bfloat16_t)
    CONVERT_6(vconv_s162f16, half, int16_t) CONVERT_6(vconv_s322f32, float, int32_t)
    CONVERT_5(vconv_s642f32, float, int64_t) CONVERT(vconv_f162f32, float, half)
    CONVERT(vconv_bf162f32, float, bfloat16_t) CONVERT(vconv_u82f16, half, uint8_t)
    CONVERT(vconv_s82f16, half, int8_t) CONVERT(vconv_s162f32, float, int16_t)
    CONVERT(vconv_s322s64, int64_t, int32_t) CONVERT(vconv_s642s32, int32_t, int64_t)
    CONVERT(vconv_s322s16, int16_t, int32_t)
    ONE(conv_f322s32r, int32_t) ONE(conv_f322s32a, int32_t) ONE(conv_f322s32f, int32_t)
    ONE(conv_f322s32c, int32_t) ONE(conv_f322s32z, int32_t) ONE(conv_f322f16o, half)
    COMPARES(half) COMPARES(float)
    FLOATS(BY_BLOCK, vcgadd) FLOATS(BY_BLOCK, vcgmax) FLOATS(BY_BLOCK, vcgmin)
    FLOATS(BY_BLOCK, vcpadd) FLOATS(BEST, vcmax) FLOATS(BEST, vcmin) FLOATS(BEST, vcadd)
#define SHIFT(NAME, T)                                                                            \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), p.at<T>(c.a), static_cast<int32_t>(c.scalar), c.repeats, \
                           c.to_block, c.a_block, c.to_repeat, c.a_repeat, c.more[0] != 0))
    WORDS(SHIFT, vshr)
    {"vsel.half", select<half>}, {"vsel.float", select<float>},
    {"vreducev2.uint16_t", reduce<uint16_t>}, {"vreducev2.uint32_t", reduce<uint32_t>},
#define DUPLICATE(NAME, T)                                                                 \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), scalar_of<T>(c), c.repeats, c.to_block, 1,        \
                           c.to_repeat, 0))
    NUMBERS(DUPLICATE, vector_dup) DUPLICATE(vector_dup, bfloat16_t)
#define BROADCAST(NAME, T) \
  ENTRY(#NAME "." #T, NAME(p.at<T>(c.to), p.at<T>(c.a), c.to_block, c.to_repeat, c.repeats))
    BROADCAST(vbrcb, uint16_t) BROADCAST(vbrcb, uint32_t)
#define GATHER(NAME, T, ...)                                                     \
  ENTRY(#NAME "." #T, AscendC::SetModelGatherbSrc0Tensor(                        \
                          reinterpret_cast<uint64_t>(p.ub + c.a), 0);            \
        NAME(p.at<T>(c.to), p.at<uint32_t>(c.b), 0, c.to_repeat, __VA_ARGS__))
    GATHER(vgather, uint16_t, c.repeats) GATHER(vgather, uint32_t, c.repeats)
    GATHER(vgatherb, uint16_t, c.to_block, c.repeats) GATHER(vgatherb, uint32_t, c.to_block, c.repeats)
    ENTRY("vtranspose.uint16_t", vtranspose(p.at<uint16_t>(c.to), p.at<uint16_t>(c.a)))
#define SCATTER(NAME, ...)                                                                     \
  ENTRY(#NAME, point_to_blocks(c, p); NAME(VA0, VA2, c.repeats, c.to_repeat, c.a_repeat __VA_ARGS__))
    SCATTER(scatter_vnchwconv_b32) SCATTER(scatter_vnchwconv_b16)
    SCATTER(scatter_vnchwconv_b8, , c.more[0] != 0, c.more[1] != 0)
    ENTRY("copy_ubuf_to_ubuf", copy_ubuf_to_ubuf(p.ub + c.to, p.ub + c.a, 0, c.repeats, c.more[0],
                                                 c.a_repeat, c.to_repeat))
    ENTRY("copy_gm_to_ubuf", copy_gm_to_ubuf(p.ub + c.to, p.in + c.a, 0, c.repeats, c.more[0],
                                             c.a_repeat, c.to_repeat))
    ENTRY("copy_ubuf_to_gm", set_atomic(c);
          copy_ubuf_to_gm(p.other + c.to, p.ub + c.a, 0, c.repeats, c.more[0], c.a_repeat,
                          c.to_repeat))
    PADDED(b8) PADDED(b16) PADDED(b32)
    ENTRY("get_cmpmask", set_cmpmask(p.ub + c.a); get_cmpmask(p.ub + c.to))
    // clang-format on
};

void run(const Call& call, const Place& place) {
  for (const Entry& entry : kEntries)
    if (std::strcmp(entry.name, call.name) == 0) return entry.run(call, place);
  npu_ops::twin::not_emulated(call.name);
}

}  // namespace npu_ops

// in, out: the image before and after; other: a tensor that copies write to; left: Left.
extern "C" __global__ __aicore__ void instructions(GM_ADDR in, GM_ADDR out, GM_ADDR other,
                                                   GM_ADDR left, npu_ops::Call call) {
  using namespace npu_ops;
  auto* ub = reinterpret_cast<char*>(AscendC::ConstDefiner::Instance().cpuUB);
  copy_gm_to_ubuf(ub, in, 0, 1, kBytes / 32, 0, 0);
  pipe_barrier(PIPE_ALL);
  call.counts ? set_mask_count() : set_mask_norm();
  set_vector_mask(call.high, call.low);
  run(call, {ub, reinterpret_cast<char*>(in), reinterpret_cast<char*>(other)});
  pipe_barrier(PIPE_ALL);
  set_atomic_none();
  copy_ubuf_to_gm(out, ub, 0, 1, kBytes / 32, 0, 0);
  const auto& registers = npu_ops::twin::registers();
  const Left values{{registers.compare[0], registers.compare[1]},
                    static_cast<uint64_t>(get_acc_val()),
                    static_cast<uint64_t>(get_rsvd_cnt())};
  std::memcpy(left, &values, sizeof(values));
}

// Returns the names of all entries, one per line.
extern "C" __attribute__((visibility("default"))) const char* instruction_names() {
  static std::string names;
  names.clear();
  for (const npu_ops::Entry& entry : npu_ops::kEntries) names += std::string(entry.name) + "\n";
  return names.c_str();
}
