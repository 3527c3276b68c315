// SPDX-License-Identifier: Apache-2.0
// What a forward call costs the host: CPU time of the calling thread, in nanoseconds, of the call
// with its launch, of a run of a kept plan, with a kept schedule too where the call has one, and of
// what is asked before a call. On a GPU when there is one, else with one CPU thread, which then
// computes too. Prints JSON.
//
//   flash3_bench_calls [case …]
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases/kernel_input.hpp"
#include "device/device.hpp"
#include "flash3/plan.hpp"
#include "flash3/schedule.h"

namespace flash3 {
namespace {

constexpr int kRounds = 301;
constexpr int kCalls = 32;  // in a round: so few that the launch never waits for the GPU

double thread_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

struct Way {
  const char* name;
  std::function<flash3_status()> call;
  std::array<double, kRounds> nanoseconds{};
};

double time_round(const Way& way, cases::Memory& memory) {
  const double begin = thread_nanoseconds();
  for (int i = 0; i < kCalls; ++i) Result(way.call()).or_throw();
  const double spent = thread_nanoseconds() - begin;
  memory.finish();
  return spent / kCalls;
}

void bench(const cases::Case& c, cases::Memory& memory, bool on_gpu) {
  const cases::NormalTensors tensors(c, memory);
  flash3_forward_params params = tensors.params;
  params.num_threads = on_gpu ? 0 : 1;
  size_t bytes = 0;
  Result(flash3_forward_workspace(&params, &bytes)).or_throw();
  const std::shared_ptr<void> workspace = memory.allocate(bytes);
  params.workspace = workspace.get(), params.workspace_size = bytes;
  flash3_plan* kept = nullptr;
  Result(flash3_forward_plan(&params, &kept)).or_throw();
  const std::unique_ptr<flash3_plan, void (*)(flash3_plan*)> owner(kept, flash3_plan_destroy);

  flash3_schedule schedule{};
  Result(flash3_forward_schedule_size(&params, &schedule.size)).or_throw();
  const std::shared_ptr<void> listed = memory.allocate(schedule.size);
  schedule.data = listed.get();
  Result(flash3_forward_schedule(&params, &schedule)).or_throw();
  flash3_forward_params scheduled = params;
  scheduled.schedule = &schedule;

  std::vector<Way> ways;
  ways.push_back({"forward", [&] { return flash3_forward(&params); }});
  ways.push_back({"run of a kept plan", [&] { return flash3_forward_run(kept, &params); }});
  if (schedule.size > 0)
    ways.push_back(
        {"the same with a kept schedule", [&] { return flash3_forward_run(kept, &scheduled); }});
  ways.push_back({"workspace", [&] { return flash3_forward_workspace(&params, &bytes); }});
  ways.push_back({"plan, made and destroyed", [&] {
                    flash3_plan* made = nullptr;
                    const flash3_status status = flash3_forward_plan(&params, &made);
                    flash3_plan_destroy(made);
                    return status;
                  }});
  for (const Way& way : ways) time_round(way, memory);  // warms up
  for (size_t round = 0; round < kRounds; ++round)
    for (Way& way : ways) way.nanoseconds[round] = time_round(way, memory);

  std::printf("  \"%s\": {", cases::to_id(c).c_str());
  for (Way& way : ways) {
    std::ranges::nth_element(way.nanoseconds, way.nanoseconds.begin() + kRounds / 2);
    std::printf("%s\"%s\": %.0f", &way == &ways.front() ? "" : ", ", way.name,
                way.nanoseconds[kRounds / 2]);
  }
  std::printf("}");
}

int run(std::vector<std::string> ids) {
  if (ids.empty())
    ids = {"bf16/b1/q16/k16/h2/d64/causal", "bf16/b8/q1/k256/h32x8/d128/full",
           "bf16/b2/q128/k128/h16/d128/causal"};
  std::string no_gpu;
  const bool on_gpu = flash3_backend_available(FLASH3_BACKEND_HOPPER) == FLASH3_OK;
  std::unique_ptr<cases::Memory> memory;
  if (on_gpu)
    memory = device::make_device_memory();
  else
    memory = std::make_unique<cases::HostMemory>();
  std::printf("{\n  \"device\": \"%s\",\n  \"nanoseconds\": \"CPU time of the thread, a call\"",
              on_gpu ? device::gpus(&no_gpu).front().name.c_str() : "cpu");
  for (const std::string& each : ids) {
    std::string error;
    const auto c = cases::parse_id(each, &error);
    if (!c) throw Error(FLASH3_INVALID_ARGUMENT, error);
    std::printf(",\n");
    bench(*c, *memory, on_gpu);
  }
  std::printf("\n}\n");
  return 0;
}

}  // namespace
}  // namespace flash3

int main(int argc, char** argv) {
  try {
    return flash3::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
