// SPDX-License-Identifier: Apache-2.0
/// @file
/// flash3 for C++20: a header-only layer over flash3.h.
///
///     flash3::forward({.q = q, .k = k, .v = v, .out = out, .causal = true, .stream = stream});
///     flash3::backward({.dout = dout, .q = q, .k = k, .v = v, .out = out, .lse = lse,
///                       .dq = dq, .dk = dk, .dv = dv, .causal = true, .stream = stream});
///
///     flash3::quantize({.k = k, .v = v, .k_out = k8, .v_out = v8, .k_scale = ks, .v_scale = vs});
///
/// Tensors are plain views (flash3::tensor makes one from a pointer and a shape). forward(),
/// backward() and quantize() throw flash3::Error; try_forward() and its siblings return a Result
/// instead. Shapes, rules and units: flash3.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "flash3/flash3.h"

namespace flash3 {

/// A strided view of memory that the caller owns.
using Tensor = flash3_tensor;

/// What went wrong: a code and a sentence.
class Error : public std::runtime_error {
 public:
  /// From what a C function returned and flash3_last_error() says of it.
  Error(flash3_status code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  /// Anything but FLASH3_OK.
  flash3_status code() const noexcept { return code_; }

 private:
  flash3_status code_;
};

/// The outcome of a try_ call; true if it went well.
class [[nodiscard]] Result {
 public:
  /// A call that went well.
  Result() = default;
  /// What a C function returned, with flash3_last_error() if it failed.
  explicit Result(flash3_status code)
      : code_(code), message_(code == FLASH3_OK ? "" : flash3_last_error()) {}
  /// True if the call went well.
  explicit operator bool() const noexcept { return code_ == FLASH3_OK; }
  /// FLASH3_OK, or the kind of error.
  flash3_status code() const noexcept { return code_; }
  /// The sentence that goes with an error; otherwise empty.
  const std::string& message() const noexcept { return message_; }
  /// Throws an Error if the call failed.
  void or_throw() const {
    if (code_ != FLASH3_OK) throw Error(code_, message_);
  }

