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
#include <string>
#include <utility>

#include "flash3/calls.hpp"
#include "flash3/flash3.h"
#include "flash3/result.hpp"

namespace flash3 {
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
