// SPDX-License-Identifier: Apache-2.0
// The kernel for a rotation without a rotary embedding, of tensors that allow accesses of 16 bytes.
// The elements stay in registers as they came; the kernel rotates them once for the largest and
// once more for the rounding.
#pragma once

#include "cuda/quantize/kernel.cuh"
#include "cuda/quantize/rotate.cuh"

namespace flash3::cuda {

// What a block of threads works on, as offsets from its tensor's bases. The first warp finds it and
// leaves it in shared memory for all.
struct FoundTile {
  long long in, out, scale;
  int tensor;
  int count;  // tokens; 0: no tile
};

// The whole block calls this.
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
      // Scales of blocks belong to one head each: they need no division.
      found->scale = t.scale.kind == ScaleKind::kBlock
                         ? tile.batch * t.scale.stride_batch + tile.head * t.scale.stride_head +
                               tile.scale_block * t.scale.stride_block
                         : t.scale.offset(tile.batch, tile.head, tile.scale_block);
    }
  }
  __syncthreads();
}

// kDim: the head dim of all tensors.
template <Element kElement, int kDim>
__global__ void __launch_bounds__(WarpElements<kElement, kDim>::kThreads,
                                  kQuantizeThreads / WarpElements<kElement, kDim>::kThreads)
    quantize_rotating_kernel(const __grid_constant__ QuantizeParams params) {
  __shared__ HadamardEntries s_entries;
  __shared__ FoundTile s_tile;
  find_tile_for_block<kElement>(params, &s_tile, &s_entries);
  if (s_tile.count == 0) return;

  using Elements = WarpElements<kElement, kDim>;
  Elements elements;
  const WarpRotation<kElement, kDim> rotation{s_entries};
  float factor;
  {
    const QuantizedTensor& tensor = params.tensors[s_tile.tensor];
    elements.load(tensor.in.data + s_tile.in, tensor.in.stride_seq, s_tile.count);
    elements.change_signs(params.signs, tensor.transforms);
    const auto largest = [&] {
      return tensor.transforms ? __float_as_uint(rotation.largest(elements)) : elements.largest();
    };
    if (!block_factor<Elements::kThreads>(params, tensor, tensor.scale.data + s_tile.scale, largest,
                                          &factor))
      return;
  }

  // Read again: there were no registers to keep it.
  const QuantizedTensor& tensor = params.tensors[s_tile.tensor];
  const CodeOutput out{tensor.out.data + s_tile.out + Elements::column(), tensor.out.stride_seq,
                       s_tile.count};
  if (tensor.transforms)
    rotation.store(elements, factor, out);
  else
    elements.store(factor, out);
}

}  // namespace flash3::cuda
