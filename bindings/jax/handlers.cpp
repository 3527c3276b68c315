// SPDX-License-Identifier: Apache-2.0
// flash3's calls as XLA FFI handlers, for jax.ffi. One binary for the CPU and for CUDA: XLA hands
// the stream over as a pointer, and nothing of CUDA is named here.
//
// Here buffers become flash3_tensors and a workspace is taken; the library checks the call. Which
// buffer is which the attribute `tensors` says, as names in the order of operands and results:
// flash3/_jax.py writes it, and gives each call its shapes, gradients and batching.
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "flash3/plan.h"

namespace flash3_jax {
namespace {

namespace ffi = xla::ffi;

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
    case ffi::DataType::F8E4M3FN: return FLASH3_FLOAT8_E4M3;
    default: return FLASH3_DTYPE_NONE;  // the library refuses it by the tensor's name
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

template <class Params>
struct Field {
  std::string_view name;
  flash3_tensor Params::*tensor;
};

using Forward = flash3_forward_params;
constexpr Field<Forward> kForwardFields[] = {{"q", &Forward::q},
                                             {"k", &Forward::k},
                                             {"v", &Forward::v},
                                             {"seqused_q", &Forward::seqused_q},
                                             {"sink", &Forward::sink},
                                             {"seqused_k", &Forward::seqused_k},
                                             {"out", &Forward::out},
                                             {"lse", &Forward::lse},
                                             {"q_scale", &Forward::q_scale},
                                             {"k_scale", &Forward::k_scale},
                                             {"v_scale", &Forward::v_scale}};

using Backward = flash3_backward_params;
constexpr Field<Backward> kBackwardFields[] = {
    {"dout", &Backward::dout}, {"dlse", &Backward::dlse},
    {"q", &Backward::q},       {"k", &Backward::k},
    {"v", &Backward::v},       {"out", &Backward::out},
    {"lse", &Backward::lse},   {"seqused_q", &Backward::seqused_q},
    {"sink", &Backward::sink}, {"seqused_k", &Backward::seqused_k},
    {"dq", &Backward::dq},     {"dk", &Backward::dk},
    {"dv", &Backward::dv},     {"dsink", &Backward::dsink}};

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
    memory_.reset(::operator new(bytes, std::nothrow));
    return memory_.get();
  }

 private:
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory); }
  };
  int32_t threads_;
  std::unique_ptr<void, Delete> memory_;
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

// Not every allocator gives the alignment, so the workspace lies somewhere in more memory.
template <class Params, class Platform>
ffi::Error take_workspace(size_t bytes, Platform* platform, Params* params) {
  if (bytes == 0) return ffi::Error::Success();
  constexpr uintptr_t kUnit = FLASH3_WORKSPACE_ALIGNMENT;
  void* memory = platform->allocate(bytes + kUnit);
  if (!memory) {
    return {ffi::ErrorCode::kResourceExhausted,
            "flash3: no memory for a workspace of " + std::to_string(bytes) + " bytes"};
  }
  const auto address = reinterpret_cast<uintptr_t>(memory);
  params->workspace = reinterpret_cast<void*>((address + kUnit - 1) / kUnit * kUnit);
  params->workspace_size = bytes;
  return ffi::Error::Success();
}

template <class Params, size_t kFields>
class Call {
 public:
  Call(const Field<Params> (&fields)[kFields], std::string_view names)
      : fields_(fields), names_(names) {
    params.struct_size = sizeof params;
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
    flash3_plan* made = nullptr;
    if (const flash3_status status = make_plan(&params, &made)) return error_of(status);
    const std::unique_ptr<flash3_plan, void (*)(flash3_plan*)> plan(made, flash3_plan_destroy);
    size_t bytes = 0;
    if (const flash3_status status = flash3_plan_workspace(plan.get(), &bytes))
      return error_of(status);
    if (ffi::Error error = take_workspace(bytes, &platform, &params); error.failure()) return error;
    if (const flash3_status status = run_plan(plan.get(), &params)) return error_of(status);
    return ffi::Error::Success();
  }

  Params params{};

 private:
  // The next name of `tensors` is this buffer's.
  ffi::Error tensor(const ffi::AnyBuffer& buffer) {
    const size_t end = names_.find(' ');
    const std::string_view name = names_.substr(0, end);
    names_ = end == std::string_view::npos ? std::string_view() : names_.substr(end + 1);
    for (const Field<Params>& field : fields_) {
      if (field.name != name) continue;
      if (buffer.dimensions().size() > 4) {
        return {ffi::ErrorCode::kInvalidArgument, "flash3: " + std::string(name) + ".ndim = " +
                                                      std::to_string(buffer.dimensions().size()) +
                                                      " but a tensor has at most 4 dimensions"};
      }
      params.*field.tensor = describe(buffer);
      return ffi::Error::Success();
    }
    return {ffi::ErrorCode::kInternal, "flash3: no tensor is named '" + std::string(name) + "'"};
  }

