// SPDX-License-Identifier: Apache-2.0
#include "call.hpp"

#include <dlfcn.h>
#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace flash3_torch {
namespace {

void check_torch(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    fail(FLASH3_INTERNAL_ERROR, std::string(what) + " failed inside torch");
}

Tensor empty_strided(const Sizes& sizes, const Sizes& strides, int32_t dtype,
                     const Device& device) {
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                       strides.data(), dtype, device.type, device.index, &handle),
              "an allocation");
  return Tensor(handle);
}

Sizes dense_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return strides;
}

}  // namespace

void fail(flash3_status status, const std::string& sentence) {
  throw std::runtime_error("flash3: " + std::string(flash3_status_name(status)) + ": " + sentence);
}

void check(flash3_status status) {
  if (status != FLASH3_OK) fail(status, flash3_last_error());
}

std::string Device::name() const {
  if (is_cuda()) return "cuda:" + std::to_string(index);
  return type == aoti_torch_device_type_cpu() ? "cpu" : "device type " + std::to_string(type);
}

Device device_of(std::string_view name, const Tensor& t) {
  if (!t.defined())
    fail(FLASH3_INVALID_ARGUMENT,
         std::string(name) + ".dtype is none: it must be a tensor, not None");
  Device device;
  check_torch(aoti_torch_get_device_type(t.get(), &device.type), "get_device_type");
  check_torch(aoti_torch_get_device_index(t.get(), &device.index), "get_device_index");
  if (!device.is_cuda()) device.index = 0;
  return device;
}

int32_t torch_dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dtype(t.get(), &dtype), "get_dtype");
  return dtype;
}

namespace {

// torch's name of a dtype that no call takes.
const char* torch_name_of(int32_t dtype) {
  const std::pair<int32_t, const char*> known[] = {
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      // Not among the functions of torch 2.10.
      {static_cast<int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu), "float8_e8m0fnu"},
      {static_cast<int32_t>(torch::headeronly::ScalarType::Float4_e2m1fn_x2), "float4_e2m1fn_x2"}};
  for (const auto& [value, text] : known)
    if (value == dtype) return text;
  return "unknown";  // of fewer bits than eight
}

std::string dtypes_for(const ParamField& field) {
  if (field.dtype != FLASH3_DTYPE_NONE) return flash3_dtype_name(field.dtype);
  return "float16, bfloat16, float32 or float8_e4m3fn";
}

}  // namespace

flash3_dtype dtype_of(std::string_view name, const ParamField& field, int32_t dtype) {
  if (dtype == aoti_torch_dtype_bfloat16()) return FLASH3_BFLOAT16;
  if (dtype == aoti_torch_dtype_float16()) return FLASH3_FLOAT16;
  if (dtype == aoti_torch_dtype_float32()) return FLASH3_FLOAT32;
  if (dtype == aoti_torch_dtype_int32()) return FLASH3_INT32;
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return FLASH3_FLOAT8_E4M3;
  if (dtype == aoti_torch_dtype_int64() && field.dtype == FLASH3_INT64) return FLASH3_INT64;
  const bool is_byte = dtype == aoti_torch_dtype_uint8() || dtype == aoti_torch_dtype_bool();
  if (is_byte && field.dtype == FLASH3_UINT8) return FLASH3_UINT8;
  fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".dtype = " + torch_name_of(dtype) +
                                    " but it must be " + dtypes_for(field));
}

bool is_fp8(const Tensor& t) { return torch_dtype_of(t) == aoti_torch_dtype_float8_e4m3fn(); }

void check_dims(std::string_view name, const Tensor& t) {
  if (t.dim() == 3 || t.dim() == 4) return;
  fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".ndim = " + std::to_string(t.dim()) +
                                    " but it must be 4, [batch, seq, heads, dim], or packed 3, "
                                    "[total, heads, dim]");
}

Tensor empty(const Sizes& sizes, int32_t dtype, const Device& device) {
  return empty_strided(sizes, dense_strides(sizes), dtype, device);
}

Tensor empty_heads_first(const Sizes& sizes, int32_t dtype, const Device& device) {
  const size_t heads = sizes.size() - 3;
  Sizes in_memory = sizes;
  std::swap(in_memory[heads], in_memory[heads + 1]);
  Sizes strides = dense_strides(in_memory);
  std::swap(strides[heads], strides[heads + 1]);
  return empty_strided(sizes, strides, dtype, device);
}

int32_t out_dtype_of(const Tensor& q, const std::optional<int32_t>& asked) {
  if (asked) return *asked;
  return is_fp8(q) ? aoti_torch_dtype_bfloat16() : torch_dtype_of(q);
}

