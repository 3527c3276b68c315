// SPDX-License-Identifier: Apache-2.0
// A C++ program without exceptions and RTTI: every call and question returns a Result.
#include <flash3/flash3.hpp>
#include <flash3/mask.hpp>
#include <flash3/plan.hpp>
#include <flash3/schedule.hpp>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#if FLASH3_EXCEPTIONS || defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "this file must be compiled with -fno-exceptions -fno-rtti"
#endif

namespace {

bool fails(const flash3::Result& result, const char* what) {
  if (!result) std::cerr << what << ": " << result.message() << '\n';
  return !result;
}

bool is_two(std::vector<float>& out) {
  for (float& x : out) {
    if (x < 1.9999f || x > 2.0001f) return false;
    x = 0.f;
  }
  return true;
}

}  // namespace

int main() {
  constexpr int64_t kSeq = 2, kDim = 8;
  std::vector<float> q(kSeq * kDim, 0.f), k(kSeq * kDim, 1.f), v(kSeq * kDim), out(kSeq * kDim);
  for (int64_t i = 0; i < kDim; ++i) v[i] = 1.f, v[kDim + i] = 3.f;
  const auto view = [](std::vector<float>& x) {
    return flash3::tensor(x.data(), FLASH3_FLOAT32, {1, kSeq, 1, kDim});
  };
  flash3::Forward call{
      .q = view(q), .k = view(k), .v = view(v), .out = view(out), .backend = FLASH3_BACKEND_CPU};

  size_t bytes = 0, schedule_bytes = 0;
  std::string why, planned;
  if (fails(flash3::supported(call), "supported")) return 1;
  if (fails(flash3::try_workspace(call, &bytes), "try_workspace")) return 1;
  if (fails(flash3::try_explain(call, &why), "try_explain")) return 1;
  const auto workspace = std::make_unique<char[]>(bytes + FLASH3_WORKSPACE_ALIGNMENT);
  const auto address =
      reinterpret_cast<uintptr_t>(workspace.get()) + FLASH3_WORKSPACE_ALIGNMENT - 1;
  call.workspace =
      reinterpret_cast<void*>(address / FLASH3_WORKSPACE_ALIGNMENT * FLASH3_WORKSPACE_ALIGNMENT);
  call.workspace_size = bytes;
  if (fails(flash3::try_forward(call), "try_forward")) return 1;
  if (!is_two(out)) return std::cerr << "out of try_forward is not 2\n", 1;

  flash3::Plan<flash3::Forward> plan;
  if (plan.try_run(call)) return std::cerr << "a plan that is none ran\n", 1;
  if (fails(plan.try_plan(call), "try_plan")) return 1;
  if (fails(plan.try_workspace(&bytes), "Plan::try_workspace")) return 1;
  if (fails(plan.try_explain(&planned), "Plan::try_explain")) return 1;
  if (fails(plan.try_run(call), "Plan::try_run")) return 1;
  if (!is_two(out)) return std::cerr << "out of Plan::try_run is not 2\n", 1;
  if (why.find("kernel:") == std::string::npos || planned.find("kernel:") == std::string::npos)
    return std::cerr << "no kernel in " << why << planned, 1;

  flash3::Schedule schedule{};
  if (fails(flash3::try_schedule_size(call, &schedule_bytes), "try_schedule_size")) return 1;
  if (schedule_bytes != 0) return std::cerr << "a CPU lists nothing\n", 1;
  if (fails(flash3::try_schedule(call, nullptr, 0, &schedule), "try_schedule")) return 1;

  // What fails says why, and sets nothing.
  call.q.shape[2] = call.out.shape[2] = 3, call.k.shape[2] = call.v.shape[2] = 2;
  bytes = 7;
  if (flash3::try_workspace(call, &bytes) || flash3::try_explain(call, &why) || bytes != 7 ||
      why.find("kernel:") == std::string::npos)
    return std::cerr << "a wrong call was answered\n", 1;
  const flash3::Result result = flash3::try_forward(call);
  if (result || result.code() != FLASH3_INVALID_ARGUMENT ||
      result.message().find("heads_q must be a multiple of heads_k") == std::string::npos)
    return std::cerr << "not the message: " << result.message() << '\n', 1;
  std::cout << "C++ without exceptions, flash3 " << flash3_version() << '\n';
}
