// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/decode/latent/plan.hpp"

#include "core/message.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/decode/latent/merge.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kRope = kLatentConfig.head_dim, kLatent = kLatentConfig.head_dim_v;

// Some of the columns of a tensor.
TensorView columns(TensorView view, int first, int count) {
  if (view.data) view.data = static_cast<char*>(view.data) + first * 2;
  view.dim = count;
  return view;
}

bool is_prefix(const TensorView& part, const TensorView& of) {
  return part.data == of.data && part.stride_batch == of.stride_batch &&
         part.stride_seq == of.stride_seq && part.stride_head == of.stride_head;
}

}  // namespace

bool is_latent(const ForwardProblem& problem) {
  return problem.head_dim_v == kLatent &&
         (problem.has_qv() ? problem.head_dim == kRope : problem.head_dim == kLatent + kRope);
}

Status check_latent(const ForwardProblem& problem) {
  const bool is_wide = problem.head_dim > kMaxHeadDim || problem.head_dim_v > kMaxHeadDim;
  if (!is_latent(problem)) {
    if (!problem.has_qv() && !is_wide) return {};
    return unsupported(message(
        problem.has_qv() ? "qv is given with head_dim = " : "head_dim = ", problem.head_dim,
        " and head_dim_v = ", problem.head_dim_v, " but the hopper backend has head dims to ",
        kMaxHeadDim, ", and of latent attention head_dim = ", kRope, " with qv, or ",
        kRope + kLatent, " without, and head_dim_v = ", kLatent));
  }
  if (problem.has_qv() || is_prefix(problem.v, problem.k)) return {};
  return unsupported(
      message("head_dim = ", problem.head_dim, " and head_dim_v = ", problem.head_dim_v,
              " but v is not the first ", kLatent,
              " elements of the rows of k; the hopper backend wants it at k's ",
              "address with k's strides, or the two parts of k as k and v, with qv"));
}

LatentViews latent_views(const ForwardProblem& problem, const TensorView& q) {
  if (problem.has_qv()) return {q, problem.qv, problem.k, problem.v};
  return {columns(q, kLatent, kRope), columns(q, 0, kLatent), columns(problem.k, kLatent, kRope),
          columns(problem.k, 0, kLatent)};
}

KeyViews key_views(const ForwardProblem& problem, const DecodeConfig& config) {
  if (!config.latent) return {problem.k, problem.v};
  const LatentViews views = latent_views(problem, problem.q);
  return {views.k_rope, views.k_latent};
}

void prepare_latent_merge(const DecodePlan& plan, DecodeParams* params, Launches* launches) {
  constexpr int kBlocksOfEach = 4;
  launches->add_kernel({latent_merge_function(plan.kernel->element), plan.grid * kBlocksOfEach,
                        kLatentMergeThreads, 0, true},
                       params, "launching the merging of a latent call");
}

}  // namespace flash3::cuda::sm90
