// SPDX-License-Identifier: Apache-2.0
// What a backend has decided about a problem. A call is planned once: its workspace, its
// explanation and its launch all read the same plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "core/status.hpp"

namespace flash3 {

// "name: value" lines in the order in which they are added.
class Explanation {
 public:
  void add(std::string name, std::string value) {
    lines_.emplace_back(std::move(name), std::move(value));
  }
  // The lines of another, each name with a word before it.
  void add(const std::string& word, const Explanation& other) {
    for (const auto& [name, value] : other.lines_) add(word + " " + name, value);
  }
  std::string text() const {
    std::string out;
    for (const auto& [name, value] : lines_) out += name + ": " + value + "\n";
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

// What a schedule that the caller keeps takes (flash3/schedule.h).
struct ScheduleNeeds {
  size_t bytes = 0;      // 0: the plan has none
  uint64_t variant = 0;  // plans whose schedules differ have different ones
};

// Immutable: many threads may run one plan at once. The problems that it is given differ from the
// one that it was made for in addresses, stream and workspace alone, and no address is aligned
// worse (core/kept.hpp checks that).
template <AnyProblem P>
class Plan {
 public:
  virtual ~Plan() = default;

  virtual size_t workspace_bytes() const = 0;
  virtual void explain(const P& problem, Explanation* out) const = 0;
  // Runs the problem, whose pointers and workspace have been checked (core/dispatch).
  virtual Status launch(const P& problem) const = 0;

  // Lists the work from the lengths alone, so that launch() need not: forward calls of some plans.
  virtual ScheduleNeeds schedule_needs() const { return {}; }
  virtual Status make_schedule(const P&, void*) const { return {}; }
};

template <AnyProblem P>
using PlanPointer = std::unique_ptr<const Plan<P>>;

}  // namespace flash3
