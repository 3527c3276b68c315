// SPDX-License-Identifier: Apache-2.0
// What the operators of torch.ops.flash3 have in common: arguments taken from torch's stack by
// their schema,
// tensors as flash3_tensors, results allocated by torch, one call of the library and its error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "flash3/plan.h"
#include "runtime.hpp"

namespace flash3_torch {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// "flash3: invalid argument: q.shape[2] = …": flash3/_torch.py makes the Python exception of it.
[[noreturn]] void fail(flash3_status status, const std::string& sentence);
void check(flash3_status status);

struct Device {
  int32_t type = 0, index = 0;
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  bool operator==(const Device&) const = default;
  std::string name() const;
};

Device device_of(std::string_view name, const Tensor& t);
int32_t torch_dtype_of(const Tensor& t);
// A dtype in torch's numbering as the library's, of an argument with this name and field.
flash3_dtype dtype_of(std::string_view name, const ParamField& field, int32_t dtype);
bool is_fp8(const Tensor& t);
// The dtype of out, in torch's numbering: the one that is asked for, or as q's.
int32_t out_dtype_of(const Tensor& q, const std::optional<int32_t>& asked);
void check_dims(std::string_view name, const Tensor& t);

Tensor empty(const Sizes& sizes, int32_t dtype, const Device& device);
// The same with its heads before its rows, [batch, heads, seq, dim], in memory that has them
// after its rows.
Tensor empty_heads_first(const Sizes& sizes, int32_t dtype, const Device& device);
void* current_stream(int32_t device_index);

// What a forward call returns.
struct Attended {
  Tensor out, lse;
};
// out has q's shape with v's head dim, and q's dtype unless another is asked for.
Tensor empty_out(const Tensor& q, const Tensor& v, bool heads_first,
                 const std::optional<int32_t>& asked_dtype, const Device& device);
// So many bytes at a multiple of FLASH3_WORKSPACE_ALIGNMENT: what a caller keeps. Only what is
// aligned is in the tensor: a copy that lies otherwise is refused, and never misread.
Tensor empty_aligned(size_t bytes, const Device& device);
Attended empty_results(const Tensor& q, const Tensor& v, bool heads_first,
                       const std::optional<int32_t>& asked_dtype, const Device& device);

// Describes a tensor of this device.
void describe(std::string_view name, const Tensor& t, std::string_view first_name,
              const Device& device, const ParamField& field, flash3_tensor* described);

// What operators take that is no field of the params.
struct Extras {
  bool heads_first = false;  // [batch, heads, seq, dim], as torch's own attention has its tensors
  std::optional<int32_t> out_dtype;  // in torch's numbering
  int64_t scale_ndim = 0, heads_k = 0;
  MaybeTensor schedule;
  int64_t schedule_key = 0;
  MaybeTensor mask;
  std::vector<int64_t> mask_fields;
};

// A mask as an operator takes it: its bytes and its fields (mask.cpp).
flash3_mask mask_of(const Tensor& t, const std::vector<int64_t>& fields);

// One argument as torch's stack has it.
struct Value {
  MaybeTensor tensor;
  double number = 0;
  int64_t integer = 0;  // and a flag
  std::vector<int64_t> integers;

  Value() = default;
  Value(Type type, StableIValue given);
};

// Takes an argument that is no field.
void take_extra(std::string_view name, const Type type, Value& value, Extras* extras);
// Refuses a number that does not fit into its field.
[[noreturn]] void refuse_number(const Argument& argument, const Value& value);

// The workspace of a call. torch's allocators know when the stream is done with it.
struct Workspace {
  Device device;
  std::optional<Tensor> memory;
  std::exception_ptr error;

  // What the library calls for it.
  static void* give(size_t bytes, void* context) noexcept;
};

// One call: its params, of an operator's arguments, and the copies that they point to.
template <class Params>
class Call {
 public:
  Call(const Schema<Params>& schema, StableIValue* stack) : schema_(schema) {
    // All are taken before any is refused: a function that takes a tensor owns it.
    for (size_t i = 0; i < schema.count; ++i) values_[i] = {schema.arguments[i].type, stack[i]};
    params.struct_size = sizeof params;
    begin_window(&params);
    for (size_t i = 0; i < schema.count; ++i) take(schema.arguments[i], &values_[i]);
    finish_window(&params);
    find_device();
    if (device.is_cuda()) {
      params.stream = current_stream(device.index);
    } else {
      params.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
    }
  }

  // The tensor that an argument is; none: it is not given.
  const MaybeTensor& given(std::string_view name) const {
    static const MaybeTensor kNone;
    for (size_t i = 0; i < schema_.count; ++i)
      if (schema_.arguments[i].name == name) return values_[i].tensor;
    return kNone;
  }
  const Tensor& operator[](std::string_view name) const { return *given(name); }

