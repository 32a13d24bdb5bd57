// What a device is to torch: a guard that knows which one is current, an allocator, and the hooks that say it is there.
// A device's memory is the host's. It is counted, limited, and filled with 0xFF, so that what nobody wrote is NaN or -1;
// a hollow device's is only named, never touched.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace pretend {

struct Machine {
  c10::DeviceIndex devices = 1;
  int64_t capacity = int64_t{80} << 30;  // bytes of this process's device
  bool hollow = false;  // it hands out memory and computes nothing: what it holds can be counted at any size
  std::atomic<int64_t> held{0}, peak{0};
  pybind11::handle observer;  // observer(kind, what): whatever a GPU would feel; set once, by Python
};

inline Machine& machine() {
  static Machine the_one;
  return the_one;
}

inline thread_local c10::DeviceIndex current_device = 0;

inline void tell(const char* kind, const std::string& what) {
  if (!machine().observer || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  machine().observer(kind, what);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  static c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return machine().devices; }
  c10::Device getDevice() const override { return {static_type, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < machine().devices, "CUDA error: invalid device ordinal");
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  // One stream, and everything on it is done when it is asked for.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {static_type, index_of(device)});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("sync", "stream"); }
  void synchronizeEvent(void*) const override { tell("sync", "event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("sync", "device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct DeviceMemory final : c10::Allocator {
  struct Block {
    void* bytes;
    int64_t size;
    bool hollow;
  };

  static void release(void* context) {
    auto block = static_cast<Block*>(context);
    machine().held -= block->size;
    if (block->hollow && block->size) {
      munmap(block->bytes, block->size);
    } else {
      free(block->bytes);
    }
    delete block;
  }

  c10::DataPtr allocate(size_t wanted) override {
    auto size = static_cast<int64_t>((wanted + 511) / 512 * 512);  // as CUDA's caching allocator counts
    auto& of = machine();
    TORCH_CHECK_WITH(
        OutOfMemoryError, of.held + size <= of.capacity, "CUDA out of memory. Tried to allocate ", size, " bytes of ",
        of.capacity, ", ", of.held.load(), " of them held");
    auto block = new Block{nullptr, size, of.hollow};
    if (size && of.hollow) {
      const auto how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      block->bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, how, -1, 0);
      if (block->bytes == MAP_FAILED) throw std::bad_alloc();
    } else if (size) {
      if (posix_memalign(&block->bytes, 512, size)) throw std::bad_alloc();
      memset(block->bytes, 0xFF, size);
    }
    auto now = of.held += size, before = of.peak.load();
    while (before < now && !of.peak.compare_exchange_weak(before, now)) {
    }
    return {block->bytes, block, &release, c10::Device(c10::DeviceType::CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};

struct PinnedMemory final : c10::Allocator {
  static std::map<const char*, size_t>& blocks() {
    static std::map<const char*, size_t> all;
    return all;
  }
  static std::mutex& lock() {
    static std::mutex one;
    return one;
  }

  static void release(void* bytes) {
    std::lock_guard<std::mutex> held(lock());
    blocks().erase(static_cast<char*>(bytes));
    free(bytes);
  }
  static bool holds(const void* pointer) {
    std::lock_guard<std::mutex> held(lock());
    auto after = blocks().upper_bound(static_cast<const char*>(pointer));
    if (after == blocks().begin()) return false;
    auto& [begin, size] = *--after;
    return static_cast<const char*>(pointer) < begin + size;
  }

  c10::DataPtr allocate(size_t size) override {
    void* bytes = nullptr;
    if (size && posix_memalign(&bytes, 64, size)) throw std::bad_alloc();
    std::lock_guard<std::mutex> held(lock());
    if (size) blocks()[static_cast<char*>(bytes)] = size;
    return {bytes, bytes, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};

inline DeviceMemory* device_memory() {
  static DeviceMemory one;
  return &one;
}
inline PinnedMemory* pinned_memory() {
  static PinnedMemory one;
  return &one;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return machine().devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  int getNumGPUs() const override { return machine().devices; }
  c10::DeviceIndex deviceCount() const override { return machine().devices; }
  c10::DeviceIndex current_device() const override { return pretend::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return pretend::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { pretend::current_device = index; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::holds(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_memory(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator one = at::detail::getDefaultCPUGenerator();
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

}  // namespace pretend
