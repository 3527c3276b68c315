// SPDX-License-Identifier: Apache-2.0
// The small kernels around the main one, and what they are launched with. All work on the query
// tiles of the workspace (params.h).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/device/types.hpp"
#include "cuda/sm90/backward/params.h"

namespace flash3::cuda::sm90 {

// A strided view of floats, [batch, head, seq]; data null: not given.
struct RowView {
  const float* data;
  long long stride_batch, stride_head;
};

// Before the main kernel: writes lse in base 2 and delta = rowsum(dOut ∘ Out) − dlse, and clears
// the semaphores of dQ, or its sums if they are zero-initialised.
struct PreprocessParams {
  BackwardWorkspace workspace;
  ElementView dout, out;
  RowView lse, dlse;
  int head_dim_v;
  int* ticket;       // cleared; may be null
  bool behind_list;  // the kernel before lists the sequences: this one may overlap with it
};
cudaError_t launch_preprocess(const PreprocessParams& params, Element element, cudaStream_t stream);

// After preprocessing: dsink[h] = −Σ exp(sink[h] − lse) · delta over all queries of head h, always
// summed in one order.
struct SinkGradientParams {
  BackwardWorkspace workspace;
  SinkRow sink;
  SinkRow dsink;  // written
};
cudaError_t launch_sink_gradient(const SinkGradientParams& params, cudaStream_t stream);

// After the main kernel: dq = softmax_scale · the float32 sums.
struct ConvertParams {
  BackwardWorkspace workspace;
  ElementView dq;  // of the type that launch_convert_dq is given
  float softmax_scale;
  int head_dim;
};
cudaError_t launch_convert_dq(const ConvertParams& params, FloatType type, cudaStream_t stream);

}  // namespace flash3::cuda::sm90
