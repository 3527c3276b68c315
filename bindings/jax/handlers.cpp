// SPDX-License-Identifier: Apache-2.0
// flash3's calls as XLA FFI handlers, for jax.ffi. One binary for the CPU and for CUDA: XLA hands
// the stream over as a pointer, and nothing of CUDA is named here.
//
// Here buffers become flash3_tensors, attributes the fields of their names, and a workspace is
// taken; the library checks the call. Which buffer is which the attribute `tensors` says, as names
// in the order of operands and results: flash3/_jax.py writes it, and gives each call its shapes,
// gradients and batching. A source of a mask (flash3/mask.h) is an operand of its name: each call
// makes the mask in memory of its own, so that XLA keeps, moves and batches nothing but the source.
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fields.hpp"
#include "flash3/mask.h"
#include "flash3/plan.h"

namespace flash3_jax {
namespace {

namespace ffi = xla::ffi;
using flash3::FieldKind;
using flash3::ParamField;

ffi::Error error_of(flash3_status status) {
  const ffi::ErrorCode code = status == FLASH3_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == FLASH3_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                              : status == FLASH3_OUT_OF_MEMORY  ? ffi::ErrorCode::kResourceExhausted
                                                                : ffi::ErrorCode::kInternal;
  return {code, std::string("flash3: ") + flash3_last_error()};
}

flash3_dtype dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return FLASH3_FLOAT16;
    case ffi::DataType::BF16: return FLASH3_BFLOAT16;
    case ffi::DataType::F32: return FLASH3_FLOAT32;
    case ffi::DataType::S32: return FLASH3_INT32;
    case ffi::DataType::S64: return FLASH3_INT64;
    case ffi::DataType::F8E4M3FN: return FLASH3_FLOAT8_E4M3;
    case ffi::DataType::PRED: return FLASH3_UINT8;  // a byte, 0 or 1
    default: return FLASH3_DTYPE_NONE;              // the library refuses it by the tensor's name
  }
}

// XLA's buffers are dense here: no layout is asked for.
flash3_tensor describe(const ffi::AnyBuffer& buffer) {
  flash3_tensor t{};
  const auto sizes = buffer.dimensions();
  t.data = buffer.untyped_data();
  t.dtype = dtype_of(buffer.element_type());
  t.ndim = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    t.shape[d] = sizes[d];
    t.stride[d] = stride;
    stride *= sizes[d];
  }
  return t;
}

// What a platform gives a call: threads or a stream, and memory for as long as the call is made.
class Host {
 public:
  explicit Host(const ffi::ThreadPool& pool) : threads_(static_cast<int32_t>(pool.num_threads())) {}

  // As many threads as XLA has, but the library's own: XLA's would wait for each other.
  template <class Params>
  void prepare(Params* params) const {
    params->backend = FLASH3_BACKEND_CPU;
    params->num_threads = threads_;
  }
  void* allocate(size_t bytes) {
    return memory_.emplace_back(::operator new(bytes, std::nothrow)).get();
  }

 private:
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory); }
  };
  int32_t threads_;
  std::vector<std::unique_ptr<void, Delete>> memory_;
};

class Cuda {
 public:
  Cuda(void* stream, ffi::ScratchAllocator* scratch) : stream_(stream), scratch_(scratch) {}

  template <class Params>
  void prepare(Params* params) const {
    params->backend = FLASH3_BACKEND_HOPPER;
    params->stream = stream_;
  }
  void* allocate(size_t bytes) { return scratch_->Allocate(bytes).value_or(nullptr); }

 private:
  void* stream_;
  ffi::ScratchAllocator* scratch_;
};

// Memory for as long as the call is made. Not every allocator gives the alignment, so it lies
// somewhere in more memory. what: it, in an error's words.
template <class Platform>
ffi::Error take_memory(size_t bytes, const char* what, Platform* platform, void** taken) {
  if (bytes == 0) return ffi::Error::Success();
  constexpr uintptr_t kUnit = FLASH3_WORKSPACE_ALIGNMENT;
  void* memory = bytes <= SIZE_MAX - kUnit ? platform->allocate(bytes + kUnit) : nullptr;
  if (!memory) {
    return {ffi::ErrorCode::kResourceExhausted, std::string("flash3: no memory for a ") + what +
                                                    " of " + std::to_string(bytes) + " bytes"};
  }
  const auto address = reinterpret_cast<uintptr_t>(memory);
  *taken = reinterpret_cast<void*>((address + kUnit - 1) / kUnit * kUnit);
  return ffi::Error::Success();
}

