// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <stdexcept>

#include "device/ablation/variants.hpp"
#include "device/bench_kernels.hpp"
#include "device/planned_forward.hpp"

namespace flash3::device {
namespace {

using namespace cuda;
using namespace cuda::sm90;

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// The library's own kernel in the tiles of the ablation.
const ForwardKernel& library_kernel(Element element) {
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& c = kernel.config;
    if (kernel.element == element && c.score == ScoreKind::kPlain &&
        c.head_dim == kAblationHeadDim && c.head_dim_v == kAblationHeadDim && !c.band &&
        c.tile_n == kAblationTileN) {
      return kernel;
    }
  }
  throw std::runtime_error("the tile table has no row for the ablation");
}

template <Element kElement, Variant kVariant>
ForwardKernel variant_kernel() {
  return {"", kElement, ablation_config(kElement, kVariant), ablation_kernel<kElement, kVariant>()};
}

AblationVariant make_variant(std::string name, double paper_tflops, const ForwardKernel& kernel,
                             const ForwardProblem& problem, const Device& device) {
  struct Call {
    ForwardKernel kernel;
    ForwardProblem problem;
    PlannedForward plan;
  };
  const auto call = std::make_shared<Call>(Call{kernel, problem, {}});
  check(plan_choice(problem, device, {&call->kernel, HeadPack{}}, &call->plan));
  if (call->plan.workspace_bytes > problem.workspace_size)
    throw std::runtime_error(name + ": the call has no workspace for it");
  const ForwardConfig& c = call->kernel.config;
  return {std::move(name), std::to_string(c.tile_m()) + "x" + std::to_string(c.tile_n),
          paper_tflops,
          [call, device] { check(cuda::sm90::launch(call->problem, call->plan, device)); }};
}

}  // namespace

std::vector<AblationVariant> ablation_variants(const flash3_forward_params& params) {
  Device device;
  check(current_hopper(&device));
  ForwardProblem problem;
  check(make_forward_problem(&params, Pointers::kRequired, &problem));
  const bool fp8 = problem.dtype == FLASH3_FLOAT8_E4M3;
  if ((problem.dtype != FLASH3_FLOAT16 && !fp8) || problem.head_dim != kAblationHeadDim ||
      problem.head_dim_v != kAblationHeadDim ||
      !problem.mask().is_full(problem.seq_q, problem.seq_k))
    throw std::runtime_error(std::string("the ablation runs calls like ") + kAblationCase +
                             ": fp16 or e4m3, head_dim and head_dim_v 128, no mask");
  std::vector<AblationVariant> variants;
  const auto add = [&](const char* name, double paper_tflops, const ForwardKernel& kernel) {
    variants.push_back(make_variant(name, paper_tflops, kernel, problem, device));
  };
  if (fp8) {
    constexpr Element kFp8 = Element::kE4m3;
    add("full schedule", 0, library_kernel(kFp8));
    add("no GEMM-softmax overlap", 0, variant_kernel<kFp8, Variant::kNoOverlap>());
    add("no ping-pong", 0, variant_kernel<kFp8, Variant::kNoPingPong>());
    add("no lazy maximum", 0, variant_kernel<kFp8, Variant::kNoLazyMaximum>());
    add("full schedule, small tiles", 0, variant_kernel<kFp8, Variant::kSmallTiles>());
    return variants;
  }
  constexpr Element kFp16 = Element::kFloat16;
  add("full schedule", 661, library_kernel(kFp16));
  add("no GEMM-softmax overlap", 582, variant_kernel<kFp16, Variant::kNoOverlap>());
  add("no warp specialisation", 570, variant_kernel<kFp16, Variant::kNotSpecialised>());
  add("no ping-pong", 0, variant_kernel<kFp16, Variant::kNoPingPong>());
  add("full schedule, small tiles", 0, variant_kernel<kFp16, Variant::kSmallTiles>());
  add("three stages, small tiles", 0, variant_kernel<kFp16, Variant::kThreeStage>());
  return variants;
}

}  // namespace flash3::device
