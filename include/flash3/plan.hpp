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
/// stream and workspace. Args: Forward, Backward, Quantize or Merge. Members without try_ throw
/// Error, and are not there without exceptions.
template <class Args>
class Plan {
 public:
  /// No plan yet: every use of it fails but try_plan().
  Plan() = default;
  /// Plans the call; addresses may be left out.
  explicit Plan(const Args& args);

  /// Plans this call instead; addresses may be left out. Leaves the plan as it is if it fails.
  Result try_plan(const Args& args) {
    const auto p = args.params();
    flash3_plan* made = nullptr;
    Result result(detail::make_plan(&p, &made));
    if (result) plan_.reset(made);
    return result;
  }

  /// Bytes of workspace that each run needs.
  size_t workspace() const;
  /// workspace() by a Result; sets nothing if it fails.
  Result try_workspace(size_t* bytes) const {
    return Result(flash3_plan_workspace(plan_.get(), bytes));
  }

  /// Which kernel runs and why, as lines of "name: value".
  std::string explain() const;
  /// explain() by a Result; sets nothing if it fails.
  Result try_explain(std::string* text) const {
    const auto ask = [this](char* buffer, size_t* size) {
      return flash3_plan_explain(plan_.get(), buffer, size);
    };
    return detail::text_of(ask, text);
  }

  /// Runs the call with the addresses, stream and workspace of args.
  Result try_run(const Args& args) const {
    const auto p = args.params();
    return Result(detail::run_plan(plan_.get(), &p));
  }
  /// try_run(), throwing.
  void run(const Args& args) const;

 private:
  struct Destroy {
    void operator()(flash3_plan* plan) const { flash3_plan_destroy(plan); }
  };
  std::unique_ptr<flash3_plan, Destroy> plan_;
};

/// The Args of Plan(args).
template <class Args>
Plan(const Args&) -> Plan<Args>;

#if FLASH3_EXCEPTIONS

template <class Args>
Plan<Args>::Plan(const Args& args) {
  try_plan(args).or_throw();
}

template <class Args>
size_t Plan<Args>::workspace() const {
  return detail::or_throw<size_t>([this](size_t* bytes) { return try_workspace(bytes); });
}

template <class Args>
std::string Plan<Args>::explain() const {
  return detail::or_throw<std::string>([this](std::string* text) { return try_explain(text); });
}

template <class Args>
void Plan<Args>::run(const Args& args) const {
  try_run(args).or_throw();
}

#endif  // FLASH3_EXCEPTIONS

}  // namespace flash3
