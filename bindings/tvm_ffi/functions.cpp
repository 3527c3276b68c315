// SPDX-License-Identifier: Apache-2.0
// flash3's calls as functions of TVM-FFI's C ABI: forward, backward, attention_with_kv_cache,
// quantize, merge, mask_size, mask_make, mask_used, and arguments, which tells the names of a
// function's arguments. Every result is the caller's, but for mask_size's number; trailing
// arguments may be left out, and None is what the C interface has for "not given". They
// use nothing of TVM-FFI's C++, and the library makes every decision, below the C interface.
#include <flash3/flash3.h>
#include <flash3/mask.h>
#include <flash3/merge.h>
#include <flash3/quantize.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <new>

#include "arguments.hpp"
#include "signatures.hpp"

namespace flash3_tvm_ffi {
namespace {

// What the last failed C call ended with, as the Python package raises it. Python knows the kind
// NotImplementedError where somebody has told TVM-FFI of it, and has RuntimeError otherwise, its
// base.
Refusal refusal(flash3_status status) {
  const std::string_view message = flash3_last_error();
  switch (status) {
    case FLASH3_INVALID_ARGUMENT: {
      // "q.dtype = …": what an argument is, not its value.
      size_t name = 0;
      while (name < message.size() &&
             (std::isalnum(static_cast<unsigned char>(message[name])) || message[name] == '_')) {
        ++name;
      }
      const bool about_dtype = name > 0 && message.substr(name).starts_with(".dtype");
      return {about_dtype ? "TypeError" : "ValueError", std::string(message)};
    }
    case FLASH3_UNSUPPORTED: return {"NotImplementedError", std::string(message)};
    case FLASH3_OUT_OF_MEMORY: return {"MemoryError", std::string(message)};
    default: return {"RuntimeError", std::string(message)};
  }
}

void check(flash3_status status) {
  if (status != FLASH3_OK) throw refusal(status);
}

// Memory for one call: the process's own for the CPU, and for a GPU that of the allocator which
// TVM-FFI knows, as torch's where the arguments are torch's.
class Workspace {
 public:
  Workspace(const DLTensor& near, size_t bytes) {
    constexpr size_t kUnit = FLASH3_WORKSPACE_ALIGNMENT;
    const size_t size = (bytes + kUnit - 1) / kUnit * kUnit;
    if (!on_gpu(near)) {
      host_.reset(std::aligned_alloc(kUnit, size));
      if (!host_) throw std::bad_alloc();
      data_ = host_.get();
      return;
    }
    if (!TVMFFIEnvGetDLPackManagedTensorAllocator()) {
      throw Refusal{"ValueError", "workspace is None but this call needs " + std::to_string(bytes) +
                                      " bytes on a GPU, and TVM-FFI knows no allocator for them"};
    }
    int64_t room = static_cast<int64_t>(size + kUnit);
    DLTensor wanted{};
    wanted.device = near.device;
    wanted.ndim = 1;
    wanted.dtype = {kDLUInt, 8, 1};
    wanted.shape = &room;
    TVMFFIObjectHandle made = nullptr;
    if (TVMFFIEnvTensorAlloc(&wanted, &made) != 0) {
      TVMFFIObjectHandle error = nullptr;
      TVMFFIErrorMoveFromRaised(&error);
      if (error) TVMFFIObjectDecRef(error);
      throw Refusal{"MemoryError",
                    "the allocator that TVM-FFI knows refused " + std::to_string(room) + " bytes"};
    }
    device_.reset(made);
    const auto address = reinterpret_cast<uintptr_t>(address_of(*TVMFFITensorGetDLTensorPtr(made)));
    data_ = reinterpret_cast<void*>((address + kUnit - 1) / kUnit * kUnit);
  }

