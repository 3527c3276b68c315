// SPDX-License-Identifier: Apache-2.0
// The registry, the choice of a backend, and the workspace rules. The registry is the real one:
// these tests hold with and without the Hopper backend, and with and without a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "call.hpp"
#include "core/backend.hpp"
#include "core/problem.hpp"

namespace flash3::test {
namespace {

ForwardProblem problem_of(const Forward& args) {
  const auto p = args.params();
  ForwardProblem problem;
  const Status status = make_forward_problem(&p, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

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
  const Backend* backend = nullptr;
  const Status status = select_backend(problem_of(call.args), &backend);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(backend, find_backend(FLASH3_BACKEND_CPU));
}

TEST(Select, AutoTakesTheCpuForHostMemory) {
  Call call;
  const Backend* backend = nullptr;
  const Status status = select_backend(problem_of(call.args), &backend);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(backend->id(), FLASH3_BACKEND_CPU);
}

// Without memory to look at, auto takes the best backend that is here.
TEST(Select, AutoAnswersQuestionsWithoutMemory) {
  Forward args;
  args.q = args.k = args.v = args.out = tensor(nullptr, FLASH3_BFLOAT16, {1, 256, 4, 128});
  const Backend *backend = nullptr, *best = nullptr;
  ASSERT_TRUE(select_backend(problem_of(args), &backend).ok());
  ASSERT_TRUE(available_backend(FLASH3_BACKEND_AUTO, &best).ok());
  EXPECT_EQ(backend, best);
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

// A backend that needs a workspace and that can access all memory but one address.
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
  Status supports(const ForwardProblem&) const override { return {}; }
  size_t workspace_size(const ForwardProblem&) const override { return needed; }
  void explain(const ForwardProblem&, Explanation*) const override {}
  Status forward(const ForwardProblem&) const override { return {}; }
  Status supports(const BackwardProblem&) const override { return {}; }
  size_t workspace_size(const BackwardProblem&) const override { return needed; }
  void explain(const BackwardProblem&, Explanation*) const override {}
  Status backward(const BackwardProblem&) const override { return {}; }
  Status supports(const QuantizeProblem&) const override { return {}; }
  size_t workspace_size(const QuantizeProblem&) const override { return needed; }
  void explain(const QuantizeProblem&, Explanation*) const override {}
  Status quantize(const QuantizeProblem&) const override { return {}; }

  size_t needed = 1024;
  const void* forbidden = nullptr;
};

TEST(Workspace, Rules) {
  alignas(256) static unsigned char memory[2048];
  PickyBackend backend;
  ForwardProblem problem;
  const auto sentence = [&] { return check_workspace(problem, backend).message(); };

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
  EXPECT_TRUE(check_workspace(problem, backend).ok());

  problem.workspace = memory + 128;
  EXPECT_EQ(check_workspace(problem, backend).code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(sentence().substr(0, 14), "workspace = 0x");
  EXPECT_NE(sentence().find("80 but it must be a multiple of 256"), std::string::npos)
      << sentence();

  problem.workspace = memory;
  backend.forbidden = memory;
  EXPECT_EQ(check_workspace(problem, backend).code(), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(sentence(), "workspace is host memory, which the hopper backend cannot use");

  backend.needed = 0;  // then it is not looked at
  EXPECT_TRUE(check_workspace(problem, backend).ok());
  problem.workspace = nullptr, problem.workspace_size = 0;
  EXPECT_TRUE(check_workspace(problem, backend).ok());
}

TEST(Workspace, BackwardNamesItsOwnFunction) {
  PickyBackend backend;
  BackwardProblem problem;
  EXPECT_EQ(check_workspace(problem, backend).message(),
            "workspace is null but this call needs 1024 bytes, as flash3_backward_workspace tells");
}

}  // namespace
}  // namespace flash3::test
