// Runs aten operators of the emulated NPU with torch's CPU kernels, on the device's memory.
//
// torch_npu's aten kernels call hundreds of aclnn functions. torch's CPU kernels compute the same,
// so they replace torch_npu's. Device memory is host memory: a tensor is passed to the CPU kernel
// under its own address, and only new results are copied. An error is raised at the call.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <optional>
#include <unordered_set>

#include "graph.h"
#include "runtime.h"

namespace npu_ops::emulator {
namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// Returns torch_npu's default generator, found by its symbol: torch reaches it by hooks, which
// torch_npu 2.7 to 2.9 registers later.
at::Generator default_generator(c10::DeviceIndex device) {
  using Function = const at::Generator& (*)(c10::DeviceIndex);
  static const auto function =
      reinterpret_cast<Function>(dlsym(dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD),
                                       "_ZN6at_npu6detail22getDefaultNPUGeneratorEa"));
  TORCH_CHECK(function, "torch_npu has no getDefaultNPUGenerator");
  return function(device);
}

// Operators that stay torch_npu's own, because they create NPU tensors: allocation, views and
// copies.
const std::unordered_set<std::string>& kept() {
  static const std::unordered_set<std::string> names = {
      "_copy_from",
      "_copy_from_and_resize",
      "_has_compatible_shallow_copy_type",
      "_local_scalar_dense",
      "_pin_memory",
      "_reshape_alias",
      "_to_copy",
      "alias",
      "as_strided",
      "as_strided_",
      "clone",
      "contiguous",
      "copy_",
      "detach",
      "empty",
      "empty_like",
      "empty_strided",
      "expand",
      "is_pinned",
      "is_set_to",
      "new_empty_strided",
      "permute",
      "pin_memory",
      "record_stream",
      "resize_",
      "select",
      "set_",
      "slice",
      "squeeze",
      "t",
      "transpose",
      "unfold",
      "unsqueeze",
      "view",
      "view_as_complex",
      "view_as_real",
  };
  return names;
}

// Operators that take a CPU tensor beside NPU tensors on a real device too.
const std::unordered_set<std::string>& mixed() {
  static const std::unordered_set<std::string> names = {
      "_ctc_loss", "_index_put_impl_", "_pack_padded_sequence", "ctc_loss", "index",
      "index_put", "index_put_",       "segment_reduce",
  };
  return names;
}

// Operators whose CPU kernel takes no integers, but the vendor's does. They run in fp64, in which
// integers below 2^53 are exact.
const std::unordered_set<std::string>& without_integers() {
  static const std::unordered_set<std::string> names = {"histc"};
  return names;
}

// An NPU tensor, the CPU tensor over its memory, and the address of that memory.
struct Alias {
  at::Tensor npu;
  at::Tensor cpu;
  void* address;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(schema_.name().substr(6)) {}

