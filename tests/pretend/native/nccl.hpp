// NCCL over gloo: it takes contiguous CUDA tensors and nothing else, and its groups can be split.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

#include "operations.hpp"

namespace pretend {

using c10d::Backend;
using c10d::Store;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
template <typename T>
using Ptr = c10::intrusive_ptr<T>;

class Nccl : public Backend {
 public:
  struct Options : Backend::Options {
    explicit Options(bool is_high_priority_stream = false)
        : Backend::Options("nccl"), is_high_priority_stream(is_high_priority_stream) {}
    bool is_high_priority_stream;
    Ptr<Backend> split_from;
    int64_t split_color = 0;
  };

  // gloo(store, rank, size, milliseconds) -> Backend, which Python makes: its header asks for gloo's own.
  static pybind11::handle& gloo() {
    static pybind11::handle maker;
    return maker;
  }

  Nccl(const Ptr<Store>& store, int rank, int size, Ptr<Options> options)
      : Backend(rank, size), options_(std::move(options)), store_(store) {
    Ptr<Store> own = c10::make_intrusive<c10d::PrefixStore>("nccl", store);
    pybind11::gil_scoped_acquire gil;
    inner_ = gloo()(own, rank, size, options_->timeout.count()).cast<Ptr<Backend>>();
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  Ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void eagerConnectSingleDevice(at::Device) override {}
  void shutdown() override {}
  void abort() override { inner_->abort(); }

  Ptr<Backend> split(
      const Ptr<Store>& store, const std::vector<int>& ranks, const Ptr<Backend::Options>& options) override {
    auto place = std::find(ranks.begin(), ranks.end(), getRank());
    if (place == ranks.end()) return nullptr;
    auto own = c10::dynamic_intrusive_pointer_cast<Options>(options);
    TORCH_CHECK(own, "options of a split group are not NCCL's");
    return c10::make_intrusive<Nccl>(
        store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()), own);
  }

#define PRETEND_ONE(NAME, OPTIONS)                                                     \
  Ptr<Work> NAME(Tensors& tensors, const c10d::OPTIONS& options) override {            \
    tell("nccl", #NAME);                                                               \
    auto on_host = taken(tensors);                                                     \
    return inner_->NAME(on_host, options);                                             \
  }
#define PRETEND_TWO(NAME, OUT, IN, OPTIONS)                                            \
  Ptr<Work> NAME(OUT& out, IN& in, const c10d::OPTIONS& options) override {            \
    tell("nccl", #NAME);                                                               \
    auto out_on_host = taken(out);                                                     \
    auto in_on_host = taken(in);                                                       \
    return inner_->NAME(out_on_host, in_on_host, options);                             \
  }
  PRETEND_ONE(broadcast, BroadcastOptions)
  PRETEND_ONE(allreduce, AllreduceOptions)
  PRETEND_ONE(reduce, ReduceOptions)
  PRETEND_ONE(allreduce_coalesced, AllreduceCoalescedOptions)
  PRETEND_TWO(allgather, Lists, Tensors, AllgatherOptions)
  PRETEND_TWO(_allgather_base, Tensor, Tensor, AllgatherOptions)
  PRETEND_TWO(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions)
  PRETEND_TWO(gather, Lists, Tensors, GatherOptions)
  PRETEND_TWO(scatter, Tensors, Lists, ScatterOptions)
  PRETEND_TWO(reduce_scatter, Tensors, Lists, ReduceScatterOptions)
  PRETEND_TWO(_reduce_scatter_base, Tensor, Tensor, ReduceScatterOptions)
  PRETEND_TWO(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions)
  PRETEND_TWO(alltoall, Tensors, Tensors, AllToAllOptions)
#undef PRETEND_ONE
#undef PRETEND_TWO

  Ptr<Work> alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    tell("nccl", "alltoall_base");
    auto out_on_host = taken(out), in_on_host = taken(in);
    return inner_->alltoall_base(out_on_host, in_on_host, out_sizes, in_sizes, options);
  }
  Ptr<Work> send(Tensors& tensors, int to, int tag) override {
    tell("nccl", "send");
    auto on_host = taken(tensors);
    return inner_->send(on_host, to, tag);
  }
  Ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    tell("nccl", "recv");
    auto on_host = taken(tensors);
    return inner_->recv(on_host, from, tag);
  }
  Ptr<Work> barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  static Tensor taken(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense (nccl was given a tensor on ", tensor.device(), ")");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    return bytes_of(tensor);
  }
  static Tensors taken(const Tensors& tensors) {
    Tensors out;
    for (const auto& tensor : tensors) out.push_back(taken(tensor));
    return out;
  }
  static Lists taken(const Lists& lists) {
    Lists out;
    for (const auto& list : lists) out.push_back(taken(list));
    return out;
  }

  Ptr<Options> options_;
  Ptr<Store> store_;
  Ptr<Backend> inner_;
};

}  // namespace pretend
