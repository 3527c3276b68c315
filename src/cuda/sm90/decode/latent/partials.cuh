// SPDX-License-Identifier: Apache-2.0
// Partials of items that blocks share. A block has at most two: of the item that the block before
// it has begun, and of the one that it begins itself and the next block goes on with. The merging
// kernel (merge.cu) runs after all blocks.
#pragma once

#include "cuda/sm90/decode/fold.cuh"
#include "cuda/sm90/decode/latent/partials.hpp"

namespace flash3::cuda::sm90 {

__device__ __forceinline__ LatentPartials& partials_of_block(const DecodeParams& params,
                                                             int block) {
  return static_cast<LatentPartials*>(params.partials)[block];
}

// This block's number among partials: of a cluster's blocks of the same rank items lie side by
// side.
__device__ __forceinline__ int partial_block(const DecodeParams& params) {
  const int block = blockIdx.x, cluster = params.cluster;
  return block % cluster * (params.blocks / cluster) + block / cluster;
}

// O of a query row of a block's partial, in float32.
__device__ __forceinline__ float* partial_row(const DecodeParams& params, int blocks, int block,
                                              LatentSlot slot, int row) {
  char* const rows = static_cast<char*>(params.partials) + latent_headers_bytes(blocks);
  return reinterpret_cast<float*>(rows) +
         (int64_t(block) * kLatentSlots + int(slot)) * kLatentPartialFloats +
         row * kLatentConfig.head_dim_v;
}

// The maximum in base 2 and the sum of a query row of a block's partial.
__device__ __forceinline__ float2* partial_sum(const DecodeParams& params, int blocks, int block,
                                               LatentSlot slot, int row) {
  float* const rows = partial_row(params, blocks, blocks, LatentSlot::kContinued, 0);
  return reinterpret_cast<float2*>(rows) +
         (int64_t(block) * kLatentSlots + int(slot)) * kLatentConfig.rows + row;
}

// The largest score of a query row of a block's partial, in base 2, where the call wants it.
__device__ __forceinline__ float* partial_largest(const DecodeParams& params, int blocks, int block,
                                                  LatentSlot slot, int row) {
  float2* const sums = partial_sum(params, blocks, blocks, LatentSlot::kContinued, 0);
  return reinterpret_cast<float*>(sums) +
         (int64_t(block) * kLatentSlots + int(slot)) * kLatentConfig.rows + row;
}

}  // namespace flash3::cuda::sm90