  void run() {
    const size_t count = schema_.arguments().size(), first = stack_->size() - count;
    arguments_.assign(stack_->begin() + first, stack_->end());
    find_device();
    check_devices();
    find_integers();
    c10::OptionalDeviceGuard guard;
    if (device_) {
      guard.reset_device(*device_);
      // Work that torch_npu has queued may write these arguments.
      const Waiting waiting;
      c10::impl::VirtualGuardImpl(kNpu).synchronizeDevice(device_->index());
    }
    for (size_t i = 0; i < count; ++i) (*stack_)[first + i] = to_cpu(arguments_[i], i);
    const bool recorded = device_ && capturing();
    torch::jit::Stack given;
    if (recorded) given.assign(stack_->begin() + first, stack_->end());
    {
      Seeded seeded(*this, first);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    write_back();
    const size_t results = schema_.returns().size(), begin = stack_->size() - results;
    for (size_t i = 0; i < results; ++i) (*stack_)[begin + i] = to_npu((*stack_)[begin + i]);
    if (recorded) record(given);
  }

 private:
  // Records the call for a graph. A replay writes its results to the memory of the capture's
  // results.
  void record(const torch::jit::Stack& given) {
    const size_t results = schema_.returns().size();
    std::vector<at::Tensor> written;  // one for each result; undefined: an argument, or no tensor
    for (size_t i = 0; i < results; ++i) {
      const c10::IValue& value = (*stack_)[stack_->size() - results + i];
      const bool made = value.isTensor() && !is_argument(value.toTensor());
      written.push_back(made ? alias(value.toTensor()) : at::Tensor());
      TORCH_CHECK(!value.isTensorList() || value.toTensorList().empty(), "aten::", name_,
                  ": a list of results is not captured by the emulated NPU");
    }
    record_only([op = op_, given, written] {
      // The thread of a replay may run this, on tensors that were made in inference mode.
      const c10::InferenceMode mode;
      torch::jit::Stack stack(given);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (size_t i = 0; i < written.size(); ++i)
        if (written[i].defined())
          written[i].copy_(stack[stack.size() - written.size() + i].toTensor());
      return 0;
    });
  }

  // Returns whether a result is an argument, a view of one, or no NPU tensor.
  bool is_argument(const at::Tensor& result) const {
    if (!result.defined() || result.device().type() != kNpu) return true;
    for (const Alias& it : aliases_)
      if (it.npu.is_alias_of(result)) return true;
    return false;
  }

  // Random numbers come from the NPU's generator: its seed and offset seed a CPU generator for one
  // operator, and the offset moves on. So torch.npu.manual_seed, fork_rng and recomputation work.
  class Seeded {
   public:
    Seeded(Call& call, size_t first) {
      const bool tagged = call.op_.hasTag(at::Tag::nondeterministic_seeded);
      std::optional<size_t> argument;
      for (size_t i = 0; i < call.arguments_.size(); ++i) {
        const auto& type = *call.schema_.arguments()[i].real_type();
        if (type.str().find("Generator") != std::string::npos) argument = i;
      }
      if (!call.device_ || !(tagged || argument)) return;
      TORCH_CHECK(!capturing(), "aten::", call.name_,
                  ": random numbers are not captured by the emulated NPU");
      at::Generator source;
      if (argument && !call.arguments_[*argument].isNone()) {
        source = call.arguments_[*argument].toGenerator();
        TORCH_CHECK(source.device().type() == kNpu,
                    "Expected a 'npu' device type for generator but found '",
                    source.device().type(), "'");
      } else {
        source = default_generator(call.device_->index());
      }
      uint64_t seed;
      {
        std::lock_guard lock(source.mutex());
        const uint64_t offset = source.get_offset();
        seed = source.current_seed() + offset * 0x9E3779B97F4A7C15u;
        source.set_offset(offset + 4);  // Philox counts in fours
      }
      if (argument) {
        (*call.stack_)[first + *argument] = at::make_generator<at::CPUGeneratorImpl>(seed);
        return;
      }
      default_ = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
      std::lock_guard lock(default_->mutex());
      state_ = default_->get_state();
      default_->set_current_seed(seed);
    }
    ~Seeded() {
      if (!default_) return;
      std::lock_guard lock(default_->mutex());
      default_->set_state(state_);
    }

   private:
    std::optional<at::Generator> default_;
    at::Tensor state_;
  };

  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kNpu) {
      if (!device_) device_ = tensor.device();
      if (tensor.dim() > 0 && tensor.device() != *device_) other_ = tensor.device();
    } else if (tensor.device().is_cpu() && tensor.dim() > 0) {
      cpu_ = true;
    }
  }

  void find_device() {
    for (const auto& value : arguments_) {
      if (value.isTensor()) see(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorList()) see(tensor);
      if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
          if (tensor) see(*tensor);
    }
    for (const auto& value : arguments_)
      if (!device_ && value.isDevice() && value.toDevice().type() == kNpu) {
        const auto asked = value.toDevice();
        device_ = asked.has_index() ? asked : c10::impl::VirtualGuardImpl(kNpu).getDevice();
      }
  }

  void check_devices() const {
    if (!device_ || mixed().count(name_)) return;
    if (cpu_)
      TORCH_CHECK(false,
                  "Expected all tensors to be on the same device, but found at least two "
                  "devices, ",
                  *device_, " and cpu! (aten::", name_, ")");
    if (other_)
      TORCH_CHECK(false,
                  "Expected all tensors to be on the same device, but found at least two "
                  "devices, ",
                  *device_, " and ", *other_, "! (aten::", name_, ")");
  }

  void find_integers() {
    const bool functional = schema_.overload_name().empty();
    if (!functional || !without_integers().count(name_) || !arguments_[0].isTensor()) return;
    const auto type = arguments_[0].toTensor().scalar_type();
    if (c10::isIntegralType(type, /*includeBool=*/false)) integers_ = type;
  }

  // Returns a CPU tensor over an NPU tensor's whole storage, so that views stay views.
  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kNpu) return tensor;
    for (const Alias& known : aliases_)
      if (known.npu.is_same(tensor)) return known.cpu;
    const auto& storage = tensor.storage();
    void* address = storage.mutable_data();
    const Alias* shared = nullptr;
    for (const Alias& known : aliases_)
      if (known.address && known.address == address) shared = &known;
    c10::Storage memory = shared ? shared->cpu.storage()
                                 : c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                                at::DataPtr(address, c10::Device(c10::kCPU)),
                                                c10::GetCPUAllocator(), /*resizable=*/true);
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        std::move(memory), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = cpu.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.is_conj()) cpu._set_conj(true);
    if (tensor.is_neg()) cpu._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    aliases_.push_back({tensor, cpu, address});
    return cpu;
  }

  c10::IValue to_cpu(const c10::IValue& value, size_t index) {
    if (value.isTensor()) {
      const at::Tensor cpu = alias(value.toTensor());
      return integers_ && index == 0 ? cpu.to(at::kDouble) : cpu;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(alias(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(alias(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kNpu) return c10::Device(c10::kCPU);
    return value;
  }

  // If the kernel has resized an `out=` tensor, copies the tensor's new memory to the NPU tensor.
  void write_back() {
    for (const Alias& it : aliases_) {
      if (it.cpu.sizes() == it.npu.sizes() && it.cpu.strides() == it.npu.strides() &&
          it.cpu.storage().data() == it.address)
        continue;
      it.npu.resize_(it.cpu.sizes());
      it.npu.copy_(it.cpu);
    }
  }

  at::Tensor to_npu(const at::Tensor& cpu) {
    if (!cpu.defined() || !cpu.device().is_cpu() || !device_) return cpu;
    for (const Alias& it : aliases_)
      if (it.cpu.is_same(cpu)) return it.npu;
    for (const Alias& it : aliases_)  // a view of an argument
      if (it.address &&
          it.cpu.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        return it.npu.as_strided(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    const at::Tensor dense = cpu.is_non_overlapping_and_dense() ? cpu : cpu.contiguous();
    at::Tensor npu =
        at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(*device_));
    if (dense.numel() > 0)
      std::memcpy(npu.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    if (dense.unsafeGetTensorImpl()->is_wrapped_number())
      npu.unsafeGetTensorImpl()->set_wrapped_number(true);
    return npu;
  }

  c10::IValue to_npu(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor cpu = value.toTensor();
      return to_npu(integers_ ? cpu.to(*integers_) : cpu);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_npu(tensor));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const std::string name_;
  std::vector<c10::IValue> arguments_;
  std::vector<Alias> aliases_;
  std::optional<c10::Device> device_, other_;
  std::optional<at::ScalarType> integers_;
  bool cpu_ = false;
};

// Returns whether torch's CPU kernel can replace the NPU's. Composite operators without a kernel of
// torch_npu are left alone: torch decomposes them.
bool runs_on_cpu(const c10::OperatorHandle& op, const std::string& name) {
  using c10::DispatchKey;
  if (op.hasKernelForDispatchKey(DispatchKey::CPU)) return true;
  // Composite, but it decomposes into convolution_overrideable if a backend has no own kernel.
  if (name == "convolution" || name == "convolution_backward") return true;
  return op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) &&
         (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd));
}

// Returns whether a Python library registered a kernel for NPUs before the first use of a device.
// Such a kernel stays, as it does with torch_npu's own kernels.
bool registered_in_python(const c10::OperatorHandle& op) {
  const std::string state = "\n" + op.dumpState();
  const size_t line = state.find("\nPrivateUse1: ");
  return line != std::string::npos &&
         state.substr(line, state.find('\n', line + 1) - line).find(".py:") != std::string::npos;
}

// Silences the warning that torch gives for each override.
class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace

void install_aten_fallback() {
  static torch::Library& library = *new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kept().count(name.name.substr(6))) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (!runs_on_cpu(*op, name.name.substr(6)) || registered_in_python(*op)) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library.impl((name.name.substr(6) + overload).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace npu_ops::emulator
