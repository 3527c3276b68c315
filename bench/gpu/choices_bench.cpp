// SPDX-License-Identifier: Apache-2.0
// Every way in which the forward kernels could run a case (which rows of the tile table, how many
// heads packed, how many rows a slot has), timed with interleaved samples beside what
// forward/estimate.cpp expects. The one that a call takes is marked; a case that a decode kernel
// runs has none. Run it before changing the estimate.
//
//   flash3_bench_choices [case …]
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cases/kernel_input.hpp"
#include "cuda/sm90/select.hpp"
#include "device/device.hpp"
#include "device/planned_forward.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kSamples = 11;
constexpr double kSampleSeconds = 0.006;

struct Candidate {
  ForwardProblem problem;
  PlannedForward plan;
  std::shared_ptr<void> workspace;
  int calls = 1;  // in a sample
  std::vector<double> seconds;
};

Status time_candidate(Candidate& candidate, const Device& device, cases::Memory& memory, int calls,
                      double* seconds) {
  Status status;
  *seconds = memory.time([&] {
    for (int i = 0; i < calls && status.ok(); ++i)
      status = cuda::sm90::launch(candidate.problem, candidate.plan, device);
  }) / calls;
  return status;
}

Status bench(const std::string& id, const Device& device, cases::Memory& memory) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  if (!c) return invalid_argument(error);
  const cases::NormalTensors tensors(*c, memory);
  ForwardProblem problem;
  FLASH3_CHECK(make_forward_problem(&tensors.params, Pointers::kRequired, &problem));
  ForwardSteps steps;
  size_t unused = 0;
  FLASH3_CHECK(plan(problem, device, &unused, &steps));

  std::vector<Candidate> candidates;
  for (const ForwardChoice& choice : forward_choices(problem)) {
    Candidate candidate;
    FLASH3_CHECK(plan_choice(problem, device, choice, &candidate.plan));
    candidate.workspace = memory.allocate(candidate.plan.workspace_bytes);
    candidate.problem = problem;
    candidate.problem.workspace = candidate.workspace.get();
    candidate.problem.workspace_size = candidate.plan.workspace_bytes;
    double seconds = 0;
    FLASH3_CHECK(time_candidate(candidate, device, memory, 3, &seconds));  // warms up
    FLASH3_CHECK(time_candidate(candidate, device, memory, 3, &seconds));
    candidate.calls = std::max(1, static_cast<int>(kSampleSeconds / seconds));
    candidates.push_back(std::move(candidate));
  }
  for (int sample = 0; sample < kSamples; ++sample)
    for (Candidate& candidate : candidates) {
      double seconds = 0;
      FLASH3_CHECK(time_candidate(candidate, device, memory, candidate.calls, &seconds));
      candidate.seconds.push_back(seconds);
    }

  std::printf("%s\n", id.c_str());
  for (Candidate& candidate : candidates) {
    std::ranges::nth_element(candidate.seconds, candidate.seconds.begin() + kSamples / 2);
    const PlannedForward& plan = candidate.plan;
    const bool taken = steps.forward && plan.kernel == steps.forward->kernel &&
                       plan.pack.heads == steps.forward->pack.heads &&
                       plan.slot_rows == steps.forward->slot_rows;
    std::printf("  %c %-31s %3d heads slots of %2d %8d tiles %10.2f us expected %10.2f us\n",
                taken ? '*' : ' ', plan.kernel->id.c_str(), plan.pack.heads, plan.slot_rows,
                plan.tiles, plan.estimate.us, candidate.seconds[kSamples / 2] * 1e6);
  }
  std::fflush(stdout);
  return {};
}

int run(std::vector<std::string> ids) {
  if (ids.empty()) {
    ids = {"bf16/b1/q1/k16384/h32x8/d128/full",
           "bf16/b16/q1/k4096/h32x8/d128/full",
           "bf16/b64/q1/k2048/h64x8/d128/full",
           "bf16/b32/q1/k2048/h28x4/d128/full",
           "bf16/b16/q5/k4096/h32x4/d64/causal",
           "bf16/b16/q64/k2048/h32x8/d128/causal",
           "bf16/b32/q130/k1024/h32x8/d128/full",
           "bf16/b32/q200/k200/h32x8/d64/causal",
           "bf16/b32/q512/k512/h16x4/d128/causal",
           "bf16/b4/q4096/k4096/h16x4/d128/causal",
           "bf16/b1/q16384/k16384/h16x4/d128/causal+w64:",
           "bf16/b2/q8192/k8192/h8x2/d256/full",
           "bf16/b4096/q16/k16/h16x4/d128/causal/random/packed",
           "bf16/b1024/q60/k60/h16x4/d64/full/random/packed"};
  }
  Device device;
  Status status = current_hopper(&device);
  std::unique_ptr<cases::Memory> memory;
  if (status.ok()) memory = device::make_device_memory();
  for (size_t i = 0; i < ids.size() && status.ok(); ++i) status = bench(ids[i], device, *memory);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.code() == FLASH3_UNSUPPORTED ? 77 : 1;  // 77: skipped
}

}  // namespace
}  // namespace flash3::cuda::sm90

int main(int argc, char** argv) {
  return flash3::cuda::sm90::run(std::vector<std::string>(argv + 1, argv + argc));
}
