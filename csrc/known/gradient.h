// The gradient of calls that are alike. Python computes the first, and says what others go by.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "known/alike.h"
#include "known/recipe.h"

namespace npu_ops::known {

namespace py = pybind11;
using torch::autograd::variable_list;

inline py::object wrapped(const at::Tensor& x) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(x));
}

inline at::Tensor unwrapped(py::handle x) {
  return x.is_none() ? at::Tensor() : THPVariable_Unpack(x.ptr());
}

inline std::vector<at::Tensor> unwrapped_all(const py::sequence& objects) {
  std::vector<at::Tensor> tensors;
  for (const py::handle x : objects) tensors.push_back(unwrapped(x));
  return tensors;
}

inline py::tuple wrapped(const std::vector<at::Tensor>& tensors) {
  py::tuple all(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) all[i] = wrapped(tensors[i]);
  return all;
}

// How to compute gradients from values like these: those of the outputs, then what was saved.
struct Backward {
  std::vector<bool> needs;  // for each tensor that was given
  Alike alike;
  Recipe recipe;
  Results results;
};

// What the calls that are alike share.
class Gradient : public c10::intrusive_ptr_target {
 public:
  // name: the operator's. given: the values that are the operator's tensors. saved: those that are
  // kept for its gradient. in_python: computes gradients from those of the outputs, what was saved,
  // and which are needed; it returns them, and a Backward or None.
  Gradient(std::string name, Results given, Results saved, bool zeros, py::object in_python)
      : name(std::move(name)),
        given(std::move(given)),
        saved(std::move(saved)),
        zeros(zeros),
        in_python_(in_python.release().ptr()) {}

  ~Gradient() override {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire locked;
    Py_DECREF(in_python_);
  }

  variable_list of(const variable_list& grads, const variable_list& saved,
                   const std::vector<bool>& needs) {
    Values values = grads;
    values.insert(values.end(), saved.begin(), saved.end());
    const auto known = at::GradMode::is_enabled() ? nullptr : find(values, needs);
    if (!known) return by_python(grads, saved, needs);
    known->recipe.run(values);
    return at_places(values, known->results);
  }

  const std::string name;
  const Results given, saved;
  const bool zeros;  // in place of the gradient of an output that nobody used

 private:
  static constexpr size_t kMost = 8;

  std::shared_ptr<const Backward> find(const Values& values, const std::vector<bool>& needs) {
    std::lock_guard locked(mutex_);
    for (const auto& known : known_)
      if (known->needs == needs && known->alike(values)) return known;
    return nullptr;
  }

  variable_list by_python(const variable_list& grads, const variable_list& saved,
                          const std::vector<bool>& needs) {
    py::gil_scoped_acquire locked;
    const auto call = py::reinterpret_borrow<py::object>(in_python_);
    const py::tuple answer = call(wrapped(grads), wrapped(saved), needs);
    if (!answer[1].is_none()) keep(answer[1].cast<std::shared_ptr<Backward>>());
    return unwrapped_all(answer[0]);
  }

  void keep(std::shared_ptr<Backward> learned) {
    std::lock_guard locked(mutex_);
    if (known_.size() == kMost) known_.clear();
    known_.push_back(std::move(learned));
  }

  PyObject* in_python_;
  std::mutex mutex_;  // the engine has threads of its own
  std::vector<std::shared_ptr<const Backward>> known_;
};

inline variable_list gradients(Gradient& gradient, const torch::autograd::AutogradContext& ctx,
                               const variable_list& grads) {
  std::vector<bool> needs(gradient.given.size());
  for (size_t i = 0; i < needs.size(); ++i) needs[i] = ctx.needs_input_grad(i);
  return gradient.of(grads, ctx.get_saved_variables(), needs);
}

// As compiled autograd calls it.
struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    return gradients(*reinterpret_cast<Gradient*>(ctx->saved_data[kGradient].toInt()), *ctx, grads);
  }

  static constexpr const char* kGradient = "gradient";
};

// `torch::autograd::CppNode` but for what it does for any function each time.
class Node : public torch::autograd::CppNode<Recorded> {
 public:
  Node(c10::intrusive_ptr<Gradient> gradient, const Values& values)
      : gradient_(std::move(gradient)) {
    const variable_list given = at_places(values, gradient_->given);
    set_next_edges(torch::autograd::collect_next_edges(given));
    is_variable_input_.assign(given.size(), true);
    ctx_.set_materialize_grads(gradient_->zeros);
  }

  // What the operator returned, and all that there was by then.
  void returned(const variable_list& outputs, const Values& values) {
    for (const at::Tensor& output : outputs) {
      torch::autograd::set_history(output, getptr());
      if (gradient_->zeros) output_info_.emplace_back(output);
    }
    ctx_.save_for_backward(at_places(values, gradient_->saved));
    save_variables_to_ctx();
  }

  std::string name() const override { return gradient_->name; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    auto& data = const_cast<Node*>(this)->ctx_.saved_data;  // asked for here first
    data[Recorded::kGradient] = reinterpret_cast<int64_t>(gradient_.get());
    CppNode::compiled_args(args);
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    std::lock_guard locked(mutex_);
    at::OptionalDeviceGuard guard;
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined() && gradient_->zeros) grads[i] = output_info_[i].zeros(guard);
    return gradients(*gradient_, ctx_, grads);
  }

 private:
  c10::intrusive_ptr<Gradient> gradient_;
};

}  // namespace npu_ops::known
