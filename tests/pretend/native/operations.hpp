// What computes: a fallback for every operation of torch on the CUDA dispatch key, which is the CPU's on aliases of the
// operands after CUDA's rules about devices, and the few operations that a fallback cannot be. On a hollow device it is
// that of torch's meta tensors, which gives shapes alone; what the host reads there is ones, what it writes is written.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nonzero_native.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <set>

#include "memory.hpp"

namespace pretend {

using at::Tensor;
using Stack = torch::jit::Stack;

// The same bytes as a CPU tensor, which keeps the memory of `tensor`.
inline Tensor bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  if (tensor.numel() == 0) {
    return at::detail::empty_strided_generic(
        tensor.sizes(), tensor.strides(), c10::GetAllocator(c10::DeviceType::CPU),
        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.scalar_type());
  }
  auto storage = tensor.storage();
  auto bytes = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
}

// What the host computes with in place of a device's tensor: its bytes, or of a hollow device its shape.
inline Tensor host(const Tensor& tensor) {
  if (!machine().hollow || !tensor.defined() || tensor.is_meta()) return bytes_of(tensor);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// A copy of a CPU tensor on a device; of a meta tensor its memory.
inline Tensor on_device(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  c10::DeviceGuard guard(device);
  Tensor out = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      tensor.scalar_type());
  if (tensor.numel() && !tensor.is_meta()) bytes_of(out).copy_(tensor);
  return out;
}

inline bool takes_host_indices(const std::string& name) {
  static const std::set<std::string> names = {"aten::index",      "aten::_unsafe_index",     "aten::index_put",
                                              "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"};
  return names.count(name) > 0;
}

// Operations whose result's size, or the result itself, the host needs to know.
inline bool reads_values(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::equal",      "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
      "aten::unique_dim", "aten::bincount",
  };
  return names.count(name) > 0;
}

// One call: its operands as the CPU's, what was found about devices, and its results brought back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : schema_(op.schema()), name_(schema_.operator_name().name), stack_(stack) {
    for (const auto& result : schema_.returns()) {
      auto alias = result.alias_info();
      TORCH_CHECK(!alias || alias->isWrite(), "the pretend device has no view ", name_, ": it would be a copy");
    }
    const auto count = schema_.arguments().size();
    for (size_t index = 0; index < count; index++) take((*stack)[stack->size() - count + index]);
    if (!device_) return;
    for (const auto& [tensor, in_list, first] : on_host_) refuse_unless_allowed(tensor, in_list, first);
    // `index` by a mask asks for its nonzero on the device, which tells of it.
    if (reads_values(name_) || (has_bool_index_ && name_ != "aten::index")) tell("sync", name_);
  }

  void bring_back() {
    for (size_t index = 0; index < aliases_.size(); index++) keep_size(index);
    auto target = device_ ? device_ : wanted_;
    if (!target) return;
    const auto count = schema_.returns().size();
    for (size_t index = stack_->size() - count; index < stack_->size(); index++) give((*stack_)[index], *target);
  }

 private:
  struct OnHost {
    Tensor tensor;
    bool in_list, first;
  };

  void take(c10::IValue& value) {
    if (value.isTensor()) {
      value = see(value.toTensor(), false);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(see(tensor, true));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        has_bool_index_ |= tensor && tensor->defined() && tensor->scalar_type() == at::kBool;
        list.push_back(tensor ? std::optional<Tensor>(see(*tensor, false)) : tensor);
      }
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) wanted_ = value.toDevice();
      value = c10::Device(machine().hollow ? at::kMeta : at::kCPU);
    }
  }

  Tensor see(const Tensor& tensor, bool in_list) {
    if (!tensor.defined()) return tensor;
    const bool first = !seen_;
    seen_ = true;
    if (!tensor.is_cuda()) {
      on_host_.push_back({tensor, in_list, first});
      return tensor.dim() ? host(tensor) : tensor;
    }
    TORCH_CHECK(
        !device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least ",
        "two devices, ", *device_, " and ", tensor.device(), "! (", schema_.operator_name(), ")");
    device_ = tensor.device();
    auto alias = host(tensor);
    sizes_.push_back(alias.sizes().vec());
    aliases_.emplace_back(alias, tensor);
    return alias;
  }

  // Beside tensors of a device, CUDA takes from the host a single number, indices of a CUDA tensor, and nothing to join.
  void refuse_unless_allowed(const Tensor& tensor, bool in_list, bool first) const {
    if (tensor.dim() == 0 && !in_list && name_ != "aten::embedding") return;
    if (takes_host_indices(name_) && !first) {
      if (name_ != "aten::index") tell("sync", name_ + " by indices on the host");  // it moves them itself
      return;
    }
    if (tensor.numel() == 0 && name_ == "aten::cat") return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
        " and cpu! (", schema_.operator_name(), " with a CPU tensor ", tensor.sizes(), " ", tensor.scalar_type(), ")");
  }

  // An `out` that the operation resized.
  void keep_size(size_t index) {
    auto& [alias, original] = aliases_[index];
    if (alias.sizes().vec() == sizes_[index]) return;
    at::native::resize_(original, alias.sizes(), std::nullopt);
    if (alias.numel() && !alias.is_meta()) host(original).copy_(alias);
  }

  void give(c10::IValue& value, c10::Device device) {
    if (value.isTensor()) {
      value = original_of(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(original_of(tensor, device));
      value = list;
    }
  }

  Tensor original_of(const Tensor& tensor, c10::Device device) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [alias, original] : aliases_) {
      if (alias.is_same(tensor)) return original;
    }
    return on_device(tensor, device);
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack* stack_;
  bool seen_ = false, has_bool_index_ = false;
  std::optional<c10::Device> device_, wanted_;  // of the operands, and of a device argument
  std::vector<OnHost> on_host_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // (the CPU's, the caller's)
  std::vector<std::vector<int64_t>> sizes_;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  op.callBoxed(stack);
  call.bring_back();
}

inline Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

inline Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

inline const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

// A copy between host and device waits for the device, unless it is asked not to and the host's memory is pinned.
inline Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cpu() != source.is_cpu()) {
    const auto& on_host = self.is_cpu() ? self : source;
    const std::string where = self.is_cpu() ? "copy to the host" : "copy to the device";
    const bool is_pinned = PinnedMemory::holds(on_host.storage().data());
    if (!non_blocking || (self.is_cpu() && !is_pinned)) {
      tell("sync", where);
    } else if (!is_pinned) {
      tell("pageable", where);
    } else {
      tell("copy", where);
    }
  }
  if (machine().hollow && source.is_cuda()) return self.is_cpu() ? self.fill_(1) : self;
  bytes_of(self).copy_(bytes_of(source));
  return self;
}

inline at::Scalar item(const Tensor& self) {
  tell("sync", "item");
  if (machine().hollow) return at::ones({}, self.options().device(at::kCPU)).item();
  return at::native::_local_scalar_dense_cpu(host(self));
}

inline Tensor nonzero(const Tensor& self) {
  tell("sync", "nonzero");
  TORCH_CHECK(!machine().hollow, "a hollow device cannot tell which numbers are not zero");
  return on_device(at::native::nonzero_cpu(host(self)), self.device());
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
inline Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
inline Tensor& set_strided(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, source, offset, size, stride);
}
inline void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("copy_", copy);
  m.impl("_local_scalar_dense", item);
  m.impl("nonzero", nonzero);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("record_stream", record_stream);
  // Torch has a composition of it too, which it prefers to a fallback, and which holds five tensors more than CUDA's.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace pretend