  [[nodiscard]] void* data() const { return data_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct DecRef {
    void operator()(void* p) const { TVMFFIObjectDecRef(p); }
  };
  std::unique_ptr<void, Free> host_;
  std::unique_ptr<void, DecRef> device_;
  void* data_ = nullptr;
};

void* stream_of(const DLTensor* t) {
  return t && on_gpu(*t) ? TVMFFIEnvGetStream(t->device.device_type, t->device.device_id) : nullptr;
}

template <class Params>
void call(std::span<const Argument> known, std::span<const TVMFFIAny> given,
          flash3_status (*workspace)(const Params*, size_t*), flash3_status (*run)(const Params*)) {
  Params p{};
  p.struct_size = sizeof p;
  MaskTensors masks;
  const DLTensor* first = read(known, given, &p, &masks);
  p.stream = stream_of(first);
  flash3_mask mask{};
  if constexpr (requires { p.mask; })
    if (is_given(masks)) p.mask = &(mask = mask_of(masks));
  size_t bytes = 0;
  check(workspace(&p, &bytes));
  std::unique_ptr<Workspace> made;
  if (bytes && !p.workspace && first) {
    made = std::make_unique<Workspace>(*first, bytes);
    p.workspace = made->data();
    p.workspace_size = bytes;
  }
  check(run(&p));
}

flash3_mask_params mask_params(std::span<const Argument> known, std::span<const TVMFFIAny> given,
                               MaskTensors* masks) {
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  const DLTensor* first = read(known, given, &p, masks);
  p.stream = stream_of(masks->mask ? masks->mask : first);
  return p;
}

void mask_size(std::span<const TVMFFIAny> given, TVMFFIAny* result) {
  MaskTensors none;
  const flash3_mask_params p = mask_params(kMaskSize, given, &none);
  size_t bytes = 0;
  check(flash3_mask_size(&p, &bytes));
  result->type_index = kTVMFFIInt;
  result->v_int64 = static_cast<int64_t>(bytes);
}

void mask_make(std::span<const TVMFFIAny> given) {
  MaskTensors masks;
  const flash3_mask_params p = mask_params(kMaskMake, given, &masks);
  flash3_mask mask = memory_of(masks);
  const std::span<int64_t> fields = numbers(kMaskFields, masks.mask_fields, flash3::kMaskFields);
  check(flash3_mask_make(&p, &mask));
  std::ranges::copy(flash3::mask_fields(mask), fields.begin());
}

// Waits for the stream.
void mask_used(std::span<const TVMFFIAny> given) {
  MaskTensors masks;
  mask_params(kMaskUsed, given, &masks);
  const flash3_mask mask = mask_of(masks);
  const std::span<int64_t> used = numbers(kUsed, masks.used, 3);
  int64_t blocks = 0, partial_blocks = 0, documents = 0;
  check(flash3_mask_used(&mask, stream_of(masks.mask), &blocks, &partial_blocks, &documents));
  used[0] = blocks, used[1] = partial_blocks, used[2] = documents;
}

// "q,k,v,…" of the function with this name.
void arguments(std::span<const TVMFFIAny> given, TVMFFIAny* result) {
  constexpr Argument kName{"name", nullptr};
  if (given.size() != 1)
    throw Refusal{"TypeError", "arguments has one argument, the name of a function"};
  const std::string_view name = text_of(kName, given[0]);
  std::string text;
  for (const Function& f : kFunctions) {
    if (f.name != name) continue;
    for (const Argument& a : f.arguments) text.append(text.empty() ? "" : ",").append(a.name);
  }
  if (text.empty()) {
    std::string known;
    for (const Function& f : kFunctions)
      known.append(known.empty() ? "'" : ", '").append(f.name).append("'");
    throw Refusal{"ValueError",
                  "name = '" + std::string(name) + "' but it must be one of " + known};
  }
  const TVMFFIByteArray bytes{text.data(), text.size()};
  TVMFFIStringFromByteArray(&bytes, result);
}

// No exception leaves: 0, or -1 with the error where TVM-FFI looks for it.
template <class Body>
int guarded(const TVMFFIAny* args, int32_t count, TVMFFIAny* result, Body body) {
  try {
    result->type_index = kTVMFFINone;
    result->zero_padding = 0;
    result->v_int64 = 0;
    body(std::span(args, static_cast<size_t>(count)));
    return 0;
  } catch (const Refusal& refused) {
    TVMFFIErrorSetRaisedFromCStr(refused.kind, refused.message.c_str());
  } catch (const std::bad_alloc&) {
    TVMFFIErrorSetRaisedFromCStr("MemoryError", "host memory ran out");
  }
  return -1;
}

}  // namespace
}  // namespace flash3_tvm_ffi

// TVM-FFI finds a module's functions by these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
#define FLASH3_EXPORT(name, known, workspace, run)                                                \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                     TVMFFIAny* result) {                         \
    using namespace flash3_tvm_ffi;                                                               \
    return guarded(args, count, result, [](auto given) { call(known, given, workspace, run); });  \
  }

FLASH3_EXPORT(forward, kForward, flash3_forward_workspace, flash3_forward)
FLASH3_EXPORT(attention_with_kv_cache, kAttentionWithKvCache, flash3_forward_workspace,
              flash3_forward)
FLASH3_EXPORT(backward, kBackward, flash3_backward_workspace, flash3_backward)
FLASH3_EXPORT(quantize, kQuantize, flash3_quantize_workspace, flash3_quantize)
FLASH3_EXPORT(merge, kMerge, flash3_merge_workspace, flash3_merge)

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_mask_size(void*, const TVMFFIAny* args, int32_t count,
                                                      TVMFFIAny* result) {
  using namespace flash3_tvm_ffi;
  return guarded(args, count, result, [&](auto given) { mask_size(given, result); });
}

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_mask_make(void*, const TVMFFIAny* args, int32_t count,
                                                      TVMFFIAny* result) {
  using namespace flash3_tvm_ffi;
  return guarded(args, count, result, mask_make);
}

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_mask_used(void*, const TVMFFIAny* args, int32_t count,
                                                      TVMFFIAny* result) {
  using namespace flash3_tvm_ffi;
  return guarded(args, count, result, mask_used);
}

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_arguments(void*, const TVMFFIAny* args, int32_t count,
                                                      TVMFFIAny* result) {
  using namespace flash3_tvm_ffi;
  return guarded(args, count, result, [&](auto given) { arguments(given, result); });
}
// NOLINTEND(bugprone-reserved-identifier)
