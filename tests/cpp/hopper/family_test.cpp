// SPDX-License-Identifier: Apache-2.0
// A second family of kernels beside Hopper's, for GPUs of compute capability 8.0: which of the two
// a device gets. Needs no GPU: devices are pretended, and the second family launches nothing.
#include "cuda/host/family.hpp"

#include <gtest/gtest.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/family.hpp"
#include "cuda/sm90/select.hpp"
#include "planned_steps.hpp"

namespace flash3::cuda {
namespace {

constexpr Device kAmpere{1, 108, {8, 0}}, kHopper{0, 132, {9, 0}}, kBlackwell{2, 148, {10, 0}};

// Calls of the second family's plans.
int explained = 0, launched = 0;

template <AnyProblem P>
class SecondPlan final : public Plan<P> {
 public:
  explicit SecondPlan(const Device& device) : device_(device) {}
  size_t workspace_bytes() const override { return size_t(device_.multiprocessors); }
  void explain(const P&, Explanation* out) const override {
    ++explained;
    out->add("kernel", "second");
  }
  Status launch(const P&) const override {
    ++launched;
    return {};
  }

 private:
  Device device_;
};

template <AnyProblem P>
Status choose_second(const P&, const Device& device, PlanPointer<P>* plan) {
  *plan = std::make_unique<SecondPlan<P>>(device);
  return {};
}

constexpr Family kSecond = {
    .needs = "8.0",
    .takes = [](const Capability& c) { return c == Capability{8, 0}; },
    .forward = choose_second<ForwardProblem>,
    .backward = choose_second<BackwardProblem>,
};

const std::array kFamilies = {&sm90::family(), &kSecond};

const Family* family_of(const Device& device) {
  const Family* family = nullptr;
  const Status status = find_family(kFamilies, device, &family);
  EXPECT_TRUE(status.ok()) << status.message();
  return family;
}

const std::string kCall = "bf16/b1/q64/k64/h2/d64/full";

BackwardProblem backward_problem() {
  const auto params = cases::make_backward_question(cases::parsed(kCall + "/bwd"));
  BackwardProblem problem;
  EXPECT_TRUE(make_backward_problem(&params, Pointers::kOptional, &problem).ok());
  return problem;
}

TEST(Family, FollowsFromTheCapability) {
  EXPECT_EQ(family_of(kHopper), &sm90::family());
  EXPECT_EQ(family_of(kAmpere), &kSecond);
}

TEST(Family, TheSecondIsAskedAndLaunched) {
  explained = launched = 0;
  const auto use = [](const auto& problem, auto choose) {
    PlanPointer<std::remove_cvref_t<decltype(problem)>> plan;
    ASSERT_TRUE(choose(problem, kAmpere, &plan).ok());
    EXPECT_EQ(plan->workspace_bytes(), 108u);
    Explanation lines;
    plan->explain(problem, &lines);
    EXPECT_EQ(lines.text(), "kernel: second\n");
    EXPECT_TRUE(plan->launch(problem).ok());
  };
  use(sm90::problem_of(kCall), family_of(kAmpere)->forward);
  use(backward_problem(), family_of(kAmpere)->backward);
  EXPECT_EQ(explained, 2);
  EXPECT_EQ(launched, 2);
}

TEST(Family, HoppersIsAskedOnHopper) {
  const ForwardProblem problem = sm90::problem_of(kCall);
  PlanPointer<ForwardProblem> plan;
  ASSERT_TRUE(family_of(kHopper)->forward(problem, kHopper, &plan).ok());
  Explanation lines;
  plan->explain(problem, &lines);
  EXPECT_EQ(lines.text().find("kernel: fwd_bf16_d64_full"), 0u) << lines.text();
}

TEST(Family, ADeviceThatNoneTakesIsToldWhatTheyNeed) {
  const auto refusal = [](std::span<const Family* const> families, const Device& device) {
    const Family* family = nullptr;
    const Status status = find_family(families, device, &family);
    EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
    return status.message();
  };
  EXPECT_EQ(refusal(std::span(kFamilies).first(1), {0, 108, {8, 0}}),
            "CUDA device 0 has compute capability 8.0 but the hopper backend needs 9.0");
  EXPECT_EQ(refusal(kFamilies, kBlackwell),
            "CUDA device 2 has compute capability 10.0 but the hopper backend needs 9.0 or 8.0");
}

// ---- what families launch with ----

TEST(Launches, AreEnqueuedInOrderUpToTheFirstThatFails) {
  static std::vector<int> order;
  order.clear();
  Launches launches;
  for (const int i : {1, 2, 3, 4})
    launches.add([i](void* stream) {
      EXPECT_EQ(stream, &order);
      order.push_back(i);
      return i == 3 ? Status(FLASH3_CUDA_ERROR, "the third") : Status();
    });
  EXPECT_TRUE(order.empty()) << "nothing runs before all is there";
  EXPECT_EQ(launches.enqueue(0, &order).message(), "the third");
  EXPECT_EQ(order, (std::vector{1, 2, 3}));
}

TEST(Launches, ParamsBeginAsZerosAndStayWhereTheyAre) {
  struct Params {
    int values[100];
  };
  Launches launches;
  auto& first = launches.make<Params>();
  first.values[99] = 7;
  const auto& second = launches.make<Params>();
  EXPECT_NE(static_cast<const void*>(&first), &second);
  EXPECT_EQ(second.values[99], 0);
  EXPECT_EQ(first.values[99], 7);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(&second) % 64, 0u) << "as tensor maps want it";
}

TEST(Launches, MoreThanThereIsRoomForIsAnError) {
  struct Large {
    std::byte bytes[4096];
  };
  Launches full;
  EXPECT_THROW(for (int i = 0; i < 100; ++i) full.make<Large>(), std::length_error);
  Launches many;
  EXPECT_THROW(for (int i = 0; i < 100; ++i) many.add([](void*) { return Status(); }),
               std::length_error);
}

}  // namespace
}  // namespace flash3::cuda
