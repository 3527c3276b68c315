// SPDX-License-Identifier: Apache-2.0
// A call that meets a CUDA context which a faulting kernel has ended says so, in CUDA's words; it
// neither crashes nor hangs, nor takes device memory for the host's. Each in a process of its own.
// Skipped without a Hopper GPU.
#include <cstdio>

#include "device_call.hpp"

namespace flash3 {

// Launch kernels that end the CUDA context (faults.cu).
void launch_trap();
void launch_illegal_write();

namespace {

struct Fault {
  const char* name;
  void (*launch)();
};
constexpr Fault kFaults[] = {{"trap", launch_trap}, {"illegal write", launch_illegal_write}};

class ContextLoss : public HopperTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process, that has no context yet
    HopperTest::SetUp();
  }
};

// Whether the sentence holds what CUDA calls the error.
bool tells(const char* sentence, cudaError_t error) {
  return std::string_view(sentence).find(cudaGetErrorString(error)) != std::string_view::npos;
}

// 0: every answer is as it should be; otherwise what was wrong stands on stderr.
int meet_lost_context(const std::string& id, const Fault& fault, cases::Memory& memory) {
  int wrong = 0;
  const auto expect = [&](bool good, const char* call, const char* backend, flash3_status status) {
    std::fprintf(stderr, "%s: %s, %s, backend %s: %s: %s\n", good ? "good" : "WRONG", id.c_str(),
                 fault.name, call, backend, flash3_status_name(status));
    if (status != FLASH3_OK) std::fprintf(stderr, "    %s\n", flash3_last_error());
    wrong += !good;
  };
  DeviceCall call(id, memory);
  call.run();
  fault.launch();
  const cudaError_t error = cudaDeviceSynchronize();
  std::fprintf(stderr, "after the fault: %s\n", cudaGetErrorString(error));
  if (error == cudaSuccess) return 1;

  AnyParams question = call.params;
  for (const Slot& slot : slots_of(&question)) slot.tensor->data = nullptr;
  for (const auto& [name, backend] :
       {std::pair{"hopper", FLASH3_BACKEND_HOPPER}, std::pair{"auto", FLASH3_BACKEND_AUTO}}) {
    for (AnyParams* const params : {&call.params, &question})
      std::visit([&](auto& p) { p.backend = backend; }, *params);
    flash3_status status = run(call.params);
    expect(status != FLASH3_OK && tells(flash3_last_error(), error), "run", name, status);
    status = supported(call.params);  // it looks at what kind of memory the pointers are
    expect(status != FLASH3_OK && tells(flash3_last_error(), error), "supported", name, status);
    // What asks nothing of the device may still be answered.
    size_t bytes = 0;
    status = workspace(question, &bytes);
    expect(status == FLASH3_OK || tells(flash3_last_error(), error), "workspace", name, status);
    std::fprintf(stderr, "explain: %s\n", explain(question).c_str());
  }
  const flash3_status status = flash3_backend_available(FLASH3_BACKEND_HOPPER);
  expect(status == FLASH3_OK || tells(flash3_last_error(), error), "available", "hopper", status);
  return wrong;
}

TEST_P(ContextLoss, IsReported) {
  for (const Fault& fault : kFaults)
    EXPECT_EXIT(
        {
          alarm(600);
          std::_Exit(meet_lost_context(GetParam(), fault, *memory_) == 0 ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
}

constexpr const char* kCalls[] = {
    "bf16/b2/q100/k100/h2/d128/causal",
    "bf16/b2/q100/k100/h2/d128/causal/packed/used",
    "e4m3/b2/q100/k100/h2/d128/causal/blockscales",
    "bf16/b2/q100/k100/h2/d128/causal/fp8",
    "bf16/b2/q100/k100/h2/d128/causal/deterministic",
    "bf16/b2/q100/k100/h2/d128/full/quantize/blockscales/rotate",
};
INSTANTIATE_TEST_SUITE_P(Calls, ContextLoss, testing::ValuesIn(kCalls));

}  // namespace
}  // namespace flash3
