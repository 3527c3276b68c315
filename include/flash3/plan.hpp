// SPDX-License-Identifier: Apache-2.0
/** @file
 * flash3 for C++20: plans that the caller keeps, a header-only layer over plan.h.
 *
 *     const flash3::Plan plan(args);  // a flash3::Forward, Backward, Quantize or Merge
 *     args.q = next_q;                // other addresses
 *     plan.run(args);
 */
#pragma once

#include <memory>
#include <string>

#include "flash3/flash3.hpp"
#include "flash3/plan.h"

namespace flash3 {
namespace detail {

inline flash3_status make_plan(const flash3_forward_params* p, flash3_plan** plan) {
  return flash3_forward_plan(p, plan);
}
inline flash3_status make_plan(const flash3_backward_params* p, flash3_plan** plan) {
  return flash3_backward_plan(p, plan);
}
inline flash3_status make_plan(const flash3_quantize_params* p, flash3_plan** plan) {
  return flash3_quantize_plan(p, plan);
}
inline flash3_status make_plan(const flash3_merge_params* p, flash3_plan** plan) {
  return flash3_merge_plan(p, plan);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_forward_params* p) {
  return flash3_forward_run(plan, p);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_backward_params* p) {
  return flash3_backward_run(plan, p);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_quantize_params* p) {
  return flash3_quantize_run(plan, p);
}
inline flash3_status run_plan(const flash3_plan* plan, const flash3_merge_params* p) {
  return flash3_merge_run(plan, p);
}

}  // namespace detail

/// A call's plan, kept (flash3/plan.h): Plan plan(args); plan.run(args) with other addresses,
/// stream and workspace. Args: Forward, Backward, Quantize or Merge. Throws Error.
template <class Args>
class Plan {
 public:
  /// Plans the call; addresses may be left out.
  explicit Plan(const Args& args) {
    const auto p = args.params();
    flash3_plan* made = nullptr;
    Result(detail::make_plan(&p, &made)).or_throw();
    plan_.reset(made);
  }

  /// Bytes of workspace that each run needs.
  size_t workspace() const {
    size_t bytes = 0;
    Result(flash3_plan_workspace(plan_.get(), &bytes)).or_throw();
    return bytes;
  }

  /// Which kernel runs and why, as lines of "name: value".
  std::string explain() const {
    return detail::text_of([this](char* buffer, size_t* size) {
      return flash3_plan_explain(plan_.get(), buffer, size);
    });
  }

  /// Runs the call with the addresses, stream and workspace of args.
  Result try_run(const Args& args) const {
    const auto p = args.params();
    return Result(detail::run_plan(plan_.get(), &p));
  }
  /// try_run(), throwing.
  void run(const Args& args) const { try_run(args).or_throw(); }

 private:
  struct Destroy {
    void operator()(flash3_plan* plan) const { flash3_plan_destroy(plan); }
  };
  std::unique_ptr<flash3_plan, Destroy> plan_;
};

}  // namespace flash3
