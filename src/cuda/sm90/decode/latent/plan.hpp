// SPDX-License-Identifier: Apache-2.0
// What multi-head latent attention (MLA) needs beside the plan of any other decode call.
#pragma once

#include "core/problem.hpp"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/decode/plan.hpp"

namespace flash3::cuda::sm90 {

// The two parts of queries and keys. The latent parts of the keys are the values too.
struct LatentViews {
  TensorView q_rope, q_latent, k_rope, k_latent;
};
// q: that of the problem, or with its embedding.
LatentViews latent_views(const ForwardProblem& problem, const TensorView& q);

// K and V as a decode kernel has them: a latent one has rope and latent parts.
struct KeyViews {
  TensorView k, v;
};
KeyViews key_views(const ForwardProblem& problem, const DecodeConfig& config);

// Whether a call's head dims are those of the latent kernels.
bool is_latent(const ForwardProblem& problem);
// UNSUPPORTED for a call that they would have to run and do not: other wide heads, or values that
// are no part of the keys. By addresses too, so again at each launch.
Status check_latent(const ForwardProblem& problem);

// The kernel that merges the parts of items that blocks share, with the decode kernel's params.
void prepare_latent_merge(const DecodePlan& plan, DecodeParams* params, Launches* launches);

}  // namespace flash3::cuda::sm90
