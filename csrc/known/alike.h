// Whether tensors, and what else torch goes by, are like those of a call before.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <vector>

namespace npu_ops::known {

// Of a tensor all but its contents and where it lies; of None, that it is None.
class Like {
 public:
  explicit Like(const at::Tensor& x) : defined_(x.defined()) {
    if (!defined_) return;
    keys_ = x.key_set();
    dtype_ = x.scalar_type();
    device_ = x.device();
    sizes_ = x.sizes().vec();
    strides_ = x.strides().vec();
    wants_gradient_ = x.requires_grad();
  }

  bool operator()(const at::Tensor& x) const {
    if (!x.defined() || !defined_) return x.defined() == defined_;
    // The keys first: only a tensor of the same kind is sure to have strides.
    return x.key_set() == keys_ && x.scalar_type() == dtype_ && x.device() == device_ &&
           x.sizes() == sizes_ && x.strides() == strides_ && x.requires_grad() == wants_gradient_ &&
           !x._fw_grad(/*level=*/0).defined();
  }

 private:
  bool defined_, wants_gradient_ = false;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  std::vector<int64_t> sizes_, strides_;
};

// Counts what implementations are chosen by, as npu_ops/core/plans.py does.
inline std::atomic<int64_t> epoch{0};

// Modes, transforms, autocast: what torch dispatches by besides tensors.
class Around {
 public:
  Around() : keys_(c10::impl::tls_local_dispatch_key_set()), grad_(at::GradMode::is_enabled()) {}

  bool operator()() const {
    const auto now = c10::impl::tls_local_dispatch_key_set();
    return now.included_ == keys_.included_ && now.excluded_ == keys_.excluded_ &&
           at::GradMode::is_enabled() == grad_ && c10::InferenceMode::is_enabled() == inference_ &&
           epoch == epoch_ && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  }

 private:
  c10::impl::LocalDispatchKeySet keys_;
  bool grad_, inference_ = c10::InferenceMode::is_enabled();
  int64_t epoch_ = epoch;
};

class Alike {
 public:
  explicit Alike(const std::vector<at::Tensor>& tensors)
      : tensors_(tensors.begin(), tensors.end()) {}

  bool operator()(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() != tensors_.size() || !around_()) return false;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!tensors_[i](tensors[i])) return false;
    return true;
  }

 private:
  Around around_;
  std::vector<Like> tensors_;
};

}  // namespace npu_ops::known