// One call: its params, from operands, results and attributes.
template <class Params>
class Call {
 public:
  Call() { params.struct_size = sizeof params; }

  // Each attribute is the field of its name, but for `tensors`: the names of operands and results.
  // They are asked for one by one: jaxlib 0.7's headers cannot list them.
  ffi::Error attributes(const ffi::Dictionary& given) {
    const auto names = given.get<std::string_view>("tensors");
    if (names.has_error()) return names.error();
    names_ = *names;
    size_t known = 1;
    for (const ParamField& field : flash3::FieldsOf<Params>::kFields) {
      if (!field.is_option() || !given.contains(field.name)) continue;
      if (ffi::Error error = attribute(given, field); error.failure()) return error;
      ++known;
    }
    if (known != given.size())
      return {ffi::ErrorCode::kInternal, "flash3: " + std::to_string(given.size() - known) +
                                             " of the attributes are no options of the call"};
    params.window = params.window_left >= 0 || params.window_right >= 0;
    return ffi::Error::Success();
  }

  ffi::Error tensors(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      if (ffi::Error error = tensor(*buffer); error.failure()) return error;
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      if (ffi::Error error = tensor(**buffer); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  template <class Platform, class MakePlan, class RunPlan>
  ffi::Error run(Platform platform, const MakePlan& make_plan, const RunPlan& run_plan) {
    platform.prepare(&params);
    if (ffi::Error error = make_mask(&platform); error.failure()) return error;
    flash3_plan* made = nullptr;
    if (const flash3_status status = make_plan(&params, &made)) return error_of(status);
    const std::unique_ptr<flash3_plan, void (*)(flash3_plan*)> plan(made, flash3_plan_destroy);
    size_t bytes = 0;
    if (const flash3_status status = flash3_plan_workspace(plan.get(), &bytes))
      return error_of(status);
    params.workspace_size = bytes;
    if (ffi::Error error = take_memory(bytes, "workspace", &platform, &params.workspace);
        error.failure())
      return error;
    if (const flash3_status status = run_plan(plan.get(), &params)) return error_of(status);
    return ffi::Error::Success();
  }

  Params params{};

 private:
  template <class Given, class Stored>
  ffi::Error store(const ffi::Dictionary& given, const ParamField& field) {
    const auto value = given.get<Given>(field.name);
    if (value.has_error()) return value.error();
    field.set(&params, static_cast<Stored>(*value));
    return ffi::Error::Success();
  }

  // Attributes are bool, float and int64_t; flash3/_jax.py checks what fits into their fields.
  ffi::Error attribute(const ffi::Dictionary& given, const ParamField& field) {
    if (field.is_flag) return store<bool, int32_t>(given, field);
    if (field.kind == FieldKind::kFloat) return store<float, float>(given, field);
    if (field.kind == FieldKind::kInt32) return store<int64_t, int32_t>(given, field);
    return store<int64_t, int64_t>(given, field);
  }

  // The next name of `tensors` is this buffer's.
  ffi::Error tensor(const ffi::AnyBuffer& buffer) {
    const size_t end = names_.find(' ');
    const std::string_view name = names_.substr(0, end);
    names_ = end == std::string_view::npos ? std::string_view() : names_.substr(end + 1);
    const ParamField* field = flash3::find_field<Params>(name);
    void* owner = &params;
    if (!field) {
      field = flash3::find_field<flash3_mask_params>(name);
      owner = &source_;
      has_source_ = true;
    }
    if (!field || field->kind != FieldKind::kTensor)
      return {ffi::ErrorCode::kInternal, "flash3: no tensor is named '" + std::string(name) + "'"};
    if (buffer.dimensions().size() > 4) {
      return {ffi::ErrorCode::kInvalidArgument, "flash3: " + std::string(name) + ".ndim = " +
                                                    std::to_string(buffer.dimensions().size()) +
                                                    " but a tensor has at most 4 dimensions"};
    }
    *field->tensor(owner) = describe(buffer);
    return ffi::Error::Success();
  }

  // The mask of the source that is given, if one is, for this call, of its band and its lengths.
  template <class Platform>
  ffi::Error make_mask(Platform* platform) {
    if (!has_source_) return ffi::Error::Success();
    source_.struct_size = sizeof source_;
    source_.batch = params.q.shape[0], source_.heads_q = params.q.shape[2];
    source_.seq_q = params.q.shape[1], source_.seq_k = params.k.shape[1];
    source_.causal = params.causal, source_.window = params.window;
    source_.window_left = params.window_left, source_.window_right = params.window_right;
    source_.chunk = params.chunk, source_.mask_alignment = params.mask_alignment;
    source_.seqused_q = params.seqused_q, source_.seqused_k = params.seqused_k;
    platform->prepare(&source_);
    // One row for all queries: a stride says so, which XLA's buffers have not.
    if (flash3_tensor& dense = source_.dense; dense.ndim == 4 && dense.shape[2] == 1)
      dense.shape[2] = source_.seq_q, dense.stride[2] = 0;
    if (const flash3_status status = flash3_mask_size(&source_, &mask_.size))
      return error_of(status);
    if (ffi::Error error = take_memory(mask_.size, "mask", platform, &mask_.data); error.failure())
      return error;
    if (const flash3_status status = flash3_mask_make(&source_, &mask_)) return error_of(status);
    params.mask = &mask_;
    return ffi::Error::Success();
  }

  std::string_view names_;
  bool has_source_ = false;
  flash3_mask_params source_{};
  flash3_mask mask_{};
};

template <class Params, class Platform, class MakePlan, class RunPlan>
ffi::Error run(Call<Params> call, Platform platform, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results, const ffi::Dictionary& attributes,
               const MakePlan& make_plan, const RunPlan& run_plan) {
  if (ffi::Error error = call.attributes(attributes); error.failure()) return error;
  if (ffi::Error error = call.tensors(operands, results); error.failure()) return error;
  return call.run(std::move(platform), make_plan, run_plan);
}

template <class Platform>
ffi::Error forward(Platform platform, const ffi::RemainingArgs& operands,
                   const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  Call<flash3_forward_params> call;
  call.params.fill_padding = 1;  // XLA's results hold whatever was in their memory
  return run(std::move(call), std::move(platform), operands, results, attributes,
             flash3_forward_plan, flash3_forward_run);
}

template <class Platform>
ffi::Error backward(Platform platform, const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  return run(Call<flash3_backward_params>(), std::move(platform), operands, results, attributes,
             flash3_backward_plan, flash3_backward_run);
}

auto on_host() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs();
}
auto on_cuda() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

ffi::Error forward_on_host(const ffi::ThreadPool& pool, const ffi::RemainingArgs& operands,
                           const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  return forward(Host(pool), operands, results, attributes);
}

ffi::Error forward_on_cuda(void* stream, ffi::ScratchAllocator scratch,
                           const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                           const ffi::Dictionary& attributes) {
  return forward(Cuda(stream, &scratch), operands, results, attributes);
}

ffi::Error backward_on_host(const ffi::ThreadPool& pool, const ffi::RemainingArgs& operands,
                            const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  return backward(Host(pool), operands, results, attributes);
}

ffi::Error backward_on_cuda(void* stream, ffi::ScratchAllocator scratch,
                            const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                            const ffi::Dictionary& attributes) {
  return backward(Cuda(stream, &scratch), operands, results, attributes);
}

}  // namespace

// Not among those that XLA may record into a command buffer: a replay would use a workspace that is
// given back when the handler returns.
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_forward_cpu, forward_on_host, on_host());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_forward_cuda, forward_on_cuda, on_cuda());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_backward_cpu, backward_on_host, on_host());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_backward_cuda, backward_on_cuda, on_cuda());

}  // namespace flash3_jax
