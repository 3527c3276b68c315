// SPDX-License-Identifier: Apache-2.0
// A call that also fills rows of no token: the plan of the attention, and what follows it.
#pragma once

#include <utility>

#include "core/backend.hpp"

namespace flash3 {

// The same call, which leaves such rows as they are.
template <HasPadding P>
P without_padding(P problem) {
  problem.fills_padding = false;
  return problem;
}

template <HasPadding P>
class PaddedPlan final : public Plan<P> {
 public:
  // attention: null where the call writes nothing else.
  PaddedPlan(const Backend& backend, PlanPointer<P> attention)
      : backend_(backend), attention_(std::move(attention)) {}

  size_t workspace_bytes() const override { return attention_ ? attention_->workspace_bytes() : 0; }

  void explain(const P& problem, Explanation* out) const override {
    if (attention_) attention_->explain(problem, out);
    out->add("padding", "rows that belong to no token are filled at the end");
  }

  // The rows differ from those of the attention, which checks lengths before it writes anything.
  Status launch(const P& problem) const override {
    if (attention_) FLASH3_CHECK(attention_->launch(without_padding(problem)));
    return backend_.fill_padding(padding_of(problem), problem.stream);
  }

  ScheduleNeeds schedule_needs() const override {
    return attention_ ? attention_->schedule_needs() : ScheduleNeeds{};
  }
  Status make_schedule(const P& problem, void* data) const override {
    return attention_ ? attention_->make_schedule(problem, data) : Status();
  }

 private:
  const Backend& backend_;
  PlanPointer<P> attention_;
};

}  // namespace flash3
