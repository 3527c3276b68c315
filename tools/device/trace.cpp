// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "device/bench_kernels.hpp"
#include "device/planned_forward.hpp"
#include "device/trace/kernels.hpp"

namespace flash3::device {
namespace {

using namespace cuda;
using namespace cuda::sm90;

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <Element kElement, int kHeadDim, bool kBand, int kTileM, int kTileN>
bool is(const ForwardKernel& kernel) {
  const ForwardConfig& c = kernel.config;
  return kernel.element == kElement && c.head_dim == kHeadDim && c.head_dim_v == kHeadDim &&
         c.band == kBand && c.score == ScoreKind::kPlain && !c.paged && c.tile_m() == kTileM &&
         c.tile_n == kTileN;
}

// The kernel's traced one, if it is of this row.
template <Element kElement, int kHeadDim, bool kBand, int kTileM, int kTileN>
void find(const ForwardKernel& kernel, TracedKernel* found) {
  if (is<kElement, kHeadDim, kBand, kTileM, kTileN>(kernel))
    *found = traced_kernel<kElement, kHeadDim, kBand, kTileM, kTileN>();
}

// The traced one of a library's kernel; no function if there is none.
TracedKernel traced_kernel_of(const ForwardKernel& kernel) {
  constexpr Element kBf16 = Element::kBFloat16, kFp8 = Element::kE4m3;
  TracedKernel found{};
  find<kBf16, 64, false, 192, 128>(kernel, &found);
  find<kBf16, 64, true, 192, 128>(kernel, &found);
  find<kBf16, 128, false, 128, 128>(kernel, &found);
  find<kBf16, 128, false, 192, 80>(kernel, &found);
  find<kBf16, 128, true, 128, 128>(kernel, &found);
  find<kBf16, 128, true, 192, 80>(kernel, &found);
  find<kFp8, 128, false, 128, 128>(kernel, &found);
  find<kFp8, 128, true, 128, 128>(kernel, &found);
  return found;
}

// The fastest plan among those whose kernel can be traced.
PlannedForward plan_traced(const ForwardProblem& problem, const Device& device) {
  PlannedForward best;
  for (const ForwardChoice& choice : forward_choices(problem)) {
    if (traced_kernel_of(*choice.kernel).function == nullptr) continue;
    PlannedForward plan;
    check(plan_choice(problem, device, choice, &plan));
    if (best.kernel == nullptr || plan.estimate.us < best.estimate.us) best = plan;
  }
  if (best.kernel == nullptr)
    throw std::runtime_error(
        "no traced kernel runs this call; those that there are take bf16 with head_dim 64 or 128, "
        "or "
        "e4m3 with 128, without a softcap or a KV cache");
  return best;
}

// Everything that the call's kernels read, for as long as there is something to call.
struct Call {
  ForwardProblem problem;
  PlannedForward plan;
  ForwardKernel kernel;        // the traced one
  PlannedForward traced_plan;  // of `kernel`
  TracedKernel traced;
  TraceTarget target;
  std::shared_ptr<void> buffer, workspace;
};

// Tells the kernel where to write; the lists begin empty.
void set_target(const Call& call, cases::Memory& memory) {
  memory.fill(call.target.buffer, std::byte{0}, sizeof(TraceBuffer));
  check(cudaMemcpyToSymbolAsync(call.traced.target, &call.target, sizeof call.target, 0,
                                cudaMemcpyHostToDevice, static_cast<cudaStream_t>(memory.stream())),
        "telling the traced kernel where to write");
  memory.finish();
}

}  // namespace

TracedCall traced_call(const flash3_forward_params& params, int block, cases::Memory& memory) {
  Device device;
  check(current_hopper(&device));
  const auto call = std::make_shared<Call>();
  check(make_forward_problem(&params, Pointers::kRequired, &call->problem));
  PlannedForward planned;
  check(plan(call->problem, device, &planned));
  call->plan = plan_traced(call->problem, device);
  if (call->problem.is_ragged() || call->plan.append.launches() ||
      tile_schedule(call->problem, call->plan).may_hide_keys)
    throw std::runtime_error(
        "no traced kernel runs this call; none takes ragged batches, windows, chunks or new keys "
        "of a KV cache");
  if (block < 0 || block >= call->plan.grid)
    throw std::runtime_error("block " + std::to_string(block) + " but the call has " +
                             std::to_string(call->plan.grid) + " blocks, counted from 0");
  // Another kernel than the one that the library plans may need another workspace.
  call->workspace = memory.allocate(std::max<size_t>(1, call->plan.workspace_bytes));
  call->problem.workspace = call->workspace.get();
  call->problem.workspace_size = call->plan.workspace_bytes;
  call->traced = traced_kernel_of(*call->plan.kernel);
  call->kernel = *call->plan.kernel;
  call->kernel.function = call->traced.function;
  call->traced_plan = call->plan;
  call->traced_plan.kernel = &call->kernel;
  call->buffer = memory.allocate(sizeof(TraceBuffer));
  call->target = {static_cast<TraceBuffer*>(call->buffer.get()), block};
  set_target(*call, memory);
  const int warpgroups = call->kernel.config.warpgroups;
  const auto read = [call, block, warpgroups, &memory] {
    memory.finish();
    const auto noted = std::make_unique<TraceBuffer>();
    memory.copy_out(noted.get(), call->buffer.get(), sizeof(TraceBuffer));
    return trace_of(*noted, block, warpgroups);
  };
  return {call->plan.kernel->id,
          planned.kernel->id,
          call->plan.grid,
          [call, device] { check(cuda::sm90::launch(call->problem, call->plan, device)); },
          [call, device] { check(cuda::sm90::launch(call->problem, call->traced_plan, device)); },
          read};
}

}  // namespace flash3::device
