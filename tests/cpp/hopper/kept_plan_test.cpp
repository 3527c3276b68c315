// SPDX-License-Identifier: Apache-2.0
// Plans that the caller keeps, on the GPU: made without an address, they run with any that are
// aligned, also inside a captured graph, and give the bits that the call gives. Skipped without a
// Hopper GPU.
#include "device_call.hpp"

namespace flash3 {
namespace {

using PlanOwner = std::unique_ptr<flash3_plan, void (*)(flash3_plan*)>;

PlanOwner make_plan(const AnyParams& any) {
  flash3_plan* plan = nullptr;
  const auto make = [&](const auto& p) { return cases::make_plan(p, &plan); };
  EXPECT_EQ(std::visit(make, any), FLASH3_OK) << flash3_last_error();
  return {plan, flash3_plan_destroy};
}

flash3_status run_plan(const flash3_plan* plan, const AnyParams& any) {
  return std::visit([&](const auto& p) { return cases::run_plan(plan, p); }, any);
}

class KeptPlanOnHopper : public HopperTest, public testing::WithParamInterface<const char*> {};

// The call's params without any address, stream or workspace.
AnyParams question(AnyParams params) {
  for (const Slot& slot : slots_of(&params)) slot.tensor->data = nullptr;
  std::visit([](auto& p) { p.stream = p.workspace = nullptr, p.workspace_size = 0; }, params);
  return params;
}

TEST_P(KeptPlanOnHopper, RunsAsTheCallDoes) {
  const TimeLimit limit;
  DeviceCall first(GetParam(), *memory_), second(GetParam(), *memory_);
  const bool aligned = second.the_case().layout != cases::Layout::kOdd;
  const PlanOwner plan = make_plan(aligned ? question(first.params) : first.params);
  size_t bytes = 1;
  ASSERT_EQ(flash3_plan_workspace(plan.get(), &bytes), FLASH3_OK);
  EXPECT_EQ(bytes, second.workspace_bytes());

  second.run();
  const auto expected = second.outputs();
  second.reset();
  ASSERT_EQ(run_plan(plan.get(), second.params), FLASH3_OK) << flash3_last_error();
  memory_->finish();
  EXPECT_EQ(second.outputs(), expected);

  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const flash3_status status = run_plan(plan.get(), second.params);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(status, FLASH3_OK) << flash3_last_error();
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 3; ++replay) {
    second.reset();
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    memory_->finish();
    EXPECT_EQ(second.outputs(), expected);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_P(KeptPlanOnHopper, RefusesHostMemoryAndBadAlignment) {
  DeviceCall call(GetParam(), *memory_);
  if (call.the_case().layout == cases::Layout::kOdd) GTEST_SKIP() << "any address will do";
  const PlanOwner plan = make_plan(call.params);
  const auto refused = [&](void* address, const std::string& reason) {
    AnyParams params = call.params;
    slot_of(&params, "k").tensor->data = address;
    EXPECT_EQ(run_plan(plan.get(), params), FLASH3_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flash3_last_error()).find(reason), std::string::npos)
        << flash3_last_error();
  };
  alignas(256) static std::byte host[256];
  refused(host, "k.data is host memory, which the hopper backend cannot read");
  refused(call.part("k").device + 4, "but the plan was made for a multiple of 16");
  refused(nullptr, "k.data is null but k has elements");
}

// Each kind of call, packed and not; copies of tensors that TMA cannot address.
constexpr const char* kCalls[] = {
    "bf16/b2/q300/k300/h4x2/d128/causal",
    "bf16/b8/q1/k500/h8x2/d128/full",
    "fp16/b2/q200/k300/h2/d100/causal/odd",
    "bf16/b6/q300/k300/h4x2/d128/causal/random/packed/used",
    "e4m3/b2/q300/k300/h4x2/d128/causal/blockscales",
    "bf16/b2/q300/k300/h4x2/d128/causal/fp8",
    "bf16/b2/q300/k300/h4x2/d64/causal/quantize/blockscales/rotate",
    "bf16/b2/q300/k300/h4x2/d128/causal/deterministic",
    "bf16/b6/q200/k300/h2/d64/causal/random/packed/deterministic",
};
INSTANTIATE_TEST_SUITE_P(Calls, KeptPlanOnHopper, testing::ValuesIn(kCalls));

}  // namespace
}  // namespace flash3
