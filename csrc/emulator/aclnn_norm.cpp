// Norms and activations: RmsNorm and its fusions, SwiGlu.
#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

void check_rms_norm(const at::Tensor& x, const at::Tensor& gamma) {
  need(is_float(x), "x: got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
  need(gamma.scalar_type() == x.scalar_type() || gamma.scalar_type() == at::kFloat, "gamma: got ",
       gamma.scalar_type(), ", needs x's ", x.scalar_type(), " or float32");
  need(gamma.dim() >= 1 && gamma.dim() <= x.dim() &&
           gamma.sizes() == x.sizes().slice(x.dim() - gamma.dim()),
       "gamma: got ", gamma.sizes(), ", needs the last dimensions of x ", x.sizes());
}

void check_add(const at::Tensor& x1, const at::Tensor& x2, const at::Tensor& gamma) {
  check_rms_norm(x1, gamma);
  need(x2.sizes() == x1.sizes() && x2.scalar_type() == x1.scalar_type(), "x2: got ",
       x2.scalar_type(), x2.sizes(), ", needs x1's ", x1.scalar_type(), x1.sizes());
}

std::vector<int64_t> last_dims(const at::Tensor& gamma) {
  std::vector<int64_t> dims;
  for (int64_t d = 1; d <= gamma.dim(); ++d) dims.push_back(-d);
  return dims;
}

// Returns y and rstd of x, all in fp32. `shift` is 1 for Gemma, which multiplies by 1 + gamma.
std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& gamma,
                                           double epsilon, double shift = 0) {
  const at::Tensor in = to_float(x);
  const at::Tensor rstd = in.square().mean(last_dims(gamma), true).add(epsilon).rsqrt();
  return {in * rstd * (to_float(gamma) + shift), rstd};
}

void write(std::pair<at::Tensor, at::Tensor> result, const at::Tensor& y, const at::Tensor& rstd) {
  y.copy_(result.first);
  rstd.copy_(result.second.reshape(rstd.sizes()));
}

void rms_norm_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd_in,
                   const at::Tensor& gamma, const at::Tensor& dx, const at::Tensor& dgamma) {
  const auto dims = last_dims(gamma);
  const at::Tensor in = to_float(x), grad = to_float(dy);
  std::vector<int64_t> keep(in.sizes().begin(), in.sizes().end());
  std::fill(keep.end() - gamma.dim(), keep.end(), 1);
  const at::Tensor rstd = rstd_in.reshape(keep);
  const at::Tensor normal = in * rstd, scaled = grad * to_float(gamma);
  dx.copy_((scaled - normal * (scaled * normal).mean(dims, true)) * rstd);
  dgamma.copy_((grad * normal).sum_to_size(gamma.sizes()).reshape(dgamma.sizes()));
}

void check_swiglu(const at::Tensor& x, int64_t dim) {
  need(is_float(x), "x: got ", x.scalar_type(), ", needs float32, float16 or bfloat16");
  need(dim >= -x.dim() && dim < x.dim(), "dim: got ", dim, " for ", x.dim(), " dimensions");
  need(x.size(dim) % 2 == 0, "x: dimension ", dim, " is ", x.size(dim), ", needs an even size");
}

at::Tensor swiglu(const at::Tensor& x, int64_t dim) {
  const auto halves = to_float(x).chunk(2, dim);
  return halves[0] * halves[0].sigmoid() * halves[1];
}

void swiglu_grad(const at::Tensor& dy, const at::Tensor& x, int64_t dim, const at::Tensor& dx) {
  const auto halves = to_float(x).chunk(2, dim);
  const at::Tensor grad = to_float(dy), gate = halves[0].sigmoid(), silu = halves[0] * gate;
  const auto out = dx.chunk(2, dim);
  out[0].copy_(grad * halves[1] * (gate + silu * (1 - gate)));
  out[1].copy_(grad * silu);
}

}  // namespace

ACLNN(RmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd),
      check_rms_norm(x, gamma), write(rms_norm(x, gamma, epsilon), y, rstd))
ACLNN(GemmaRmsNorm, (Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd),
      check_rms_norm(x, gamma), write(rms_norm(x, gamma, epsilon, 1), y, rstd))
ACLNN(RmsNormGrad, (Tensor dy, Tensor x, Tensor rstd, Tensor gamma, Tensor dx, Tensor dgamma),
      check_rms_norm(x, gamma), rms_norm_grad(dy, x, rstd, gamma, dx, dgamma))
ACLNN(AddRmsNorm,
      (Tensor x1, Tensor x2, Tensor gamma, double epsilon, Tensor y, Tensor rstd, Tensor x),
      check_add(x1, x2, gamma), {
        const at::Tensor sum = to_float(x1) + to_float(x2);
        x->copy_(sum);
        write(rms_norm(sum, gamma, epsilon), y, rstd);
      })
ACLNN(InplaceAddRmsNorm, (Tensor x1, Tensor x2, Tensor gamma, double epsilon, Tensor rstd),
      check_add(x1, x2, gamma), {
        const at::Tensor sum = to_float(x1) + to_float(x2);
        x2->copy_(sum);
        write(rms_norm(sum, gamma, epsilon), x1, rstd);
      })
ACLNN(AddRmsNormCast,
      (Tensor x1, Tensor x2, Tensor gamma, double epsilon, Tensor y_float, Tensor y, Tensor rstd,
       Tensor x),
      check_add(x1, x2, gamma), {
        const at::Tensor sum = to_float(x1) + to_float(x2);
        x->copy_(sum);
        write(rms_norm(sum, gamma, epsilon), y_float, rstd);
        y->copy_(*y_float);
      })
ACLNN(SwiGlu, (Tensor x, int64_t dim, Tensor out), check_swiglu(x, dim), out->copy_(swiglu(x, dim)))
ACLNN(SwiGluGrad, (Tensor dy, Tensor x, int64_t dim, Tensor dx), check_swiglu(x, dim),
      swiglu_grad(dy, x, dim, dx))