  const Field<Params> (&fields_)[kFields];
  std::string_view names_;
};

// Scale and mask, of forward and backward.
struct Scores {
  float softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  float softcap;
  int64_t chunk;

  template <class Params>
  void set(Params* params) const {
    params->softmax_scale = softmax_scale;
    params->causal = causal;
    params->window = window_left >= 0 || window_right >= 0;
    params->window_left = window_left;
    params->window_right = window_right;
    params->softcap = softcap;
    params->chunk = chunk;
  }
};

template <class Platform>
ffi::Error forward(Platform platform, const ffi::RemainingArgs& operands,
                   const ffi::RemainingRets& results, std::string_view tensors,
                   const Scores& scores, bool compute_fp8, int64_t rotation_seed) {
  Call call(kForwardFields, tensors);
  scores.set(&call.params);
  call.params.compute = compute_fp8 ? FLASH3_COMPUTE_FP8 : FLASH3_COMPUTE_AS_GIVEN;
  call.params.rotation_seed = static_cast<uint64_t>(rotation_seed);
  call.params.fill_padding = 1;  // XLA's results hold whatever was in their memory
  if (ffi::Error error = call.tensors(operands, results); error.failure()) return error;
  return call.run(std::move(platform), flash3_forward_plan, flash3_forward_run);
}

template <class Platform>
ffi::Error backward(Platform platform, const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results, std::string_view tensors,
                    const Scores& scores, bool deterministic) {
  Call call(kBackwardFields, tensors);
  scores.set(&call.params);
  call.params.deterministic = deterministic;
  if (ffi::Error error = call.tensors(operands, results); error.failure()) return error;
  return call.run(std::move(platform), flash3_backward_plan, flash3_backward_run);
}

// The attributes in the handlers' order, which is Scores' order too.
auto with_attributes(auto binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("tensors")
      .template Attr<float>("softmax_scale")
      .template Attr<bool>("causal")
      .template Attr<int64_t>("window_left")
      .template Attr<int64_t>("window_right")
      .template Attr<float>("softcap")
      .template Attr<int64_t>("chunk");
}
auto on_host() { return with_attributes(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()); }
auto on_cuda() {
  return with_attributes(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::ScratchAllocator>());
}

ffi::Error forward_on_host(const ffi::ThreadPool& pool, const ffi::RemainingArgs& operands,
                           const ffi::RemainingRets& results, std::string_view tensors, float scale,
                           bool causal, int64_t left, int64_t right, float softcap, int64_t chunk,
                           bool compute_fp8, int64_t rotation_seed) {
  return forward(Host(pool), operands, results, tensors,
                 {scale, causal, left, right, softcap, chunk}, compute_fp8, rotation_seed);
}

ffi::Error forward_on_cuda(void* stream, ffi::ScratchAllocator scratch,
                           const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                           std::string_view tensors, float scale, bool causal, int64_t left,
                           int64_t right, float softcap, int64_t chunk, bool compute_fp8,
                           int64_t rotation_seed) {
  return forward(Cuda(stream, &scratch), operands, results, tensors,
                 {scale, causal, left, right, softcap, chunk}, compute_fp8, rotation_seed);
}

ffi::Error backward_on_host(const ffi::ThreadPool& pool, const ffi::RemainingArgs& operands,
                            const ffi::RemainingRets& results, std::string_view tensors,
                            float scale, bool causal, int64_t left, int64_t right, float softcap,
                            int64_t chunk, bool deterministic) {
  return backward(Host(pool), operands, results, tensors,
                  {scale, causal, left, right, softcap, chunk}, deterministic);
}

ffi::Error backward_on_cuda(void* stream, ffi::ScratchAllocator scratch,
                            const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                            std::string_view tensors, float scale, bool causal, int64_t left,
                            int64_t right, float softcap, int64_t chunk, bool deterministic) {
  return backward(Cuda(stream, &scratch), operands, results, tensors,
                  {scale, causal, left, right, softcap, chunk}, deterministic);
}

}  // namespace

// Not among those that XLA may record into a command buffer: a replay would use a workspace that is
// given back when the handler returns.
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_forward_cpu, forward_on_host,
                              on_host().Attr<bool>("compute_fp8").Attr<int64_t>("rotation_seed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_forward_cuda, forward_on_cuda,
                              on_cuda().Attr<bool>("compute_fp8").Attr<int64_t>("rotation_seed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_backward_cpu, backward_on_host,
                              on_host().Attr<bool>("deterministic"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(flash3_jax_backward_cuda, backward_on_cuda,
                              on_cuda().Attr<bool>("deterministic"));

}  // namespace flash3_jax
