// SPDX-License-Identifier: Apache-2.0
// What the operators of torch.ops.flash3 have in common: arguments taken from torch's stack,
// tensors as flash3_tensors, results allocated by torch, one call of the library and its error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flash3/plan.h"
#include "workspace.hpp"

namespace flash3_torch {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// "flash3: invalid argument: q.shape[2] = …": flash3/_torch.py makes the Python exception of it.
[[noreturn]] void fail(flash3_status status, const std::string& sentence);
void check(flash3_status status);
int32_t int32_of(const char* name, int64_t value);
float float32_of(const char* name, double value);

struct Device {
  int32_t type = 0, index = 0;
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  bool operator==(const Device&) const = default;
  std::string name() const;
};

Device device_of(const char* name, const Tensor& t);
int32_t torch_dtype_of(const Tensor& t);
// A dtype in torch's numbering as the library's; name is the argument's, for messages.
flash3_dtype dtype_of(const char* name, int32_t dtype);
bool is_fp8(const Tensor& t);
// The dtype of out, in torch's numbering: the one that is asked for, or as q's.
int32_t out_dtype_of(const Tensor& q, const std::optional<int32_t>& asked);
void check_dims(const char* name, const Tensor& t);

Tensor empty(const Sizes& sizes, int32_t dtype, const Device& device);
// The same with its heads before its rows, [batch, heads, seq, dim], in memory that has them
// behind.
Tensor empty_heads_first(const Sizes& sizes, int32_t dtype, const Device& device);
void* current_stream(int32_t device_index);

// What a forward call returns.
struct Attended {
  Tensor out, lse;
};
// out has q's shape with v's head dim, and q's dtype unless another is asked for.
Tensor empty_out(const Tensor& q, const Tensor& v, bool heads_first,
                 const std::optional<int32_t>& asked_dtype, const Device& device);
Attended empty_results(const Tensor& q, const Tensor& v, bool heads_first,
                       const std::optional<int32_t>& asked_dtype, const Device& device);

// Describes a tensor of this device.
void describe(const char* name, const Tensor& t, const char* first_name, const Device& device,
              flash3_tensor* field);

// The arguments of an operator, taken from its stack one after the other.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack) {}
  template <class T>
  T next() {
    return torch::stable::detail::to<T>(*stack_++);
  }
  Tensor tensor() { return next<Tensor>(); }
  MaybeTensor maybe_tensor() { return next<MaybeTensor>(); }
  // A dtype in torch's numbering.
  std::optional<int32_t> maybe_dtype() { return next<std::optional<int32_t>>(); }

 private:
  StableIValue* stack_;
};

// Sequences of different lengths, as all params have them.
struct Sequences {
  MaybeTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  int64_t max_seqlen_q, max_seqlen_k;

  explicit Sequences(Arguments& a)
      : cu_seqlens_q(a.maybe_tensor()),
        cu_seqlens_k(a.maybe_tensor()),
        seqused_q(a.maybe_tensor()),
        seqused_k(a.maybe_tensor()),
        max_seqlen_q(a.next<int64_t>()),
        max_seqlen_k(a.next<int64_t>()) {}
};
#define FLASH3_SEQUENCES                                                           \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, " \
  "Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0"

// One call: its params, and the copies that they point to.
template <class Params>
class Call {
 public:
  // The other tensors must be on the device of the first one.
  Call(const char* first_name, const Device& device) : first_name_(first_name), device_(device) {
    params.struct_size = sizeof params;
    if (device_.is_cuda()) {
      params.stream = current_stream(device_.index);
    } else {
      params.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
    }
  }

  // A last dimension with gaps is copied; any other stride is passed on.
  void input(const char* name, flash3_tensor* field, const Tensor& t) {
    output(name, field, t);
    const int32_t last = field->ndim - 1;
    if (last < 0 || field->shape[last] <= 1 || field->stride[last] == 1) return;
    copies_.push_back(torch::stable::contiguous(t));
    describe(name, copies_.back(), first_name_, device_, field);
    field->stride[last] = 1;  // torch does not copy a tensor without elements
  }
  void optional_input(const char* name, flash3_tensor* field, const MaybeTensor& t) {
    if (t) input(name, field, *t);
  }
  void output(const char* name, flash3_tensor* field, const Tensor& t) {
    describe(name, t, first_name_, device_, field);
  }
  void optional_output(const char* name, flash3_tensor* field, const MaybeTensor& t) {
    if (t) output(name, field, *t);
  }
  // Scale and mask, of forward and backward.
  void scores(double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
              double softcap) {
    params.softmax_scale = float32_of("softmax_scale", softmax_scale);
    params.causal = causal;
    params.window = window_left >= 0 || window_right >= 0;
    params.window_left = window_left;
    params.window_right = window_right;
    params.softcap = float32_of("softcap", softcap);
  }
  void sequences(const Sequences& s) {
    optional_input("cu_seqlens_q", &params.cu_seqlens_q, s.cu_seqlens_q);
    optional_input("cu_seqlens_k", &params.cu_seqlens_k, s.cu_seqlens_k);
    optional_input("seqused_q", &params.seqused_q, s.seqused_q);
    optional_input("seqused_k", &params.seqused_k, s.seqused_k);
    params.max_seqlen_q = s.max_seqlen_q;
    params.max_seqlen_k = s.max_seqlen_k;
  }

  // As long as what it returns lives, the call's GPU is the current one.
  std::optional<torch::stable::accelerator::DeviceGuard> on_device() const {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (device_.is_cuda()) guard.emplace(device_.index);
    return guard;
  }

  // make_plan, run_plan: flash3_forward_plan and flash3_forward_run, or those of another call.
  template <class MakePlan, class RunPlan>
  void run(const MakePlan& make_plan, const RunPlan& run_plan) {
    const auto guard = on_device();
    flash3_plan* made = nullptr;
    check(make_plan(&params, &made));
    const std::unique_ptr<flash3_plan, void (*)(flash3_plan*)> plan(made, flash3_plan_destroy);
    size_t bytes = 0;
    check(flash3_plan_workspace(plan.get(), &bytes));
    std::optional<Tensor> workspace;  // torch's allocators know when the stream is done with it
    if (bytes > 0) {
      workspace = empty({static_cast<int64_t>(workspace_allocation(bytes))},
                        aoti_torch_dtype_uint8(), device_);
      params.workspace = align_workspace(workspace->data_ptr());
      params.workspace_size = bytes;
    }
    check(run_plan(plan.get(), &params));
  }

  Params params{};

 private:
  const char* first_name_;
  Device device_;
  std::vector<Tensor> copies_;
};

// torch.ops.flash3.quantize and quantize_out (quantize.cpp).
extern const char* const kQuantizeSchema;
extern const char* const kQuantizeOutSchema;
void quantize(StableIValue* stack, uint64_t, uint64_t);
void quantize_out(StableIValue* stack, uint64_t, uint64_t);

// The operators for a KV cache and for merging (kv_cache.cpp).
extern const char* const kCacheSchemas[7];
void attention_with_kv_cache(StableIValue* stack, uint64_t, uint64_t);
void attention_with_kv_cache_append(StableIValue* stack, uint64_t, uint64_t);
void attention_with_kv_cache_out(StableIValue* stack, uint64_t, uint64_t);
void kv_cache_schedule(StableIValue* stack, uint64_t, uint64_t);
void kv_cache_schedule_out(StableIValue* stack, uint64_t, uint64_t);
void merge(StableIValue* stack, uint64_t, uint64_t);
void merge_out(StableIValue* stack, uint64_t, uint64_t);

}  // namespace flash3_torch
