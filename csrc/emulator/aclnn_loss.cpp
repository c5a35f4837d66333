// Cross entropy of logits and labels, and its gradient. Rejects the calls that the vendor rejects.
// Formulas and constraints: the vendor's documentation of aclnnCrossEntropyLoss and
// aclnnCrossEntropyLossGrad, and torch_npu's of npu_cross_entropy_loss.
#include <ATen/ops/cross_entropy_loss.h>

#include "aclnn.h"

using namespace npu_ops::emulator;

namespace {

constexpr int64_t kMostRows = 200000;

// Unlike in torch, a negative ignore_index, such as the default -100, ignores no label.
struct Options {
  std::string reduction;
  int64_t ignore_index;
  double smoothing;
};

void check_labels(const char* name, const at::Tensor& rows, const at::Tensor& target,
                  const Tensor& weight) {
  need(is_float(rows), name, ": got ", rows.scalar_type(), ", needs float32, float16 or bfloat16");
  need_tiling(rows.dim() == 2 && rows.size(1) > 0 && rows.size(0) > 0 && rows.size(0) <= kMostRows,
              name, ": got ", rows.sizes(), ", needs [N, C] with N of 1 to ", kMostRows);
  need_tiling(target.dim() == 1 && target.size(0) == rows.size(0), "target: got ", target.sizes(),
              ", needs [", rows.size(0), "]");
  if (!weight) return;
  need(weight->scalar_type() == at::kFloat, "weight: got ", weight->scalar_type(),
       ", needs float32");
  need_tiling(weight->dim() == 1 && weight->size(0) == rows.size(1), "weight: got ",
              weight->sizes(), ", needs [", rows.size(1), "]");
}

void check_options(const Options& it, int64_t classes) {
  need_tiling(it.reduction == "mean" || it.reduction == "sum" || it.reduction == "none",
              "reduction: got '", it.reduction, "', needs 'mean', 'sum' or 'none'");
  need_tiling(it.smoothing >= 0 && it.smoothing <= 1, "label_smoothing: got ", it.smoothing,
              ", needs 0 to 1");
  need_tiling(it.ignore_index < classes, "ignore_index: got ", it.ignore_index,
              ", needs less than ", classes);
}

void check_loss(const at::Tensor& input, const at::Tensor& target, const Tensor& weight,
                const Options& options, double zloss_scale, bool return_zloss) {
  check_labels("input", input, target, weight);
  need(target.scalar_type() == at::kInt || target.scalar_type() == at::kLong, "target: got ",
       target.scalar_type(), ", needs int32 or int64");
  check_options(options, input.size(1));
  need(zloss_scale == 0 && !return_zloss,
       "lse_square_scale_for_zloss, return_zloss: got some, which the vendor ignores and leaves "
       "without a result");
}

void check_loss_grad(const at::Tensor& grad, const at::Tensor& log_prob, const at::Tensor& target,
                     const Tensor& weight, bool zloss, const Options& options) {
  check_labels("log_prob", log_prob, target, weight);
  need(target.scalar_type() == at::kLong, "target: got ", target.scalar_type(), ", needs int64");
  need(grad.scalar_type() == log_prob.scalar_type(), "grad_loss: got ", grad.scalar_type(),
       ", needs log_prob's ", log_prob.scalar_type());
  check_options(options, log_prob.size(1));
  const bool each = options.reduction == "none";
  need_tiling(grad.numel() == (each ? log_prob.size(0) : 1), "grad_loss: got ", grad.sizes(),
              " for reduction '", options.reduction, "' of ", log_prob.size(0), " rows");
  need_tiling(options.smoothing == 0, "label_smoothing: got ", options.smoothing,
              ", the gradient takes 0 alone");
  need(!zloss, "grad_zloss, lse_for_zloss: got some, which the vendor ignores");
}

// Returns whether an optional tensor has elements. torch_npu passes empty tensors for results that
// were not asked for.
bool any(const Tensor& optional) { return optional && optional->numel() > 0; }

// Returns which rows have a label that is not ignored. Rejects labels that are no class: a device
// would use them as addresses.
at::Tensor counted(const at::Tensor& target, int64_t classes, int64_t ignore_index) {
  at::Tensor wanted = target != ignore_index;
  if (ignore_index < 0) wanted.fill_(true);
  const at::Tensor outside = (target < 0).logical_or(target >= classes).logical_and(wanted);
  need(!outside.any().item<bool>(), "target: got a label outside [0, ", classes,
       "), which reads other memory; an ignore_index below 0 ignores no label");
  return wanted;
}

void loss(const at::Tensor& input, const at::Tensor& target, const Tensor& weight,
          const Options& it, const at::Tensor& out, const at::Tensor& log_prob) {
  const at::Tensor labels = target.to(at::kLong), logits = to_float(input);
  counted(labels, input.size(1), it.ignore_index);
  const auto reduction = it.reduction == "none"   ? at::Reduction::None
                         : it.reduction == "mean" ? at::Reduction::Mean
                                                  : at::Reduction::Sum;
  const auto weights = weight ? std::optional<at::Tensor>(*weight) : std::nullopt;
  const at::Tensor value =
      at::cross_entropy_loss(logits, labels, weights, reduction, it.ignore_index, it.smoothing);
  out.copy_(value.reshape(out.sizes()));
  log_prob.copy_(logits.log_softmax(-1));
}

void loss_grad(const at::Tensor& grad, const at::Tensor& log_prob, const at::Tensor& target,
               const Tensor& weight, const Options& it, const at::Tensor& out) {
  const at::Tensor wanted = counted(target, log_prob.size(1), it.ignore_index);
  const at::Tensor labels = target.clamp_min(0);
  at::Tensor each = to_float(wanted);
  if (weight) each = each * weight->index_select(0, labels);
  at::Tensor rows = to_float(grad).reshape({-1}) * each;
  if (it.reduction == "mean") rows = rows / each.sum();
  const at::Tensor column = rows.unsqueeze(-1);
  const at::Tensor found = to_float(log_prob).exp() * column;
  out.copy_(found.scatter_add(1, labels.unsqueeze(-1), -column));
}

}  // namespace

ACLNN_KEEP(CrossEntropyLoss,
           (Tensor input, Tensor target, Tensor weight, const char* reduction, int64_t ignore_index,
            double smoothing, double zloss_scale, bool return_zloss, Tensor out, Tensor log_prob,
            Tensor zloss, Tensor lse_for_zloss),
           (=, options = Options{reduction, ignore_index, smoothing}),
           check_loss(input, target, weight, {reduction, ignore_index, smoothing}, zloss_scale,
                      return_zloss),
           loss(input, target, weight, options, out, log_prob))
ACLNN_KEEP(CrossEntropyLossGrad,
           (Tensor grad, Tensor log_prob, Tensor target, Tensor weight, Tensor grad_zloss,
            Tensor lse_for_zloss, const char* reduction, int64_t ignore_index, double smoothing,
            double zloss_scale, Tensor out),
           (=, options = Options{reduction, ignore_index, smoothing}),
           check_loss_grad(grad, log_prob, target, weight,
                           any(grad_zloss) || any(lse_for_zloss) || zloss_scale != 0,
                           {reduction, ignore_index, smoothing}),
           loss_grad(grad, log_prob, target, weight, options, out))
