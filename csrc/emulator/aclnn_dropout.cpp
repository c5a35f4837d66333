// Dropout masks of one bit per element (1: kept), and their application. The bits differ from a
// device's, but the same seed and offset always give the same mask.
#include "aclnn_dropout.h"

#include <random>

using namespace npu_ops::emulator;

namespace npu_ops::emulator {

at::Tensor unpack_mask(const at::Tensor& mask, int64_t count) {
  const at::Tensor bits = mask.flatten().to(at::kByte).unsqueeze(-1);
  at::Tensor shifts = bits.new_zeros({8});
  for (int64_t bit = 0; bit < 8; ++bit) shifts.select(0, bit).fill_(int64_t{1} << bit);
  return bits.bitwise_and(shifts).ne(0).flatten().narrow(0, 0, count);
}

}  // namespace npu_ops::emulator

namespace {

void check_probability(double p) { need(p >= 0 && p <= 1, "p: got ", p, ", needs 0 to 1"); }

void generate(double p, uint64_t seed, uint64_t offset, const at::Tensor& mask) {
  std::mt19937_64 draw(seed * 0x9E3779B97F4A7C15u + offset);
  std::bernoulli_distribution keep(1 - p);
  auto* bytes = static_cast<uint8_t*>(mask.mutable_data_ptr());
  for (int64_t i = 0; i < mask.numel(); ++i) {
    uint8_t byte = 0;
    for (int bit = 0; bit < 8; ++bit) byte |= static_cast<uint8_t>(keep(draw) << bit);
    bytes[i] = byte;
  }
}

void check_do_mask(const at::Tensor& x, const at::Tensor& mask, double p) {
  need(is_float(x), "x: got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
  need(mask.scalar_type() == at::kByte, "mask: got ", mask.scalar_type(), ", needs uint8");
  need(mask.numel() >= (x.numel() + 127) / 128 * 16, "mask: got ", mask.numel(),
       " bytes, needs one bit an element rounded up to 128 elements");
  check_probability(p);
}

void do_mask(const at::Tensor& x, const at::Tensor& mask, double p, const at::Tensor& out) {
  const at::Tensor kept = unpack_mask(mask, x.numel()).view(x.sizes());
  out.copy_(p == 1 ? x.mul(0) : to_float(x).mul(kept).div(1 - p));
}

}  // namespace

ACLNN(DropoutGenMask, (Ints, double p, int64_t seed, int64_t offset, Tensor mask),
      check_probability(p), generate(p, seed, offset, mask))
ACLNN(DropoutGenMaskV2, (Ints, double p, int64_t seed, int64_t offset, aclDataType, Tensor mask),
      check_probability(p), generate(p, seed, offset, mask))
ACLNN(DropoutGenMaskV2Tensor,
      (Ints, double p, Tensor seed, Tensor offset, int64_t within, aclDataType, Tensor mask),
      check_probability(p),
      generate(p, seed->item<int64_t>(), offset->item<int64_t>() + within, mask))
ACLNN(DropoutDoMask, (Tensor x, Tensor mask, double p, Tensor out), check_do_mask(x, mask, p),
      do_mask(x, mask, p, out))
