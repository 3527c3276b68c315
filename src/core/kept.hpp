// SPDX-License-Identifier: Apache-2.0
// What the caller keeps: schedules, plans and masks.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/backend.hpp"
#include "core/mask_checks.hpp"
#include "core/pointers.hpp"
#include "flash3/plan.h"
#include "flash3/schedule.h"

namespace flash3 {

// The key that tells whether an object in the caller's memory is one for a call: FNV-1a (Fowler,
// Noll, Vo) over words of 64 bits.
class Hash {
 public:
  template <std::convertible_to<uint64_t>... Words>
  void add(Words... words) {
    ((hash_ = (hash_ ^ static_cast<uint64_t>(words)) * 0x100000001B3ull), ...);
  }
  // Never 0, which stands for no key; bindings have it in signed integers.
  uint64_t key() const { return (hash_ & INT64_MAX) | 1; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

// ---- schedules (flash3/schedule.h): who may take one, and the making ----

// Whether the schedule that the problem was given, if any, is one for this call.
Status check_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call);

// Whether the memory that a schedule is to be made in lies in no tensor of the call.
Status check_schedule_aliases(const flash3_forward_params* params, const ForwardProblem& problem,
                              const PlannedCall<ForwardProblem>& call,
                              const flash3_schedule& schedule);

// Lists the work of the problem, whose addresses may be missing but for those of lengths, in
// schedule->data.
Status make_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call,
                     flash3_schedule* schedule);

}  // namespace flash3

// ---- flash3_plan: a plan that its caller keeps, and runs with other addresses ----

// What C sees of a kept plan of any kind.
struct flash3_plan {
  virtual ~flash3_plan() = default;
  virtual const char* kind() const = 0;  // "forward", "backward", "quantize" or "merge"
  virtual size_t workspace_bytes() const = 0;
  virtual std::string explain() const = 0;
};

namespace flash3 {

template <AnyProblem P>
inline constexpr const char* kKind = std::same_as<P, ForwardProblem>    ? "forward"
                                     : std::same_as<P, BackwardProblem> ? "backward"
                                     : std::same_as<P, QuantizeProblem> ? "quantize"
                                                                        : "merge";

// A plan of this kind of problem.
template <AnyProblem P>
class KeptPlan final : public flash3_plan {
 public:
  using Params = typename ParamsOf<P>::type;

  // `params` may leave out addresses: they count as aligned to 16 bytes. Fails where no backend can
  // run the call.
  static Status make(const Params* params, std::unique_ptr<flash3_plan>* plan);

  const char* kind() const override { return kKind<P>; }
  size_t workspace_bytes() const override;
  std::string explain() const override;

  // Runs the call with the addresses, stream and workspace of `params`, which must not differ from
  // the plan's in anything else.
  Status run(const Params* params) const;

 private:
  // visit_pointers() over the tensors that the call has: a run of every step asks for no others.
  template <class Problem, class Visit>
  Status visit_given(Problem& problem, const Visit& visit) const;

  void find_compared();
  bool differs_in_addresses_alone(const Params& given) const;
  Status check_same_call(const Params& given) const;
  Status take_addresses(const Params& given, P* problem) const;

  Params params_;
  P problem_;
  uint32_t given_ = 0;  // tensors, a bit each in the order of visit_pointers()
  static_assert(count_tensors<Params>() <= 32);
  // The bytes of params between those that may change from run to run.
  struct Bytes {
    uint16_t begin, end;
  };
  static constexpr size_t kMostCompared = 40;  // a tensor each, four more fields, and the rest
  std::array<Bytes, kMostCompared> compared_{};
  size_t compared_count_ = 0;
  PlannedCall<P> call_;
};

// ---- masks (flash3/mask.h): the making, and who may take one ----

// Whether the mask that the problem was given, if any, is one that this backend made for the device
// that it runs on, and is all there.
Status check_mask(const Problem& problem, const Backend& backend);

Status make_mask(const flash3_mask_params* params, flash3_mask* mask);
// What make_mask() sets, and the size; no memory is needed.
Status describe_mask(const flash3_mask_params* params, flash3_mask* mask);
Status count_mask(const flash3_mask& mask, void* stream, MaskCounts* counts);

}  // namespace flash3
