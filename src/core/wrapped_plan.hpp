// SPDX-License-Identifier: Apache-2.0
// Plans around the plan of an attention, for what a call also asks for: rows of no token that are
// filled, and the largest logit of each head.
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

// The same call, with the largest logits of its rows at the end of the workspace: [head, row].
struct RowMaxima {
  ForwardProblem attention;
  size_t offset = 0;  // into the workspace
  int64_t rows = 0;   // of a head
};

inline RowMaxima row_maxima(const ForwardProblem& problem, size_t workspace_of_attention) {
  RowMaxima made{.attention = problem};
  const Sequences& q = problem.sequences_q;
  const int64_t stride_batch = q.packed ? 0 : q.rows;
  made.rows = q.packed ? q.rows : problem.batch * q.rows;
  made.offset = workspace_of_attention;
  reserve_workspace(0, &made.offset);
  LseView& rows = made.attention.max_logits;
  rows = {nullptr, true, stride_batch, made.rows};
  if (problem.workspace)
    rows.data = reinterpret_cast<float*>(static_cast<char*>(problem.workspace) + made.offset);
  return made;
}

class HeadMaximaPlan final : public Plan<ForwardProblem> {
 public:
  // attention: null where no row exists and nothing is appended.
  HeadMaximaPlan(const Backend& backend, PlanPointer<ForwardProblem> attention)
      : backend_(backend), attention_(std::move(attention)) {}

  size_t workspace_bytes() const override { return bytes_; }
  void measure(const ForwardProblem& problem) {
    const RowMaxima maxima = row_maxima(problem, bytes_of_attention());
    bytes_ = maxima.offset + static_cast<size_t>(maxima.rows * problem.heads_q) * sizeof(float);
  }

  void explain(const ForwardProblem& problem, Explanation* out) const override {
    if (attention_) attention_->explain(problem, out);
    out->add("max_logits", "those of rows, in the workspace, and then the largest of each head");
  }

  Status launch(const ForwardProblem& problem) const override {
    const RowMaxima maxima = row_maxima(problem, bytes_of_attention());
    if (attention_) FLASH3_CHECK(attention_->launch(maxima.attention));
    // Rows of no token are not written.
    const Padding rows = padding_of_max_logits(maxima.attention);
    if (rows.count > 0 && maxima.rows > 0)
      FLASH3_CHECK(backend_.fill_padding(rows, problem.stream));
    return backend_.max_of_rows(maxima.attention.max_logits, maxima.rows, problem.heads_q,
                                problem.max_logits, problem.stream);
  }

  ScheduleNeeds schedule_needs() const override {
    return attention_ ? attention_->schedule_needs() : ScheduleNeeds{};
  }
  Status make_schedule(const ForwardProblem& problem, void* data) const override {
    return attention_ ? attention_->make_schedule(problem, data) : Status();
  }

 private:
  size_t bytes_of_attention() const { return attention_ ? attention_->workspace_bytes() : 0; }

  const Backend& backend_;
  PlanPointer<ForwardProblem> attention_;
  size_t bytes_ = 0;
};

}  // namespace flash3
