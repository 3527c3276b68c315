// SPDX-License-Identifier: Apache-2.0
// The C functions under one name for each kind of call, for code that treats all kinds alike, and
// what the runners of all kinds do with them.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "cases/runner.hpp"
#include "cases/upload.hpp"
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

// What the runners of all kinds of cases do alike: they ask the library before they make tensors,
// give the call a guarded workspace, and time it. A step that fails leaves its reason in the result
// and returns false.

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

template <class Params>
class CheckedCall {
 public:
  CheckedCall(Memory& memory, const RunOptions& options, CheckResult* result)
      : memory_(memory), options_(options), result_(result) {}

  // question: the call without data.
  bool ask(const Params& question) {
    const Params p = on_backend(question);
    return succeeded(supported(p), "_supported");
  }
  // Makes the workspace of the call that run() repeats.
  bool prepare(const Params& params) {
    params_ = on_backend(params);
    size_t bytes = 0;
    if (!succeeded(cases::workspace(params_, &bytes), "_workspace")) return false;
    scratch_ = make_workspace(bytes);
    workspace_.emplace(memory_, scratch_);
    params_.workspace = bytes > 0 ? workspace_->view().data : nullptr;
    params_.workspace_size = bytes;
    return true;
  }
  bool run() {
    const Stopwatch time;
    if (!succeeded(cases::run(params_), "")) return false;
    memory_.finish();
    result_->seconds = time.seconds();
    return true;
  }

  Upload& workspace() { return *workspace_; }
  GuardedTensor downloaded_workspace() const {
    GuardedTensor now = clone(scratch_);
    workspace_->download(&now);
    return now;
  }

 private:
  Params on_backend(Params params) const {
    params.backend = options_.backend;
    params.num_threads = options_.num_threads;
    params.stream = memory_.stream();
    return params;
  }
  bool succeeded(flash3_status status, const char* suffix) {
    if (status != FLASH3_OK)
      result_->failure = std::string(function_name(params_)) + suffix + ": " + flash3_last_error();
    return status == FLASH3_OK;
  }

  Memory& memory_;
  const RunOptions& options_;
  CheckResult* result_;
  Params params_{};
  GuardedTensor scratch_;
  std::optional<Upload> workspace_;  // holds a reference to scratch_
};

}  // namespace flash3::cases
