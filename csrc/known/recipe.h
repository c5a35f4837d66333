// What a plan of npu_ops/core/plans.py does, without Python: makes tensors, calls operators of
// torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace npu_ops::known {

// Inputs, then what each step made. One that is not defined is None.
using Values = std::vector<at::Tensor>;

struct Filled {  // an argument of a call, and the value that it is
  size_t argument, value;
};

class Recipe {
 public:
  explicit Recipe(size_t inputs) : values_(inputs) {}

  // Each adds a step, and returns the place of the value that the step makes.

  size_t empty(std::vector<int64_t> size, std::vector<int64_t> stride, at::ScalarType dtype,
               at::Device device) {
    return add([=, options = at::dtype(dtype).device(device)](Values& values) {
      values.push_back(at::empty_strided(size, stride, options));
    });
  }

  size_t view(size_t of, std::vector<int64_t> size, std::vector<int64_t> stride) {
    return add([=](Values& values) { values.push_back(values[of].as_strided(size, stride)); });
  }

  size_t call(const c10::OperatorHandle& op, std::vector<c10::IValue> constants,
              std::vector<Filled> filled) {
    const size_t first = values_;
    values_ += op.schema().returns().size();
    steps_.push_back([=](Values& values) {
      std::vector<c10::IValue> stack = constants;
      for (const auto [argument, value] : filled)
        if (values[value].defined()) stack[argument] = values[value];
      op.callBoxed(stack);
      for (c10::IValue& result : stack) values.push_back(std::move(result).toTensor());
    });
    return first;
  }

  // Autograd sees nothing of it.
  void run(Values& values) const {
    at::AutoDispatchBelowADInplaceOrView below;
    values.reserve(values_);
    for (const auto& step : steps_) step(values);
  }

 private:
  size_t add(std::function<void(Values&)> step) {
    steps_.push_back(std::move(step));
    return values_++;
  }

  size_t values_;
  std::vector<std::function<void(Values&)>> steps_;
};

// Which of the values; none is None.
using Results = std::vector<std::optional<size_t>>;

inline std::vector<at::Tensor> at_places(const Values& values, const Results& places) {
  std::vector<at::Tensor> found;
  found.reserve(places.size());
  for (const auto& place : places) found.push_back(place ? values[*place] : at::Tensor());
  return found;
}

}  // namespace npu_ops::known
