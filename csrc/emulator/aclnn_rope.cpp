// Rotary embeddings. Constraints: torch_npu's documentation of npu_rotary_mul,
// npu_apply_rotary_pos_emb, npu_interleave_rope and npu_mrope.
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

enum Mode : int64_t { kHalf = 0, kInterleave = 1, kQuarter = 2 };

bool is_950() { return settings().soc.rfind("Ascend950", 0) == 0; }

at::Tensor rotate_half(const at::Tensor& x) {
  const auto halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}

// Maps each pair (x1, x2) to (-x2, x1). The mode tells which two elements are a pair.
at::Tensor rotate(const at::Tensor& x, int64_t mode) {
  if (mode == kHalf) return rotate_half(x);
  if (mode == kQuarter) {
    const auto halves = x.chunk(2, -1);
    return at::cat({rotate_half(halves[0]), rotate_half(halves[1])}, -1);
  }
  const at::Tensor pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  const at::Tensor in = to_float(x);
  return in * to_float(cos) + rotate(in, mode) * to_float(sin);
}

void check_broadcast(const char* name, const at::Tensor& x, const at::Tensor& table) {
  need(table.dim() == x.dim(), name, ": got ", table.dim(), " dimensions, needs ", x.dim(),
       " as x has");
  for (int64_t d = 0; d < x.dim(); ++d)
    need(table.size(d) == x.size(d) || (table.size(d) == 1 && d < x.dim() - 1), name, ": got ",
         table.sizes(), ", which does not broadcast to x ", x.sizes());
}

void check_rotary_mul(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t mode) {
  need(is_float(x), "x: got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
  need(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
       "cos and sin: got ", cos.scalar_type(), " and ", sin.scalar_type(), ", need x's ",
       x.scalar_type());
  need(x.dim() == 3 || x.dim() == 4, "x: got ", x.dim(), " dimensions, needs 3 (TND) or 4");
  check_broadcast("cos", x, cos);
  need(sin.sizes() == cos.sizes(), "sin: got ", sin.sizes(), ", needs cos's ", cos.sizes());
  const int64_t d = x.size(-1);
  need(is_950() || mode == kHalf || mode == kInterleave, "mode: only half and interleave exist on ",
       settings().soc);
  need_tiling(d % 2 == 0, "x: head dimension ", d, " is odd");
  if (is_950()) return;
  need_tiling(d < 896, "x: head dimension ", d, ", needs less than 896");
  if (mode == kInterleave && x.dim() == 4)
    need_tiling(std::count(cos.sizes().begin(), cos.sizes().end() - 1, 1) >= 2 || x.size(0) == 1 ||
                    x.size(1) == 1 || x.size(2) == 1,
                "cos: got ", cos.sizes(),
                "; in interleave mode the batch and head dimensions of cos must be 1");
}

// Returns the gradient of a broadcast table: the sum over the broadcast dimensions.
at::Tensor sum_like(const at::Tensor& full, const at::Tensor& like) {
  return full.sum_to_size(like.sizes());
}

void rotary_mul_grad(const at::Tensor& dy, const at::Tensor& cos, const at::Tensor& sin, Tensor x,
                     int64_t mode, const at::Tensor& dx, const at::Tensor& dcos,
                     const at::Tensor& dsin) {
  const at::Tensor grad = to_float(dy);
  // The rotation is antisymmetric: its transpose is its negative.
  dx.copy_(grad * to_float(cos) - rotate(grad * to_float(sin), mode));
  if (!x) return;
  const at::Tensor in = to_float(x);
  dcos.copy_(sum_like(grad * in, dcos));
  dsin.copy_(sum_like(grad * rotate(in, mode), dsin));
}

// Layouts of npu_apply_rotary_pos_emb, which works in place.
enum Layout : int64_t { kBsnd = 1, kSbnd = 2, kBnsd = 3, kTnd = 4 };

void check_apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                 const at::Tensor& sin, int64_t layout, const std::string& mode) {
  need(is_float(q), "query: got ", q.scalar_type(), ", needs float32, float16 or bfloat16");
  for (const at::Tensor& other : {k, cos, sin})
    need(other.scalar_type() == q.scalar_type(),
         "query, key, cos and sin must have one dtype; got ", q.scalar_type(), " and ",
         other.scalar_type());
  const int64_t rank = layout == kTnd ? 3 : 4;
  for (const at::Tensor& tensor : {q, k, cos, sin})
    need(tensor.dim() == rank, "got ", tensor.dim(), " dimensions, needs ", rank,
         " in this layout");
  const int64_t d = q.size(-1);
  need(k.size(-1) == d, "key: head dimension ", k.size(-1), ", needs query's ", d);
  need(cos.sizes() == sin.sizes(), "cos is ", cos.sizes(), ", sin is ", sin.sizes());
  if (is_950()) {
    need_tiling(d <= 1024, "query: head dimension ", d, ", needs at most 1024");
    return;
  }
  const std::string& soc = settings().soc;
  need(layout == kBsnd || layout == kTnd, "layout: only BSND and TND exist on ", soc);
  need(mode == "half", "rotary_mode: got ", mode, ", only half exists on ", soc);
  need_tiling(d == 64 || d == 128, "query: head dimension ", d, ", needs 64 or 128 on ", soc);
  need_tiling(cos.size(-1) == d, "cos: last dimension ", cos.size(-1), ", needs ", d);
  need_tiling(cos.size(-2) == 1, "cos: its head dimension is ", cos.size(-2), ", needs 1");
  for (int64_t i = 0; i + 2 < rank; ++i)
    need_tiling(cos.size(i) == q.size(i) && k.size(i) == q.size(i), "query ", q.sizes(), ", key ",
                k.sizes(), " and cos ", cos.sizes(), " must agree before the head dimension");
  need_tiling(q.numel() > 0 && k.numel() > 0, "an empty tensor is not supported on ", soc);
}

void apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
           const std::string& mode) {
  const int64_t kind = mode == "interleave" ? kInterleave : mode == "quarter" ? kQuarter : kHalf;
  for (const at::Tensor& x : {q, k}) {
    const at::Tensor part = x.narrow(-1, 0, cos.size(-1));
    part.copy_(rope(part, cos, sin, kind));
  }
}

void check_interleave_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  need(is_half(x), "x: got ", x.scalar_type(), ", needs float16 or bfloat16");
  need(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
       "cos and sin need x's dtype ", x.scalar_type());
  for (const at::Tensor& tensor : {x, cos, sin}) {
    need(tensor.dim() == 4, "got ", tensor.dim(), " dimensions, needs 4 (BNSD)");
    need(tensor.is_contiguous(), "a tensor is not contiguous");
    need_tiling(tensor.size(3) == 64, "head dimension ", tensor.size(3), ", needs 64");
  }
  need_tiling(cos.size(1) == 1, "cos: its head dimension is ", cos.size(1), ", needs 1");
  need_tiling(cos.size(2) == 1 || cos.size(2) == x.size(2), "cos: length ", cos.size(2),
              ", needs 1 or x's ", x.size(2));
}

// Pairs are read interleaved and written as halves, as DeepSeek's kernel does.
at::Tensor interleave_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor halves = x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
  return rope(halves, cos, sin, kHalf);
}

void check_mrope(const at::Tensor& positions, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& cache, Ints sections, int64_t head, int64_t cache_mode) {
  need(is_float(q), "query: got ", q.scalar_type(), ", needs float32, float16 or bfloat16");
  need(k.scalar_type() == q.scalar_type() && cache.scalar_type() == q.scalar_type(),
       "key and cos_sin_cache need query's dtype ", q.scalar_type());
  need(positions.scalar_type() == at::kInt || positions.scalar_type() == at::kLong,
       "positions: got ", positions.scalar_type(), ", needs int32 or int64");
  need(q.dim() == 2 && k.dim() == 2 && cache.dim() == 2,
       "query, key and cos_sin_cache need 2 dimensions");
  const int64_t rotary = cache.size(1), multiple = is_half(q) ? 32 : 16;
  need_tiling(rotary <= head, "cos_sin_cache: rotary_dim ", rotary, " exceeds head_size ", head);
  need_tiling(head % multiple == 0, "head_size: got ", head, ", needs a multiple of ", multiple);
  need_tiling(rotary % multiple == 0, "cos_sin_cache: rotary_dim ", rotary,
              ", needs a multiple of ", multiple);
  need(q.size(1) % head == 0 && k.size(1) % head == 0, "query ", q.sizes(), " and key ", k.sizes(),
       " are not whole heads of ", head);
  const bool plain = std::all_of(sections->begin(), sections->end(), [](auto s) { return s == 0; });
  if (plain) {
    need(positions.dim() == 1, "positions: got ", positions.sizes(), ", needs 1 dimension (RoPE)");
    need(cache_mode == 0, "cache_mode: only default exists for RoPE");
    return;
  }
  const std::vector<std::vector<int64_t>> known = {
      {16, 24, 24}, {24, 20, 20}, {8, 12, 12}, {16, 16, 16, 16}};
  need_tiling(std::find(known.begin(), known.end(), *sections) != known.end(),
              "mrope_section: got ", at::IntArrayRef(*sections),
              ", needs [16, 24, 24], [24, 20, 20], [8, 12, 12] or [16, 16, 16, 16]");
  need(cache_mode == 0 || sections->size() == 3,
       "cache_mode: only default exists for four sections");
  need(positions.dim() == 2 && positions.size(0) == static_cast<int64_t>(sections->size()),
       "positions: got ", positions.sizes(), ", needs one row per section");
  int64_t sum = 0;
  for (int64_t section : *sections) sum += section;
  need_tiling(2 * sum == rotary, "mrope_section: its sum is ", sum,
              ", needs rotary_dim / 2 = ", rotary / 2);
}

