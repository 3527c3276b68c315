// SPDX-License-Identifier: Apache-2.0
// The CPU attention beside a naive multi-threaded implementation of the same definition, which
// computes row by row with whole rows of scores (vectorised by the compiler for the base
// instruction set). Interleaved samples, medians.
//
//   flash3_bench_cpu [--target=AVX3_ZEN4] [seconds per case] [threads, 0: all] [case …]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cases/tensors.hpp"
#include "core/backend.hpp"
#include "cpu/attention.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3 {
namespace {

using namespace cpu;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

bool bench(const std::string& id, double seconds, int threads, std::optional<CpuTarget> target) {
  std::string error;
  const auto c = cases::parse_id(id, &error);
  if (!c) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return false;
  }
  const auto t = cases::make_forward_tensors(*c);
  auto params = cases::make_params(*c, t.q.view, t.k.view, t.v.view, t.out.view, t.lse.view);
  params.num_threads = threads;
  ForwardProblem problem;
  Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
  if (target == CpuTarget::kAmx && problem.dtype != FLASH3_BFLOAT16) return true;  // not for it
  const AttentionPlan plan = plan_attention(problem, target);
  std::vector<float> workspace(plan.workspace_size / sizeof(float) + 1);
  problem.workspace = workspace.data();
  problem.workspace_size = plan.workspace_size;

  std::vector<double> fast, naive;
  const auto begin = Clock::now();
  while (status.ok() && (fast.size() < 3 || seconds_since(begin) < seconds)) {
    auto start = Clock::now();
    status = run_attention(problem, plan);
    fast.push_back(seconds_since(start));
    start = Clock::now();
    attention_naive(problem, threads);
    naive.push_back(seconds_since(start));
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", id.c_str(), status.message().c_str());
    return false;
  }
  const double ours = median(fast), theirs = median(naive);
  std::printf("%-40s %10.3f %10.3f %9.1f %8.2fx\n", id.c_str(), ours * 1e3, theirs * 1e3,
              cases::flops(*c) / ours / 1e9, theirs / ours);
  std::fflush(stdout);
  return true;
}

// One of this machine's instruction sets, by name.
std::optional<CpuTarget> find_target(const std::string& name) {
  for (const CpuTarget target : supported_targets())
    if (target_name(target) == name) return target;
  return std::nullopt;
}

}  // namespace
}  // namespace flash3

int main(int argc, char** argv) {
  constexpr std::string_view kTarget = "--target=";
  std::optional<flash3::cpu::CpuTarget> target;
  if (argc > 1 && std::string_view(argv[1]).starts_with(kTarget)) {
    target = flash3::find_target(argv[1] + kTarget.size());
    if (!target) {
      std::fprintf(stderr, "%s: not an instruction set that this machine runs\n", argv[1]);
      return 1;
    }
    ++argv;
    --argc;
  }
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 0;
  std::printf("%s%s\n%-40s %10s %10s %9s %9s\n", flash3::cpu_backend().describe().c_str(),
              target ? (std::string("; here ") + flash3::target_name(*target)).c_str() : "", "case",
              "flash3 ms", "naive ms", "GFLOP/s", "speedup");
  for (int i = 3; i < argc; ++i)
    if (!flash3::bench(argv[i], seconds, threads, target)) return 1;
  if (argc > 3) return 0;
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* rest :
         {"/b1/q512/k512/h8/d64/full", "/b1/q512/k512/h8/d64/causal", "/b1/q2048/k2048/h4/d64/full",
          "/b1/q2048/k2048/h4/d128/full", "/b1/q2048/k2048/h4/d128/causal",
          "/b1/q2048/k2048/h8x2/d128/w256:0", "/b1/q1/k8192/h8/d128/full",
          "/b4/q1/k4096/h32x8/d128/full", "/b1/q1/k65536/h1/d128/full"})
      if (!flash3::bench(std::string(dtype) + rest, seconds, threads, target)) return 1;
  }
  return 0;
}
