// SPDX-License-Identifier: Apache-2.0
/// @file
/// flash3 for C++20: a header-only layer over flash3.h.
///
///     flash3::forward({.q = q, .k = k, .v = v, .out = out, .causal = true, .stream = stream});
///     flash3::backward({.dout = dout, .q = q, .k = k, .v = v, .out = out, .lse = lse,
///                       .dq = dq, .dk = dk, .dv = dv, .causal = true, .stream = stream});
///
///     flash3::quantize({.k = k, .v = v, .k_out = k8, .v_out = v8, .k_scale = ks, .v_scale = vs});
///     flash3::merge({.out_parts = parts, .lse_parts = lse_parts, .out = out, .lse = lse});
///
/// Tensors are plain views (flash3::tensor makes one from a pointer and a shape). forward(),
/// backward(), quantize() and merge() throw flash3::Error; try_forward() and its siblings return a
/// Result instead. Without exceptions (-fno-exceptions) only those that return a Result are there.
/// Shapes, rules and units: flash3.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "flash3/flash3.h"
#include "flash3/result.hpp"
#include "flash3/tensors.hpp"

namespace flash3 {
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
void set_context(const Args& args, Params& p) {
  p.backend = args.backend;
  p.num_threads = args.num_threads;
  p.stream = args.stream;
  p.workspace = args.workspace;
  p.workspace_size = args.workspace_size;
}

template <class Args, class Params>
void set_sequences_and_context(const Args& args, Params& p) {
  p.cu_seqlens_q = args.cu_seqlens_q, p.cu_seqlens_k = args.cu_seqlens_k;
  p.seqused_q = args.seqused_q, p.seqused_k = args.seqused_k;
  p.max_seqlen_q = args.max_seqlen_q, p.max_seqlen_k = args.max_seqlen_k;
  set_context(args, p);
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
  uint64_t rotation_seed = 0;                           // of FLASH3_COMPUTE_FP8, or rotate
  Tensor page_table{}, cache_batch_idx{}, leftpad_k{};  // k and v are no cache unless set
  Tensor k_new{}, v_new{}, cu_seqlens_k_new{};          // nothing is appended unless set
  Tensor rotary_cos{}, rotary_sin{}, rotary_offsets{};  // none
  bool rotary_interleaved = false;
  int sm_margin = 0;
  const flash3_schedule* schedule = nullptr;  // the call makes its own
  flash3_fp8_sums fp8_sums = FLASH3_FP8_SUMS_AUTO;
  Tensor tree_mask{};  // none
  bool rotate = false;
  bool fill_padding = false;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  Tensor qv{};  // none
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
    p.page_table = page_table, p.cache_batch_idx = cache_batch_idx, p.leftpad_k = leftpad_k;
    p.k_new = k_new, p.v_new = v_new, p.cu_seqlens_k_new = cu_seqlens_k_new;
    p.rotary_cos = rotary_cos, p.rotary_sin = rotary_sin, p.rotary_offsets = rotary_offsets;
    p.rotary_interleaved = rotary_interleaved;
    p.sm_margin = sm_margin;
    p.schedule = schedule;
    p.qv = qv;
    p.fp8_sums = fp8_sums;
    p.tree_mask = tree_mask;
    p.rotate = rotate;
    p.fill_padding = fill_padding;
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
  bool fill_padding = false;
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
    p.fill_padding = fill_padding;
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

/// The arguments of a merge of parts.
struct Merge {
  /// @{ @name Fields

  /// The field of this name in flash3_merge_params.
  Tensor out_parts{}, lse_parts{}, out{};
  Tensor lse{};   // not wanted unless set
  Tensor sink{};  // none
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  /// @}

  /// The C struct of this call.
  flash3_merge_params params() const {
    flash3_merge_params p{};
    p.struct_size = sizeof p;
    p.out_parts = out_parts, p.lse_parts = lse_parts;
    p.out = out, p.lse = lse, p.sink = sink;
    detail::set_context(*this, p);
    return p;
  }
};

namespace detail {

// The four C functions of each kind of call.
inline flash3_status run(const flash3_forward_params* p) { return flash3_forward(p); }
inline flash3_status run(const flash3_backward_params* p) { return flash3_backward(p); }
inline flash3_status run(const flash3_quantize_params* p) { return flash3_quantize(p); }
inline flash3_status run(const flash3_merge_params* p) { return flash3_merge(p); }
inline flash3_status supported(const flash3_forward_params* p) {
  return flash3_forward_supported(p);
}
inline flash3_status supported(const flash3_backward_params* p) {
  return flash3_backward_supported(p);
}
inline flash3_status supported(const flash3_quantize_params* p) {
  return flash3_quantize_supported(p);
}
inline flash3_status supported(const flash3_merge_params* p) { return flash3_merge_supported(p); }
inline flash3_status workspace(const flash3_forward_params* p, size_t* bytes) {
  return flash3_forward_workspace(p, bytes);
}
inline flash3_status workspace(const flash3_backward_params* p, size_t* bytes) {
  return flash3_backward_workspace(p, bytes);
}
inline flash3_status workspace(const flash3_quantize_params* p, size_t* bytes) {
  return flash3_quantize_workspace(p, bytes);
}
inline flash3_status workspace(const flash3_merge_params* p, size_t* bytes) {
  return flash3_merge_workspace(p, bytes);
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
inline flash3_status explain(const flash3_merge_params* p, char* buffer, size_t* size) {
  return flash3_merge_explain(p, buffer, size);
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
Result workspace_of(const Args& args, size_t* bytes) {
  const auto p = args.params();
  return Result(workspace(&p, bytes));
}

template <class Ask>
Result text_of(const Ask& ask, std::string* text) {
  size_t size = 0;
  if (Result failed(ask(nullptr, &size)); !failed) return failed;
  std::string found(size, '\0');
  if (Result failed(ask(found.data(), &size)); !failed) return failed;
  found.resize(size - 1);  // the final NUL
  *text = std::move(found);
  return {};
}

template <class Args>
Result explain_of(const Args& args, std::string* text) {
  const auto p = args.params();
  return text_of([&p](char* buffer, size_t* size) { return explain(&p, buffer, size); }, text);
}

}  // namespace detail

/// @{ @name Calls that return a Result

/// Runs the call; the Result says how it went.
inline Result try_forward(const Forward& args) { return detail::try_run(args); }
inline Result try_backward(const Backward& args) { return detail::try_run(args); }
inline Result try_quantize(const Quantize& args) { return detail::try_run(args); }
inline Result try_merge(const Merge& args) { return detail::try_run(args); }
/// @}

/// @{ @name Questions: would it run

/// OK if the call would run, else the reason.
inline Result supported(const Forward& args) { return detail::supported_of(args); }
inline Result supported(const Backward& args) { return detail::supported_of(args); }
inline Result supported(const Quantize& args) { return detail::supported_of(args); }
inline Result supported(const Merge& args) { return detail::supported_of(args); }
/// @}

/// @{ @name Questions that return a Result

/// Finds the bytes of workspace that the call needs; sets nothing if it fails.
inline Result try_workspace(const Forward& args, size_t* bytes) {
  return detail::workspace_of(args, bytes);
}
inline Result try_workspace(const Backward& args, size_t* bytes) {
  return detail::workspace_of(args, bytes);
}
inline Result try_workspace(const Quantize& args, size_t* bytes) {
  return detail::workspace_of(args, bytes);
}
inline Result try_workspace(const Merge& args, size_t* bytes) {
  return detail::workspace_of(args, bytes);
}

/// Finds which kernel runs and why, as lines of "name: value"; sets nothing if it fails.
inline Result try_explain(const Forward& args, std::string* text) {
  return detail::explain_of(args, text);
}
inline Result try_explain(const Backward& args, std::string* text) {
  return detail::explain_of(args, text);
}
inline Result try_explain(const Quantize& args, std::string* text) {
  return detail::explain_of(args, text);
}
inline Result try_explain(const Merge& args, std::string* text) {
  return detail::explain_of(args, text);
}
/// @}

#if FLASH3_EXCEPTIONS

namespace detail {

template <class Args>
size_t workspace_or_throw(const Args& args) {
  return or_throw<size_t>([&](size_t* bytes) { return workspace_of(args, bytes); });
}

template <class Args>
std::string explain_or_throw(const Args& args) {
  return or_throw<std::string>([&](std::string* text) { return explain_of(args, text); });
}

}  // namespace detail

/// @{ @name Calls that throw

/// Runs the call; throws an Error if it fails.
inline void forward(const Forward& args) { try_forward(args).or_throw(); }
inline void backward(const Backward& args) { try_backward(args).or_throw(); }
inline void quantize(const Quantize& args) { try_quantize(args).or_throw(); }
inline void merge(const Merge& args) { try_merge(args).or_throw(); }
/// @}

/// @{ @name Questions that throw

/// Bytes of workspace that the call needs; throws an Error if it could not run.
inline size_t workspace(const Forward& args) { return detail::workspace_or_throw(args); }
inline size_t workspace(const Backward& args) { return detail::workspace_or_throw(args); }
inline size_t workspace(const Quantize& args) { return detail::workspace_or_throw(args); }
inline size_t workspace(const Merge& args) { return detail::workspace_or_throw(args); }

/// Which kernel runs and why, as lines of "name: value"; throws an Error if the call could not run.
inline std::string explain(const Forward& args) { return detail::explain_or_throw(args); }
inline std::string explain(const Backward& args) { return detail::explain_or_throw(args); }
inline std::string explain(const Quantize& args) { return detail::explain_or_throw(args); }
inline std::string explain(const Merge& args) { return detail::explain_or_throw(args); }
/// @}

#endif  // FLASH3_EXCEPTIONS

}  // namespace flash3
