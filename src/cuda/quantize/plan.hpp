// SPDX-License-Identifier: Apache-2.0
// What a call of flash3_quantize launches, what it says of itself, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/plan.hpp"
#include "cuda/device/types.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/quantize/params.h"

namespace flash3::cuda {

// Tensors whose head dims run in the same kernel, in one launch.
struct QuantizePass {
  int columns = 0;  // 64, 128 or 256: threads of a block
  bool transforms = false;
  int rotating_dim = 0;     // head dim of a rotating kernel, 0: quantize_kernel
  bool takes_part[3] = {};  // q, k, v
};

struct QuantizePlan {
  Element element = Element::kBFloat16;
  QuantizePass passes[3];
  int count = 0;
  // Some scales are of more than a block: everything that they are for is read for them first, and
  // they are found in the scale tensors themselves.
  bool has_wide_scales = false;
};

// The steps of a Route. UNSUPPORTED, and why, if no kernel can run it.
Status plan(const QuantizeProblem& problem, const Device& device, size_t* workspace,
            QuantizePlan* plan);

// What the kernel of a pass is launched with. gathers: it has to find wide scales; tensors with
// others do not take part.
QuantizeParams quantize_params(const QuantizeProblem& problem, const QuantizePass& pass,
                               bool gathers);
inline Index quantize_blocks(const QuantizeParams& params) {
  return params.count > 0 ? params.tensors[params.count - 1].past : 0;
}

// "quantize_bf16_d128_transformed"
std::string kernel_id(const QuantizePlan& plan, const QuantizePass& pass);

void explain(const QuantizeProblem& problem, const QuantizePlan& plan, Explanation* out);
Status prepare(const QuantizeProblem& problem, const QuantizePlan& plan, Launches* launches);

// The kernels as the host sees them.

// The kernel for head dims up to `columns` (64, 128 or 256). A block has as many threads as
// columns. transforms: the kernel applies a rotary embedding, a rotation or both.
template <Element kElement>
const void* quantize_kernel_of(int columns, bool transforms);

// The kernel for a rotation alone, of tensors that all have this head dim and allow accesses of 16
// bytes; null if there is none. Its blocks have the threads of quantize_kernel_of's.
template <Element kElement>
const void* quantize_rotating_kernel_of(int dim);

cudaError_t launch_wide_scales(const WideScalesParams& params, cudaStream_t stream);

}  // namespace flash3::cuda
