// SPDX-License-Identifier: Apache-2.0
// Schedules that the caller keeps, on the GPU: one graph makes a schedule and runs the layers of a
// model with it, replayed with other lengths; each layer must give what a call with a schedule of
// its own gives. Skipped without a Hopper GPU.
#include "flash3/schedule.h"

#include <random>

#include "device_call.hpp"

namespace flash3 {
namespace {

constexpr int kLayers = 64, kReplays = 100;

class Schedule : public HopperTest, public testing::WithParamInterface<const char*> {};

TEST_P(Schedule, IsSharedByTheLayersOfAModel) {
  DeviceCall call(GetParam(), *memory_);
  const auto stream = static_cast<cudaStream_t>(memory_->stream());
  auto& params = std::get<flash3_forward_params>(call.params);
  flash3_schedule schedule{};
  ASSERT_EQ(flash3_forward_schedule_size(&params, &schedule.size), FLASH3_OK)
      << flash3_last_error();
  ASSERT_GT(schedule.size, 0u);
  const auto memory = memory_->allocate(schedule.size);
  schedule.data = memory.get();

  const size_t bytes = call.results_bytes();
  const auto results = memory_->allocate(kLayers * bytes);
  const Bytes unwritten(kLayers * bytes, kUnwritten);
  const auto enqueue_layers = [&] {
    ASSERT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_OK) << flash3_last_error();
    for (int layer = 0; layer < kLayers; ++layer) {
      AnyParams of_layer =
          call.moved(static_cast<std::byte*>(results.get()) + size_t(layer) * bytes,
                     static_cast<std::byte*>(params.workspace), stream);
      std::get<flash3_forward_params>(of_layer).schedule = &schedule;
      ASSERT_EQ(flash3::run(of_layer), FLASH3_OK) << flash3_last_error();
    }
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  enqueue_layers();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

  std::vector<int> most(size_t(call.the_case().batch)), used(most.size());
  std::memcpy(most.data(), call.part("seqused_k").host.data(), most.size() * sizeof(int));
  std::mt19937_64 random(11);
  for (int replay = 0; replay < kReplays; ++replay) {
    for (size_t b = 0; b < used.size(); ++b) used[b] = int(random() % uint64_t(most[b] + 1));
    call.set("seqused_k", used);
    memory_->copy_in(results.get(), unwritten.data(), unwritten.size());
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    memory_->finish();
    Bytes got(kLayers * bytes), expected(bytes);
    memory_->copy_out(got.data(), results.get(), got.size());
    memory_->copy_in(call.results(), unwritten.data(), bytes);
    call.run();
    memory_->copy_out(expected.data(), call.results(), bytes);
    for (int layer = 0; layer < kLayers; ++layer)
      ASSERT_EQ(std::memcmp(got.data() + size_t(layer) * bytes, expected.data(), bytes), 0)
          << "layer " << layer << " of replay " << replay;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Few sequences, which many blocks share; many of them; several query tiles of each.
constexpr const char* kCalls[] = {
    "bf16/b2/q1/k6000/h8x2/d128/causal/usedk/paged16",
    "bf16/b40/q1/k700/h8x2/d128/causal/usedk",
    "fp16/b5/q13/k900/h8x1/d64/causal/usedk/paged64",
};
INSTANTIATE_TEST_SUITE_P(Calls, Schedule, testing::ValuesIn(kCalls));

class ScheduleRules : public HopperTest {};

TEST_F(ScheduleRules, ACallForWhichItWasNotMadeIsRefused) {
  DeviceCall call("bf16/b3/q1/k900/h8x2/d128/causal/usedk/paged16", *memory_);
  auto& params = std::get<flash3_forward_params>(call.params);
  flash3_schedule schedule{};
  EXPECT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).rfind("schedule->data is null", 0), 0u);
  ASSERT_EQ(flash3_forward_schedule_size(&params, &schedule.size), FLASH3_OK);
  const auto memory = memory_->allocate(schedule.size);
  schedule.data = memory.get();
  ASSERT_EQ(flash3_forward_schedule(&params, &schedule), FLASH3_OK) << flash3_last_error();
  params.schedule = &schedule;
  params.sm_margin = 1;
  EXPECT_EQ(flash3_forward(&params), FLASH3_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash3_last_error()).rfind("schedule->key = ", 0), 0u);
  memory_->finish();
  EXPECT_EQ(call.download(call.part("out")), call.part("out").host);
}

}  // namespace
}  // namespace flash3
