// SPDX-License-Identifier: Apache-2.0
// The gradients of biases as a step of a backward call: what they take of the workspace, and their
// launches, after those of the main kernel, whose preprocessing they read.
#pragma once

#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/sm90/backward/bias_gradient_params.h"
#include "cuda/sm90/host/packed_copy.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {

struct BiasGradientPlan {
  bool pairs = false, by_distance = false;  // what is wanted
  int dim = 0;                              // of the kernels
  int m_tiles = 0;
  DiagonalSums diagonals{};  // without its memory, as the next
  size_t sums_offset = 0;
  PairParts parts{};
  size_t parts_offset = 0;
};

// stored: the main kernel stores dbias.
Status plan(const BackwardProblem& problem, const Device& device, bool stored, size_t* workspace,
            BiasGradientPlan* plan);

// Fills dbias with zeros.
void prepare_clear(const BiasView& dbias, Launches* launches);

// What the main kernel and this step share.
struct BackwardInputs {
  RowIndexing rows;
  TensorView q, k, v, dout;  // as TMA loads them
  bool has_pairs;            // of rows and keys, or nothing is loaded
  BackwardWorkspace workspace;
  SequenceList sequences;
};

Status prepare(const BackwardProblem& problem, const BiasGradientPlan& plan,
               const BackwardInputs& inputs, Launches* launches);

}  // namespace flash3::cuda::sm90
