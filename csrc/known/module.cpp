// npu_ops._known: calls like one before, without Python. npu_ops/core/recipes.py tells it which.
//
// The only part that is built for one torch and one Python: gradients in C++ have no stable
// interface. Without it the same is done in Python, and takes longer.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <map>
#include <string>

#include "known/gradient.h"

namespace npu_ops::known {
namespace {

// Like `Recipe::call`; of the arguments, those in `filled` are values.
size_t call(Recipe& recipe, const std::string& name, const std::string& overload,
            const py::sequence& arguments, const std::map<size_t, size_t>& filled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  std::vector<c10::IValue> constants;
  for (size_t i = 0; i < arguments.size(); ++i)
    constants.push_back(
        filled.count(i) ? c10::IValue()
                        : torch::jit::toIValue(arguments[i], op.schema().arguments()[i].type()));
  std::vector<Filled> values;
  for (const auto& [argument, value] : filled) values.push_back({argument, value});
  return recipe.call(op, std::move(constants), std::move(values));
}

// A call of a function of tensors, of which each may be None.
class Call {
 public:
  Call(const py::tuple& tensors, Recipe recipe, Results results,
       c10::intrusive_ptr<Gradient> gradient)
      : alike_(unwrapped_all(tensors)),
        recipe_(std::move(recipe)),
        results_(std::move(results)),
        gradient_(std::move(gradient)) {
    for (const py::handle x : tensors) types_.push_back(Py_TYPE(x.ptr()));
  }

  // What the function returns, if the call is like this one; else a null handle.
  py::object operator()(const py::tuple& tensors) const {
    if (tensors.size() != types_.size()) return {};
    Values values;
    values.reserve(16);
    for (size_t i = 0; i < types_.size(); ++i) {
      PyObject* x = PyTuple_GET_ITEM(tensors.ptr(), i);
      if (Py_TYPE(x) != types_[i]) return {};
      values.push_back(unwrapped(x));
    }
    if (!alike_(values)) return {};
    const variable_list found = gradient_ ? recorded(values) : computed(values);
    return found.size() == 1 ? wrapped(found[0]) : wrapped(found);
  }

 private:
  variable_list computed(Values& values) const {
    py::gil_scoped_release unlocked;
    recipe_.run(values);
    return at_places(values, results_);
  }

  variable_list recorded(Values& values) const {
    py::gil_scoped_release unlocked;
    const auto node = c10::make_intrusive<Node>(gradient_, values);
    node->set_ctx_grad_fn(node);
    {
      at::AutoGradMode unrecorded(false);
      recipe_.run(values);
    }
    const variable_list outputs = at_places(values, results_);
    node->returned(outputs, values);
    return outputs;
  }

  Alike alike_;
  Recipe recipe_;
  Results results_;
  c10::intrusive_ptr<Gradient> gradient_;
  std::vector<PyTypeObject*> types_;  // torch's own two, which are never gone
};

// Whether each is the same object, or equal to it.
bool equal(const py::tuple& some, const py::tuple& others) {
  if (some.size() != others.size()) return false;
  for (size_t i = 0; i < some.size(); ++i) {
    PyObject *x = PyTuple_GET_ITEM(some.ptr(), i), *y = PyTuple_GET_ITEM(others.ptr(), i);
    const int same = x == y ? 1 : PyObject_RichCompareBool(x, y, Py_EQ);
    if (same < 0) PyErr_Clear();  // what cannot be compared is another
    if (same != 1) return false;
  }
  return true;
}

// Calls of one function by its settings: a model makes calls of a few shapes.
class Calls {
 public:
  // in_a_group: implementations are chosen anew once there is one, see npu_ops/core/plans.py.
  explicit Calls(py::object in_a_group) : in_a_group_(std::move(in_a_group)) {}

  void add(const py::tuple& settings, std::shared_ptr<Call> call) {
    if (calls_.size() == kMost) calls_.clear();
    calls_.push_back({settings, in_a_group_().cast<bool>(), std::move(call)});
  }

  // What the function returns, if the call is like one of these; else None.
  py::object operator()(const py::tuple& tensors, const py::tuple& settings) const {
    if (calls_.empty()) return py::none();
    const bool grouped = in_a_group_().is(py::handle(Py_True));
    for (size_t i = 0; i < calls_.size(); ++i) {
      const Known known = calls_[i];  // other threads may clear them meanwhile
      if (known.grouped != grouped || !equal(known.settings, settings)) continue;
      if (py::object found = (*known.call)(tensors)) return found;
    }
    return py::none();
  }

 private:
  struct Known {
    py::tuple settings;
    bool grouped;
    std::shared_ptr<Call> call;
  };

  static constexpr size_t kMost = 16;
  py::object in_a_group_;
  std::vector<Known> calls_;
};

// `calls(tensors, settings)`, without what pybind11 does for any function.
PyObject* call_one(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyTuple_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "known calls: needs a tuple of tensors and one of settings");
    return nullptr;
  }
  const auto& calls = *static_cast<std::shared_ptr<Calls>*>(PyCapsule_GetPointer(self, nullptr));
  return (*calls)(py::reinterpret_borrow<py::tuple>(arguments[0]),
                  py::reinterpret_borrow<py::tuple>(arguments[1]))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

py::object function_of(std::shared_ptr<Calls> calls) {
  static PyMethodDef definition = {"known", reinterpret_cast<PyCFunction>(call_one), METH_FASTCALL,
                                   nullptr};
  const py::capsule self(new std::shared_ptr<Calls>(std::move(calls)),
                         [](void* held) { delete static_cast<std::shared_ptr<Calls>*>(held); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

PYBIND11_MODULE(_known, m) {
  m.def("forget", [] { ++epoch; });
  py::class_<Recipe>(m, "Recipe")
      .def(py::init<size_t>(), py::arg("inputs"))
      .def("empty",
           [](Recipe& recipe, std::vector<int64_t> size, std::vector<int64_t> stride,
              py::object dtype, py::object device) {
             return recipe.empty(std::move(size), std::move(stride),
                                 reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type,
                                 reinterpret_cast<THPDevice*>(device.ptr())->device);
           })
      .def("view", &Recipe::view)
      .def("call", &call);
  py::class_<Gradient, c10::intrusive_ptr<Gradient>>(m, "Gradient")
      .def(py::init<std::string, Results, Results, bool, py::object>(), py::arg("name"),
           py::arg("given"), py::arg("saved"), py::arg("zeros"), py::arg("in_python"));
  py::class_<Backward, std::shared_ptr<Backward>>(m, "Backward")
      .def(py::init([](std::vector<bool> needs, const py::tuple& values, Recipe recipe,
                       Results results) {
             return std::make_shared<Backward>(Backward{std::move(needs),
                                                        Alike(unwrapped_all(values)),
                                                        std::move(recipe), std::move(results)});
           }),
           py::arg("needs"), py::arg("values"), py::arg("recipe"), py::arg("results"));
  py::class_<Call, std::shared_ptr<Call>>(m, "Call").def(
      py::init<const py::tuple&, Recipe, Results, c10::intrusive_ptr<Gradient>>(),
      py::arg("tensors"), py::arg("recipe"), py::arg("results"), py::arg("gradient"));
  py::class_<Calls, std::shared_ptr<Calls>>(m, "Calls")
      .def(py::init<py::object>(), py::arg("in_a_group"))
      .def("add", &Calls::add)
      .def("function", &function_of);
}

}  // namespace
}  // namespace npu_ops::known
