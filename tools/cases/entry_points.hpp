// SPDX-License-Identifier: Apache-2.0
// The C functions under one name for each kind of call, for code that treats all kinds alike.
#pragma once

#include <cstddef>

#include "flash3/plan.h"

namespace flash3::cases {

inline flash3_status run(const flash3_forward_params& p) { return flash3_forward(&p); }
inline flash3_status run(const flash3_backward_params& p) { return flash3_backward(&p); }
inline flash3_status run(const flash3_quantize_params& p) { return flash3_quantize(&p); }

inline flash3_status supported(const flash3_forward_params& p) {
  return flash3_forward_supported(&p);
}
inline flash3_status supported(const flash3_backward_params& p) {
  return flash3_backward_supported(&p);
}
inline flash3_status supported(const flash3_quantize_params& p) {
  return flash3_quantize_supported(&p);
}

inline flash3_status workspace(const flash3_forward_params& p, size_t* bytes) {
  return flash3_forward_workspace(&p, bytes);
}
inline flash3_status workspace(const flash3_backward_params& p, size_t* bytes) {
  return flash3_backward_workspace(&p, bytes);
}
inline flash3_status workspace(const flash3_quantize_params& p, size_t* bytes) {
  return flash3_quantize_workspace(&p, bytes);
}

inline flash3_status explain(const flash3_forward_params& p, char* text, size_t* size) {
  return flash3_forward_explain(&p, text, size);
}
inline flash3_status explain(const flash3_backward_params& p, char* text, size_t* size) {
  return flash3_backward_explain(&p, text, size);
}
inline flash3_status explain(const flash3_quantize_params& p, char* text, size_t* size) {
  return flash3_quantize_explain(&p, text, size);
}

inline flash3_status make_plan(const flash3_forward_params& p, flash3_plan** plan) {
  return flash3_forward_plan(&p, plan);
}
inline flash3_status make_plan(const flash3_backward_params& p, flash3_plan** plan) {
  return flash3_backward_plan(&p, plan);
}
inline flash3_status make_plan(const flash3_quantize_params& p, flash3_plan** plan) {
  return flash3_quantize_plan(&p, plan);
}

inline flash3_status run_plan(const flash3_plan* plan, const flash3_forward_params& p) {
  return flash3_forward_run(plan, &p);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_backward_params& p) {
  return flash3_backward_run(plan, &p);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_quantize_params& p) {
  return flash3_quantize_run(plan, &p);
}

// The function that run() calls.
inline const char* function_name(const flash3_forward_params&) { return "flash3_forward"; }
inline const char* function_name(const flash3_backward_params&) { return "flash3_backward"; }
inline const char* function_name(const flash3_quantize_params&) { return "flash3_quantize"; }

}  // namespace flash3::cases