Tensor empty_out(const Tensor& q, const Tensor& v, bool heads_first,
                 const std::optional<int32_t>& asked_dtype, const Device& device) {
  check_dims("q", q);
  check_dims("v", v);
  const auto of_q = q.sizes();
  Sizes sizes(of_q.begin(), of_q.end());
  sizes.back() = v.size(v.dim() - 1);
  const int32_t dtype = out_dtype_of(q, asked_dtype);
  return heads_first ? empty_heads_first(sizes, dtype, device) : empty(sizes, dtype, device);
}

Tensor empty_aligned(size_t bytes, const Device& device) {
  const auto size = static_cast<int64_t>(bytes);
  Tensor memory = empty({bytes > 0 ? static_cast<int64_t>(workspace_allocation(bytes)) : 0},
                        aoti_torch_dtype_uint8(), device);
  const auto* begin = static_cast<const char*>(memory.data_ptr());
  const auto* aligned = static_cast<const char*>(align_workspace(memory.data_ptr()));
  return torch::stable::narrow(memory, 0, bytes > 0 ? aligned - begin : 0, size);
}

Attended empty_results(const Tensor& q, const Tensor& v, bool heads_first,
                       const std::optional<int32_t>& asked_dtype, const Device& device) {
  Tensor out = empty_out(q, v, heads_first, asked_dtype, device);
  // [batch, seq, heads, dim] -> [batch, heads, seq]; packed [total, heads, dim] -> [heads, total]
  const auto of_q = q.sizes();
  Sizes sizes(of_q.begin(), of_q.end() - 1);
  if (!heads_first) std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  return {std::move(out), empty(sizes, aoti_torch_dtype_float32(), device)};
}

// The current stream of a device. Only libtorch_cuda has the function, and a torch without CUDA has
// no CUDA tensor that could bring us here.
void* current_stream(int32_t device_index) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library
               ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
               : nullptr;
  }();
  if (!function) fail(FLASH3_UNSUPPORTED, "q is a CUDA tensor but this torch has no CUDA streams");
  void* stream = nullptr;
  check_torch(function(device_index, &stream), "get_current_cuda_stream");
  return stream;
}

void* Workspace::give(size_t bytes, void* context) noexcept {
  auto* const workspace = static_cast<Workspace*>(context);
  try {
    workspace->memory = empty({static_cast<int64_t>(workspace_allocation(bytes))},
                              aoti_torch_dtype_uint8(), workspace->device);
    return align_workspace(workspace->memory->data_ptr());
  } catch (...) {
    workspace->error = std::current_exception();
    return nullptr;
  }
}

void describe(std::string_view name, const Tensor& t, std::string_view first_name,
              const Device& device, const ParamField& field, flash3_tensor* described) {
  const Device own = device_of(name, t);
  if (own != device)
    fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".device = " + own.name() + " but " +
                                      std::string(first_name) + ".device = " + device.name() +
                                      "; all tensors must be on one device");
  const auto sizes = t.sizes(), strides = t.strides();
  if (sizes.size() > 4)
    fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".ndim = " + std::to_string(sizes.size()) +
                                      " but a tensor has at most 4 dimensions");
  described->data = t.data_ptr();
  described->dtype = dtype_of(name, field, torch_dtype_of(t));
  described->ndim = static_cast<int32_t>(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    described->shape[d] = sizes[d];
    described->stride[d] = strides[d];
  }
}

Value::Value(Type type, StableIValue given) {
  using torch::stable::detail::to;
  switch (type) {
    case Type::kTensor: tensor = to<Tensor>(given); break;
    case Type::kMaybeTensor: tensor = to<MaybeTensor>(given); break;
    case Type::kFloat: number = to<double>(given); break;
    case Type::kFlag: integer = to<bool>(given); break;
    case Type::kInteger: integer = to<int64_t>(given); break;
    case Type::kIntegers: integers = to<std::vector<int64_t>>(given); break;
    case Type::kDtype: integer = to<std::optional<int32_t>>(given).value_or(-1); break;
  }
}

void take_extra(std::string_view name, Type type, Value& value, Extras* extras) {
  if (name == "schedule") extras->schedule = value.tensor;
  if (name == "mask") extras->mask = value.tensor;
  if (name == "mask_fields") extras->mask_fields = value.integers;
  if (name == "heads_first") extras->heads_first = value.integer != 0;
  if (name == "scale_ndim") extras->scale_ndim = value.integer;
  if (name == "heads_k") extras->heads_k = value.integer;
  if (name == "schedule_key") extras->schedule_key = value.integer;
  if (type == Type::kDtype && value.integer >= 0)
    extras->out_dtype = static_cast<int32_t>(value.integer);
}

void refuse_number(const Argument& argument, const Value& value) {
  std::ostringstream sentence;
  sentence << argument.name << " = ";
  if (argument.type != Type::kFloat) {
    sentence << value.integer << " but it must fit into 32 bits";
  } else {
    sentence << value.number << " but it must be a number that float32 can hold, which makes "
             << static_cast<float>(value.number) << " of it";
  }
  fail(FLASH3_INVALID_ARGUMENT, sentence.str());
}

}  // namespace flash3_torch