// Returns one row of cos (or sin) per token; each frequency comes from its own axis.
at::Tensor mrope_table(const at::Tensor& rows, Ints sections, int64_t cache_mode) {
  if (rows.dim() == 2) return rows;  // plain RoPE: [tokens, frequencies]
  if (cache_mode == 1) {
    at::Tensor out = rows.select(0, 0).clone();
    for (int64_t axis = 1; axis < 3; ++axis)
      out.slice(1, axis, 3 * (*sections)[axis], 3)
          .copy_(rows.select(0, axis).slice(1, axis, 3 * (*sections)[axis], 3));
    return out;
  }
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (size_t axis = 0; axis < sections->size(); ++axis) {
    parts.push_back(rows.select(0, static_cast<int64_t>(axis)).narrow(1, begin, (*sections)[axis]));
    begin += (*sections)[axis];
  }
  return at::cat(parts, 1);
}

void mrope(const at::Tensor& positions, const at::Tensor& q, const at::Tensor& k,
           const at::Tensor& cache, Ints sections, int64_t head, bool neox, int64_t cache_mode,
           const at::Tensor& q_out, const at::Tensor& k_out) {
  need(positions.numel() == 0 || positions.max().item<int64_t>() < cache.size(0),
       "positions: a position is not below the cache's length ", cache.size(0));
  const at::Tensor rows = to_float(cache).index({positions.to(at::kLong)});
  const auto halves = rows.chunk(2, -1);
  at::Tensor cos = mrope_table(halves[0], sections, cache_mode);
  at::Tensor sin = mrope_table(halves[1], sections, cache_mode);
  cos = neox ? at::cat({cos, cos}, -1) : cos.repeat_interleave(2, -1);
  sin = neox ? at::cat({sin, sin}, -1) : sin.repeat_interleave(2, -1);
  for (const auto& [in, out] : {std::pair{q, q_out}, std::pair{k, k_out}}) {
    const at::Tensor heads = in.unflatten(1, {-1, head}), result = heads.clone();
    const at::Tensor part = heads.narrow(-1, 0, cache.size(1));
    result.narrow(-1, 0, cache.size(1))
        .copy_(rope(part, cos.unsqueeze(1), sin.unsqueeze(1), neox ? kHalf : kInterleave));
    out.copy_(result.flatten(1));
  }
}

}  // namespace

ACLNN(RotaryPositionEmbedding, (Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor out),
      check_rotary_mul(x, cos, sin, mode), out->copy_(rope(x, cos, sin, mode)))
ACLNN(RotaryPositionEmbeddingV2,
      (Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor rotation, Tensor out),
      check_rotary_mul(x, cos, sin, mode), {
        if (!rotation) return void(out->copy_(rope(x, cos, sin, mode)));
        const at::Tensor in = to_float(x);
        out->copy_(in * to_float(cos) + in.matmul(to_float(rotation)) * to_float(sin));
      })
ACLNN(RotaryPositionEmbeddingGrad,
      (Tensor dy, Tensor cos, Tensor sin, Tensor x, int64_t mode, Tensor dx, Tensor dcos,
       Tensor dsin),
      check_rotary_mul(dy, cos, sin, mode), rotary_mul_grad(dy, cos, sin, x, mode, dx, dcos, dsin))
ACLNN(ApplyRotaryPosEmb, (Tensor q, Tensor k, Tensor cos, Tensor sin, int64_t layout),
      check_apply(q, k, cos, sin, layout, "half"), apply(q, k, cos, sin, "half"))
ACLNN_KEEP(ApplyRotaryPosEmbV2,
           (Tensor q, Tensor k, Tensor cos, Tensor sin, int64_t layout, const char* mode),
           (=, mode = std::string(mode)), check_apply(q, k, cos, sin, layout, mode),
           apply(q, k, cos, sin, mode))
ACLNN(InterleaveRope, (Tensor x, Tensor cos, Tensor sin, Tensor out),
      check_interleave_rope(x, cos, sin), out->copy_(interleave_rope(x, cos, sin)))
ACLNN(RopeWithSinCosCache,
      (Tensor positions, Tensor q, Tensor k, Tensor cache, Ints sections, int64_t head, bool neox,
       Tensor q_out, Tensor k_out),
      check_mrope(positions, q, k, cache, sections, head, 0),
      mrope(positions, q, k, cache, sections, head, neox, 0, q_out, k_out))
ACLNN(RopeWithSinCosCacheV2,
      (Tensor positions, Tensor q, Tensor k, Tensor cache, Ints sections, int64_t head, bool neox,
       int64_t cache_mode, Tensor q_out, Tensor k_out),
      check_mrope(positions, q, k, cache, sections, head, cache_mode),
      mrope(positions, q, k, cache, sections, head, neox, cache_mode, q_out, k_out))
