// SPDX-License-Identifier: Apache-2.0
// As quantize_kernel, for a rotation without rotary of tensors that are accessed 16 bytes at a
// time: the elements stay in registers as they came, and are rotated once for the largest and once
// more for the rounding.
#pragma once

#include "hopper/quantize/kernel.cuh"
#include "hopper/quantize/rotate.cuh"

namespace flash3::hopper {

// What a block of threads has, found by its first warp for all, in shared memory: offsets from its
// tensor's bases.
struct FoundTile {
  long long in, out, scale;
  int tensor, count;  // 0 tokens: no tile
};

// All threads come here.
template <Element kElement>
__device__ __forceinline__ void find_tile_for_block(const QuantizeParams& params, FoundTile* found,
                                                    HadamardEntries* entries) {
  if (threadIdx.x < 32) {
    entries->fill<kElement>();
    QuantizeTile tile;
    const bool any = find_tile(params, &tile);
    if (threadIdx.x == 0) found->count = any ? tile.count : 0;
    if (any && threadIdx.x == 0) {
      const QuantizedTensor& t = params.tensors[tile.tensor];
      found->tensor = tile.tensor;
      found->in = t.in.offset(tile.batch, tile.row, tile.head);
      found->out = t.out.offset(tile.batch, tile.row, tile.head);
      // Scales of blocks are of one head each: no division for them.
      found->scale = t.scale.kind == ScaleKind::kBlock
                         ? tile.batch * t.scale.stride_batch + tile.head * t.scale.stride_head +
                               tile.scale_block * t.scale.stride_block
                         : t.scale.offset(tile.batch, tile.head, tile.scale_block);
    }
  }
  __syncthreads();
}

// kDim: the head dims, all of them.
template <Element kElement, int kDim>
__global__ void __launch_bounds__(WarpRows<kElement, kDim>::kThreads,
                                  kQuantizeThreads / WarpRows<kElement, kDim>::kThreads)
    quantize_rotating_kernel(const __grid_constant__ QuantizeParams params) {
  __shared__ HadamardEntries s_entries;
  __shared__ FoundTile s_tile;
  find_tile_for_block<kElement>(params, &s_tile, &s_entries);
  if (s_tile.count == 0) return;

  using Rows = WarpRows<kElement, kDim>;
  Rows rows;
  const WarpRotation<kElement, kDim> rotation{s_entries};
  float factor;
  {
    const QuantizedTensor& tensor = params.tensors[s_tile.tensor];
    rows.load(tensor.in.data + s_tile.in, tensor.in.stride_seq, s_tile.count);
    rows.change_signs(params.signs, tensor.turns);
    const auto largest = [&] {
      return tensor.turns ? __float_as_uint(rotation.largest(rows)) : rows.largest();
    };
    if (!block_factor<Rows::kThreads>(params, tensor, tensor.scale.data + s_tile.scale, largest,
                                      &factor))
      return;
  }

  // Once more from memory: registers are short before.
  const QuantizedTensor& tensor = params.tensors[s_tile.tensor];
  const CodeRows out{tensor.out.data + s_tile.out + Rows::column(), tensor.out.stride_seq,
                     s_tile.count};
  if (tensor.turns)
    rotation.store(rows, factor, out);
  else
    rows.store(factor, out);
}

}  // namespace flash3::hopper
