// A pretend CUDA device for a torch that was built without CUDA, as a Python module; tests/pretend/__init__.py tells what
// it is for. It must be loaded before torch asks for a device.
#include <ATen/native/transformers/attention.h>

#include "memory.hpp"
#include "nccl.hpp"
#include "operations.hpp"

using CUDAHooks = pretend::Hooks;
C10_REGISTER_GUARD_IMPL(CUDA, pretend::Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, pretend::Hooks)
}

namespace pretend {

// choose(query, key, value, mask, dropout, causal, scale, gqa) -> int: which kernel scaled_dot_product_attention takes.
static pybind11::handle sdpa_choice;

static int64_t choose_sdpa(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool gqa) {
  pybind11::gil_scoped_acquire gil;
  return sdpa_choice(query, key, value, mask, dropout, is_causal, scale, gqa).cast<int64_t>();
}

// A Python object that lives as long as the process.
static pybind11::handle kept(const pybind11::object& object) { return pybind11::object(object).release(); }

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  c10::SetAllocator(c10::DeviceType::CUDA, device_memory(), 100);

  m.def("observe", [](pybind11::object observer) { machine().observer = kept(observer); });
  m.def("set_devices", [](int count) { machine().devices = static_cast<c10::DeviceIndex>(count); });
  m.def("set_capacity", [](int64_t bytes) { machine().capacity = bytes; });
  m.def("set_hollow", [](bool hollow) { machine().hollow = hollow; });
  m.def("set_device", [](int index) { Guard().setDevice({c10::DeviceType::CUDA, (c10::DeviceIndex)index}); });
  m.def("get_device", [] { return static_cast<int>(current_device); });
  m.def("held", [] { return machine().held.load(); });
  m.def("peak", [] { return machine().peak.load(); });
  m.def("reset_peak", [] { machine().peak = machine().held.load(); });
  m.def("host", [](const Tensor& tensor) { return host(tensor); });
  m.def("values", [](const Tensor& tensor) { return bytes_of(tensor); });
  m.def("on_device", [](const Tensor& tensor, const Tensor& like) { return on_device(tensor, like.device()); });
  m.def("resize_storage", [](const Tensor& tensor, int64_t bytes) {
    at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
  });
  m.def("choose_sdpa_by", [](pybind11::object choice) {
    sdpa_choice = kept(choice);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_sdpa);
  });

  m.def("make_gloo_by", [](pybind11::object maker) { Nccl::gloo() = kept(maker); });
  pybind11::class_<Nccl, Ptr<Nccl>, Backend> nccl(m, "ProcessGroupNCCL");
  nccl.def(pybind11::init([](Ptr<Store> store, int rank, int size, Ptr<Nccl::Options> options) {
             return c10::make_intrusive<Nccl>(store, rank, size, options);
           }))
      .def_property_readonly("options", &Nccl::getBackendOptions)
      .def("_shutdown", &Nccl::shutdown)
      .def("_abort", &Nccl::abort)
      .def("perform_nocolor_split", [](Nccl&, at::Device) {});
  pybind11::class_<Nccl::Options, Ptr<Nccl::Options>, Backend::Options>(nccl, "Options")
      .def(
          pybind11::init([](bool high) { return c10::make_intrusive<Nccl::Options>(high); }),
          pybind11::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream)
      .def_readwrite("split_from", &Nccl::Options::split_from)
      .def_readwrite("split_color", &Nccl::Options::split_color)
      .def("__deepcopy__", [](const Nccl::Options& self, pybind11::dict) { return c10::make_intrusive<Nccl::Options>(self); });
}
