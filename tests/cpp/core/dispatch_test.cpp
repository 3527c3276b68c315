// SPDX-License-Identifier: Apache-2.0
// The registry, the choice of a backend, and the workspace rules. The registry is the real one:
// these tests hold with and without the Hopper backend, and with and without a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "call.hpp"
#include "core/backend.hpp"

namespace flash3::test {
namespace {

TEST(Registry, HoldsWhatIsBuiltIn) {
  ASSERT_FALSE(backends().empty());
  EXPECT_EQ(backends().back(), find_backend(FLASH3_BACKEND_CPU));
  EXPECT_EQ(backends().size(), find_backend(FLASH3_BACKEND_HOPPER) ? 2u : 1u);
  EXPECT_EQ(find_backend(FLASH3_BACKEND_AUTO), nullptr);
  for (const Backend* backend : backends())
    EXPECT_STREQ(backend->name(), backend_name(backend->id()));
}

TEST(Select, CpuByName) {
  Call call;
  call.args.backend = FLASH3_BACKEND_CPU;
  PlannedCall<ForwardProblem> planned;
  const ForwardProblem problem = problem_of(call.args, Pointers::kOptional);
  const Status status = plan_call(problem, problem.backend, &planned);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(planned.backend, find_backend(FLASH3_BACKEND_CPU));
}

TEST(Select, AutoTakesTheCpuForHostMemory) {
  Call call;
  PlannedCall<ForwardProblem> planned;
  const ForwardProblem problem = problem_of(call.args, Pointers::kOptional);
  const Status status = plan_call(problem, problem.backend, &planned);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(planned.backend->id(), FLASH3_BACKEND_CPU);
}

// Without memory to look at, auto takes the best backend that is here.
TEST(Select, AutoAnswersQuestionsWithoutMemory) {
  Forward args;
  args.q = args.k = args.v = args.out = tensor(nullptr, FLASH3_BFLOAT16, {1, 256, 4, 128});
  const Backend* best = nullptr;
  PlannedCall<ForwardProblem> planned;
  ASSERT_TRUE(plan_call(problem_of(args, Pointers::kOptional), FLASH3_BACKEND_AUTO, &planned).ok());
  ASSERT_TRUE(available_backend(FLASH3_BACKEND_AUTO, &best).ok());
  EXPECT_EQ(planned.backend, best);
}

TEST(Select, HopperByNameTellsWhyNot) {
  Call call;
  call.args.backend = FLASH3_BACKEND_HOPPER;
  const auto p = call.params();
  const Backend* hopper = find_backend(FLASH3_BACKEND_HOPPER);
  const flash3_status code = flash3_forward(&p);
  const std::string message = flash3_last_error();
  if (!hopper) {
    EXPECT_EQ(code, FLASH3_UNSUPPORTED);
    EXPECT_EQ(message,
              "the hopper backend is not built into this library; configure it with "
              "-DFLASH3_HOPPER=ON, which needs a CUDA toolkit >= 12.8");
  } else if (const Status available = hopper->available(); !available.ok()) {
    EXPECT_EQ(code, available.code());
    EXPECT_EQ(message, available.message());
    EXPECT_NE(message, "");
  } else {
    EXPECT_EQ(code, FLASH3_INVALID_ARGUMENT);
    EXPECT_EQ(message, "q.data is host memory, which the hopper backend cannot read");
  }
  for (const float x : call.out) ASSERT_EQ(x, Call::kUntouched);

  EXPECT_EQ(flash3_backend_available(FLASH3_BACKEND_HOPPER),
            hopper ? hopper->available().code() : FLASH3_UNSUPPORTED);
}

// A backend that can access all memory but one address.
class PickyBackend : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }
  Status available() const override { return {}; }
  std::string describe() const override { return "picky"; }
  Status can_access(const void* address, bool* accessible) const override {
    *accessible = address != forbidden;
    return {};
  }
  Status plan(const ForwardProblem&, PlanPointer<ForwardProblem>*) const override { return {}; }
  Status plan(const BackwardProblem&, PlanPointer<BackwardProblem>*) const override { return {}; }
  Status plan(const QuantizeProblem&, PlanPointer<QuantizeProblem>*) const override { return {}; }
  Status plan(const MergeProblem&, PlanPointer<MergeProblem>*) const override { return {}; }
  Status make_mask(const MaskProblem&) const override { return {}; }
  Status read_mask_counts(const MaskShape&, const void*, void*, MaskCounts*) const override {
    return {};
  }
  Status fill_padding(const Padding&, void*) const override { return {}; }
  Status max_of_rows(const LseView&, int64_t, int64_t, const LseView&, void*) const override {
    return {};
  }

  const void* forbidden = nullptr;
};

template <AnyProblem P>
class PickyPlan : public Plan<P> {
 public:
  explicit PickyPlan(size_t needed) : needed_(needed) {}
  size_t workspace_bytes() const override { return needed_; }
  void explain(const P&, Explanation*) const override {}
  Status launch(const P&) const override { return {}; }

 private:
  size_t needed_;
};

template <AnyProblem P>
PlannedCall<P> picky_call(const PickyBackend& backend, size_t needed) {
  return {&backend, std::make_unique<PickyPlan<P>>(needed)};
}

TEST(Workspace, Rules) {
  alignas(256) static unsigned char memory[2048];
  PickyBackend backend;
  ForwardProblem problem;
  PlannedCall<ForwardProblem> call = picky_call<ForwardProblem>(backend, 1024);
  const auto sentence = [&] { return check_workspace(problem, call).message(); };

  EXPECT_EQ(sentence(),
            "workspace is null but this call needs 1024 bytes, as flash3_forward_workspace tells");
  problem.workspace = memory;
  EXPECT_EQ(sentence(),
            "workspace_size = 0 but this call needs 1024 bytes, as flash3_forward_workspace tells");
  problem.workspace_size = 1023;
  EXPECT_EQ(
      sentence(),
      "workspace_size = 1023 but this call needs 1024 bytes, as flash3_forward_workspace tells");
  problem.workspace_size = 1024;
  EXPECT_TRUE(check_workspace(problem, call).ok());

  problem.workspace = memory + 128;
  EXPECT_EQ(check_workspace(problem, call).code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(sentence().substr(0, 14), "workspace = 0x");
  EXPECT_NE(sentence().find("80 but it must be a multiple of 256"), std::string::npos)
      << sentence();

  problem.workspace = memory;
  backend.forbidden = memory;
  EXPECT_EQ(check_workspace(problem, call).code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(sentence(), "workspace is host memory, which the hopper backend cannot use");

  call = picky_call<ForwardProblem>(backend, 0);  // then it is not looked at
  EXPECT_TRUE(check_workspace(problem, call).ok());
  problem.workspace = nullptr, problem.workspace_size = 0;
  EXPECT_TRUE(check_workspace(problem, call).ok());
}

TEST(Workspace, BackwardNamesItsOwnFunction) {
  PickyBackend backend;
  BackwardProblem problem;
  EXPECT_EQ(check_workspace(problem, picky_call<BackwardProblem>(backend, 1024)).message(),
            "workspace is null but this call needs 1024 bytes, as flash3_backward_workspace tells");
}

}  // namespace
}  // namespace flash3::test
