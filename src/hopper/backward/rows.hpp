// SPDX-License-Identifier: Apache-2.0
// The small kernels around the main one: what they are launched with. All work on the rows of
// the workspace (params.h, BackwardRows).
#pragma once

#include <cuda_runtime_api.h>

#include "hopper/backward/params.h"
#include "hopper/device/element.hpp"
#include "hopper/device/sink_view.h"

namespace flash3::hopper {

// Before the main kernel: lse in base 2, delta = rowsum(dOut ∘ Out) − dlse, turns = 0 or dq = 0.
struct PreprocessParams {
  BackwardRows rows;
  ElementView dout, out;
  RowView lse, dlse;
  int head_dim_v;
  int* ticket;       // to be zero; may be null
  bool behind_list;  // the kernel before lists the sequences, and this one may overlap with it
};
cudaError_t launch_preprocess(const PreprocessParams& params, Element element, cudaStream_t stream);

// After preprocessing: dsink[h] = −Σ exp(sink[h] − lse) · delta over all rows of query head h. The
// sum runs in one order.
struct SinkGradientParams {
  BackwardRows rows;
  SinkRow sink;
  SinkRow dsink;  // written
};
cudaError_t launch_sink_gradient(const SinkGradientParams& params, cudaStream_t stream);

// After the main kernel: dq = softmax_scale · the float32 sums.
struct ConvertParams {
  BackwardRows rows;
  ElementView dq;
  float softmax_scale;
  int head_dim;
  int block_queries;  // of its blocks of dQ
  bool transposed;    // the blocks
};
cudaError_t launch_convert_dq(const ConvertParams& params, Element element, cudaStream_t stream);

}  // namespace flash3::hopper