 private:
  flash3_status code_ = FLASH3_OK;
  std::string message_;
};

/// A contiguous tensor, for instance tensor(p, FLASH3_BFLOAT16, {batch, seq, heads, dim}).
inline Tensor tensor(void* data, flash3_dtype dtype, std::array<int64_t, 4> shape) {
  Tensor t{data, dtype, 4, {shape[0], shape[1], shape[2], shape[3]}, {0, 0, 0, 1}};
  for (int i = 2; i >= 0; --i) t.stride[i] = t.stride[i + 1] * t.shape[i + 1];
  return t;
}

/// A contiguous [batch, heads, seq] float32 tensor for the log-sum-exp.
inline Tensor lse_tensor(float* data, int64_t batch, int64_t heads, int64_t seq) {
  return Tensor{data, FLASH3_FLOAT32, 3, {batch, heads, seq, 0}, {heads * seq, seq, 1, 0}};
}

/// A contiguous [total, heads, dim] tensor of a ragged batch: q, k, v, out.
inline Tensor packed_tensor(void* data, flash3_dtype dtype, std::array<int64_t, 3> shape) {
  return Tensor{
      data, dtype, 3, {shape[0], shape[1], shape[2], 0}, {shape[1] * shape[2], shape[2], 1, 0}};
}
/// A contiguous [heads, total] float32 tensor for the log-sum-exp of a ragged batch.
inline Tensor packed_lse_tensor(float* data, int64_t heads, int64_t total) {
  return Tensor{data, FLASH3_FLOAT32, 2, {heads, total, 0, 0}, {total, 1, 0, 0}};
}

/// One dimension of int32: cu_seqlens and seqused.
inline Tensor index_tensor(const int32_t* data, int64_t size) {
  return Tensor{const_cast<int32_t*>(data), FLASH3_INT32, 1, {size, 0, 0, 0}, {1, 0, 0, 0}};
}
/// [heads], float32 or the dtype of out.
inline Tensor sink_tensor(void* data, flash3_dtype dtype, int64_t heads) {
  return Tensor{data, dtype, 1, {heads, 0, 0, 0}, {1, 0, 0, 0}};
}

/// The scale of an FP8 tensor: [1], one for all of it.
inline Tensor scale_tensor(float* data) {
  return Tensor{data, FLASH3_FLOAT32, 1, {1, 0, 0, 0}, {1, 0, 0, 0}};
}
/// Scales of an FP8 tensor: [batch, heads_k], one for each sequence and KV head.
inline Tensor scale_tensor(float* data, int64_t batch, int64_t heads_k) {
  return Tensor{data, FLASH3_FLOAT32, 2, {batch, heads_k, 0, 0}, {heads_k, 1, 0, 0}};
}
/// Scales of an FP8 tensor: [batch, heads, blocks], one for each scale_blocks() of tokens (packed:
/// batch 1, and scale_blocks_packed() of them).
inline Tensor scale_tensor(float* data, int64_t batch, int64_t heads, int64_t blocks) {
  return Tensor{data, FLASH3_FLOAT32, 3, {batch, heads, blocks, 0}, {heads * blocks, blocks, 1, 0}};
}
/// The blocks of FLASH3_FP8_BLOCK tokens that a sequence has.
inline int64_t scale_blocks(int64_t seq) { return (seq + FLASH3_FP8_BLOCK - 1) / FLASH3_FP8_BLOCK; }
/// The blocks of FLASH3_FP8_BLOCK tokens that a packed batch has.
inline int64_t scale_blocks_packed(int64_t total, int64_t batch) {
  return total / FLASH3_FP8_BLOCK + batch;
}

/// [batch, heads, seq, dim] memory seen as [batch, seq, heads, dim].
inline Tensor heads_first(Tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

namespace detail {

// The options that forward and backward have.
template <class Args, class Params>
void set_options(const Args& args, Params& p) {
  p.softmax_scale = args.softmax_scale.value_or(0.f);
  p.causal = args.causal;
  p.window = args.window_left.has_value() || args.window_right.has_value();
  p.window_left = args.window_left.value_or(-1);
  p.window_right = args.window_right.value_or(-1);
  p.chunk = args.chunk;
  p.softcap = args.softcap;
  p.sink = args.sink;
}

// What every call has.
template <class Args, class Params>
void set_sequences_and_context(const Args& args, Params& p) {
  p.cu_seqlens_q = args.cu_seqlens_q, p.cu_seqlens_k = args.cu_seqlens_k;
  p.seqused_q = args.seqused_q, p.seqused_k = args.seqused_k;
  p.max_seqlen_q = args.max_seqlen_q, p.max_seqlen_k = args.max_seqlen_k;
  p.backend = args.backend;
  p.num_threads = args.num_threads;
  p.stream = args.stream;
  p.workspace = args.workspace;
  p.workspace_size = args.workspace_size;
}

}  // namespace detail

/// The arguments of a forward call; unset optionals take the default in flash3.h.
struct Forward {
  /// @{ @name Fields

  /// The field of this name in flash3_forward_params.
  Tensor q{}, k{}, v{}, out{};
  Tensor lse{};                             // not wanted unless set
  std::optional<float> softmax_scale = {};  // unset or 0: 1/√head_dim
  bool causal = false;
  std::optional<int64_t> window_left = {}, window_right = {};  // unbounded
  int64_t chunk = 0;                                           // none
  float softcap = 0.f;                                         // none
  Tensor sink{};                                               // none
  Tensor cu_seqlens_q{}, cu_seqlens_k{};                       // not packed unless set
  Tensor seqused_q{}, seqused_k{};                             // every token counts unless set
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;                  // not known
  Tensor q_scale{}, k_scale{}, v_scale{};                      // of FP8 tensors; 1 unless set
  flash3_compute compute = FLASH3_COMPUTE_AS_GIVEN;
  uint64_t rotation_seed = 0;  // of FLASH3_COMPUTE_FP8
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_forward_params params() const {
    flash3_forward_params p{};
    p.struct_size = sizeof p;
    p.q = q, p.k = k, p.v = v, p.out = out, p.lse = lse;
    detail::set_options(*this, p);
    detail::set_sequences_and_context(*this, p);
    p.q_scale = q_scale, p.k_scale = k_scale, p.v_scale = v_scale;
    p.compute = compute;
    p.rotation_seed = rotation_seed;
    return p;
  }
};

/// The arguments of a backward call; unset optionals take the default in flash3.h. q, k, v, out and
/// lse, and every option of the mask, are those of the forward call.
struct Backward {
  /// @{ @name Fields

  /// The field of this name in flash3_backward_params.
  Tensor dout{};
  Tensor dlse{};  // zero unless set
  Tensor q{}, k{}, v{}, out{}, lse{};
  Tensor dq{}, dk{}, dv{};
  Tensor dsink{};                           // not wanted unless set
  std::optional<float> softmax_scale = {};  // unset or 0: 1/√head_dim
  bool causal = false;
  bool deterministic = false;
  std::optional<int64_t> window_left = {}, window_right = {};  // unbounded
  int64_t chunk = 0;                                           // none
  float softcap = 0.f;                                         // none
  Tensor sink{};                                               // none
  Tensor cu_seqlens_q{}, cu_seqlens_k{};                       // not packed unless set
  Tensor seqused_q{}, seqused_k{};                             // every token counts unless set
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;                  // not known
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_backward_params params() const {
    flash3_backward_params p{};
    p.struct_size = sizeof p;
    p.dout = dout, p.dlse = dlse;
    p.q = q, p.k = k, p.v = v, p.out = out, p.lse = lse;
    p.dq = dq, p.dk = dk, p.dv = dv;
    p.dsink = dsink;
    detail::set_options(*this, p);
    detail::set_sequences_and_context(*this, p);
    p.deterministic = deterministic;
    return p;
  }
};

/// The arguments of a call that brings q, k and v to FP8; of each that is set, its _out and _scale
/// are too.
struct Quantize {
  /// @{ @name Fields

  /// The field of this name in flash3_quantize_params.
  Tensor q{}, k{}, v{};
  Tensor q_out{}, k_out{}, v_out{};
  Tensor q_scale{}, k_scale{}, v_scale{};
  bool rotate = false;
  uint64_t rotation_seed = 0;
  Tensor rotary_cos{}, rotary_sin{};  // none
  bool rotary_interleaved = false;
  int64_t rotary_offset_q = 0, rotary_offset_k = 0;
  Tensor cu_seqlens_q{}, cu_seqlens_k{};       // not packed unless set
  Tensor seqused_q{}, seqused_k{};             // every token counts unless set
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // not known
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_quantize_params params() const {
    flash3_quantize_params p{};
    p.struct_size = sizeof p;
    p.q = q, p.k = k, p.v = v;
    p.q_out = q_out, p.k_out = k_out, p.v_out = v_out;
    p.q_scale = q_scale, p.k_scale = k_scale, p.v_scale = v_scale;
    p.rotate = rotate;
    p.rotation_seed = rotation_seed;
    p.rotary_cos = rotary_cos, p.rotary_sin = rotary_sin;
    p.rotary_interleaved = rotary_interleaved;
    p.rotary_offset_q = rotary_offset_q, p.rotary_offset_k = rotary_offset_k;
    detail::set_sequences_and_context(*this, p);
    return p;
  }
};

namespace detail {

// The four C functions of each kind of call.
inline flash3_status run(const flash3_forward_params* p) { return flash3_forward(p); }
inline flash3_status run(const flash3_backward_params* p) { return flash3_backward(p); }
inline flash3_status run(const flash3_quantize_params* p) { return flash3_quantize(p); }
inline flash3_status supported(const flash3_forward_params* p) {
  return flash3_forward_supported(p);
}
inline flash3_status supported(const flash3_backward_params* p) {
  return flash3_backward_supported(p);
}
inline flash3_status supported(const flash3_quantize_params* p) {
  return flash3_quantize_supported(p);
}
inline flash3_status workspace(const flash3_forward_params* p, size_t* bytes) {
  return flash3_forward_workspace(p, bytes);
}
inline flash3_status workspace(const flash3_backward_params* p, size_t* bytes) {
  return flash3_backward_workspace(p, bytes);
}
inline flash3_status workspace(const flash3_quantize_params* p, size_t* bytes) {
  return flash3_quantize_workspace(p, bytes);
}
inline flash3_status explain(const flash3_forward_params* p, char* buffer, size_t* size) {
  return flash3_forward_explain(p, buffer, size);
}
inline flash3_status explain(const flash3_backward_params* p, char* buffer, size_t* size) {
  return flash3_backward_explain(p, buffer, size);
}
inline flash3_status explain(const flash3_quantize_params* p, char* buffer, size_t* size) {
  return flash3_quantize_explain(p, buffer, size);
}

template <class Args>
Result try_run(const Args& args) {
  const auto p = args.params();
  return Result(run(&p));
}

template <class Args>
Result supported_of(const Args& args) {
  const auto p = args.params();
  return Result(supported(&p));
}

template <class Args>
size_t workspace_of(const Args& args) {
  const auto p = args.params();
  size_t bytes = 0;
  Result(workspace(&p, &bytes)).or_throw();
  return bytes;
}

template <class Ask>
std::string text_of(const Ask& ask) {
  size_t size = 0;
  Result(ask(nullptr, &size)).or_throw();
  std::string text(size, '\0');
  Result(ask(text.data(), &size)).or_throw();
  text.resize(size - 1);  // the final NUL
  return text;
}

template <class Args>
std::string explain_of(const Args& args) {
  const auto p = args.params();
  return text_of([&p](char* buffer, size_t* size) { return explain(&p, buffer, size); });
}

}  // namespace detail

/// @{ @name Calls that return a Result

/// Runs the call; the Result says how it went.
inline Result try_forward(const Forward& args) { return detail::try_run(args); }
inline Result try_backward(const Backward& args) { return detail::try_run(args); }
inline Result try_quantize(const Quantize& args) { return detail::try_run(args); }
/// @}

/// @{ @name Calls that throw

/// Runs the call; throws an Error if it fails.
inline void forward(const Forward& args) { try_forward(args).or_throw(); }
inline void backward(const Backward& args) { try_backward(args).or_throw(); }
inline void quantize(const Quantize& args) { try_quantize(args).or_throw(); }
/// @}

/// @{ @name Questions: would it run

/// OK if the call would run, else the reason.
inline Result supported(const Forward& args) { return detail::supported_of(args); }
inline Result supported(const Backward& args) { return detail::supported_of(args); }
inline Result supported(const Quantize& args) { return detail::supported_of(args); }
/// @}

/// @{ @name Questions: bytes of workspace

/// Bytes of workspace that the call needs.
inline size_t workspace(const Forward& args) { return detail::workspace_of(args); }
inline size_t workspace(const Backward& args) { return detail::workspace_of(args); }
inline size_t workspace(const Quantize& args) { return detail::workspace_of(args); }
/// @}

/// @{ @name Questions: which kernel

/// Which kernel runs and why, as lines of "name: value".
inline std::string explain(const Forward& args) { return detail::explain_of(args); }
inline std::string explain(const Backward& args) { return detail::explain_of(args); }
inline std::string explain(const Quantize& args) { return detail::explain_of(args); }
/// @}

}  // namespace flash3
