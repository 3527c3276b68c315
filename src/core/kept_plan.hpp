// SPDX-License-Identifier: Apache-2.0
// flash3_plan: a plan that its caller keeps, and runs with other addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/backend.hpp"
#include "core/pointers.hpp"
#include "flash3/plan.h"

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

}  // namespace flash3