  // Describes all tensors that are given, which must be on the device of the first.
  void describe_tensors() {
    for (size_t i = 0; i < schema_.count; ++i) {
      const Argument& a = schema_.arguments[i];
      if (!values_[i].tensor || !a.field) continue;
      flash3_tensor* const described = output(a.name, *a.field, *values_[i].tensor);
      if (!a.field->is_written && !a.field->any_strides && !a.is_cache)
        close_gaps(a, *values_[i].tensor, described);
    }
  }
  // Describes a result that was made for the call.
  void result(std::string_view name, const Tensor& t) {
    output(name, *flash3::find_field<Params>(name), t);
  }

  // Gives the call the mask that it was given, if any.
  void take_mask() {
    if constexpr (requires { params.mask; }) {
      if (!extras.mask) return;
      const Device own = device_of("mask.data", *extras.mask);
      if (own != device)
        fail(FLASH3_INVALID_ARGUMENT, "mask.data.device = " + own.name() + " but q.device = " +
                                          device.name() + "; all tensors must be on one device");
      mask_ = mask_of(*extras.mask, extras.mask_fields);
      params.mask = &mask_;
    }
  }

  // As long as what it returns lives, the call's GPU is the current one.
  std::optional<torch::stable::accelerator::DeviceGuard> on_device() const {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (device.is_cuda()) guard.emplace(device.index);
    return guard;
  }

  // run_allocating: flash3_forward_allocating, or that of another call.
  template <class RunAllocating>
  void run(const RunAllocating& run_allocating) {
    const auto guard = on_device();
    take_mask();
    Workspace workspace{device, {}, {}};
    const flash3_status status = run_allocating(&params, &Workspace::give, &workspace);
    if (workspace.error) std::rethrow_exception(workspace.error);  // torch's own
    check(status);
  }

  Params params{};
  Extras extras;
  Device device;
  std::string_view first_name;  // of the tensor that tells the device

 private:
  void take(const Argument& a, Value* value) {
    if (!a.field) return take_extra(a.name, a.type, *value, &extras);
    if (a.type == Type::kTensor || a.type == Type::kMaybeTensor) return;
    const bool fits = a.type == Type::kFloat ? store(*a.field, value->number, &params)
                                             : store(*a.field, value->integer, &params);
    if (!fits) refuse_number(a, *value);
  }

  void find_device() {
    size_t first = schema_.count;
    for (size_t i = schema_.count; i-- > 0;)
      if (values_[i].tensor && (schema_.arguments[i].field || schema_.arguments[i].name == "like"))
        first = i;
    for (size_t i = 0; i < schema_.count; ++i)
      if (values_[i].tensor && schema_.arguments[i].name == "q") first = i;
    if (first == schema_.count)
      fail(FLASH3_INVALID_ARGUMENT, "q, k and v are None; at least one of them must be given");
    first_name = schema_.arguments[first].name;
    device = device_of(first_name, *values_[first].tensor);
  }

  flash3_tensor* output(std::string_view name, const ParamField& field, const Tensor& t) {
    flash3_tensor* const described = field.tensor(&params);
    describe(name, t, first_name, device, field, described);
    if (field.is_rows && extras.heads_first && described->ndim >= 3) {
      const int32_t heads = described->ndim - 3;
      std::swap(described->shape[heads], described->shape[heads + 1]);
      std::swap(described->stride[heads], described->stride[heads + 1]);
    }
    return described;
  }

  // A last dimension with gaps is copied; any other stride is passed on.
  void close_gaps(const Argument& a, const Tensor& t, flash3_tensor* described) {
    const int32_t last = described->ndim - 1;
    if (last < 0 || described->shape[last] <= 1 || described->stride[last] == 1) return;
    copies_.push_back(torch::stable::contiguous(t));
    output(a.name, *a.field, copies_.back());
    described->stride[last] = 1;  // torch does not copy a tensor without elements
  }

  const Schema<Params>& schema_;
  std::array<Value, Schema<Params>::kMost> values_;
  std::vector<Tensor> copies_;
  flash3_mask mask_{};
};

// The operators of quantize.cpp, kv_cache.cpp and mask.cpp.
void quantize(StableIValue* stack, uint64_t, uint64_t);
void quantize_out(StableIValue* stack, uint64_t, uint64_t);
void attention_with_kv_cache(StableIValue* stack, uint64_t, uint64_t);
void attention_with_kv_cache_append(StableIValue* stack, uint64_t, uint64_t);
void attention_with_kv_cache_out(StableIValue* stack, uint64_t, uint64_t);
void kv_cache_schedule(StableIValue* stack, uint64_t, uint64_t);
void kv_cache_schedule_out(StableIValue* stack, uint64_t, uint64_t);
void merge(StableIValue* stack, uint64_t, uint64_t);
void merge_out(StableIValue* stack, uint64_t, uint64_t);
void mask_make(StableIValue* stack, uint64_t, uint64_t);
void mask_data(StableIValue* stack, uint64_t, uint64_t);
void mask_used(StableIValue* stack, uint64_t, uint64_t);

}  // namespace flash3_torch
