// SPDX-License-Identifier: Apache-2.0
// A block of threads brings 128 tokens of one head to FP8. It reads them once and keeps them in
// registers between the search for the largest element and the rounding.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/quantize/elements.cuh"
#include "cuda/quantize/rotate.cuh"
#include "cuda/varlen/find_sequence.cuh"

namespace flash3::cuda {
inline constexpr int kQuantizeRows = 16;  // that the threads of a block hold at a time
inline constexpr int kQuantizeSteps = int(kScaleBlock) / kQuantizeRows;
inline constexpr int kQuantizeThreads = 512;  // of a multiprocessor: 128 registers each

// A whole warp calls this.
__device__ __forceinline__ bool find_tile(const QuantizeParams& params, QuantizeTile* tile) {
  if (!find_tensor(params, Index(blockIdx.y) * gridDim.x + blockIdx.x, tile)) return false;
  const QuantizedTensor& t = params.tensors[tile->tensor];
  int b = 0;
  if (t.sequences.packed)
    b = last_place_from(t.batch, 0,
                        [&](int i) { return first_scale_block(t, i) - tile->scale_block; });
  return find_tokens(t, b, tile);
}

// The bits of the block's largest size; infinity and NaN are above all others. A kernel calls this
// once.
template <int kThreads>
__device__ __forceinline__ uint32_t largest_in_block(uint32_t bits) {
  __shared__ uint32_t s_largest[kThreads / 32];
  bits = __reduce_max_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) s_largest[threadIdx.x / 32] = bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) bits = max(bits, s_largest[i]);
  return bits;
}

__device__ __forceinline__ float* scale_at(const QuantizedTensor& t, const QuantizeTile& tile) {
  return t.scale.data + t.scale.offset(tile.batch, tile.head, tile.scale_block);
}

// Computes what the elements of a block are multiplied with, from its scale; writes the scale if it
// is the block's own. False: this launch only seeks sizes. largest() gives the bits of the thread's
// largest size; it is called only where that matters. A kernel calls this once.
template <int kThreads, class Largest>
__device__ __forceinline__ bool block_factor(const QuantizeParams& params,
                                             const QuantizedTensor& tensor, float* scale_at,
                                             const Largest& largest, float* factor) {
  const bool wide_scale = tensor.scale.kind != ScaleKind::kBlock;
  float scale;
  if (wide_scale && !params.gathers) {
    scale = *scale_at;
  } else {
    const uint32_t of_block = largest_in_block<kThreads>(largest());
    if (wide_scale) {
      // Most blocks see that another one has raised it above theirs and leave it.
      uint32_t* const raised = reinterpret_cast<uint32_t*>(scale_at);
      if (threadIdx.x == 0 && *static_cast<volatile uint32_t*>(raised) < of_block)
        atomicMax(raised, of_block);
      return false;
    }
    scale = scale_of_amax(float_of(of_block));
    if (threadIdx.x == 0) *scale_at = scale;
  }
  *factor = reciprocal_of_scale(scale);
  return true;
}

// The elements that a thread holds: kThreadColumns columns of kQuantizeSteps rows.
struct ThreadElements {
  uint32_t pairs[kQuantizeSteps][kPairs];

  // Calls each(step, pairs) for all rows. Not unrolled, for code that is rare and long: registers
  // have no index, so the rows move on by one each time.
  template <bool kUnrolled, class Each>
  __device__ __forceinline__ void for_each(const Each& each) {
    if constexpr (kUnrolled) {
#pragma unroll
      for (int step = 0; step < kQuantizeSteps; ++step) each(step, pairs[step]);
    } else {
#pragma unroll 1
      for (int step = 0; step < kQuantizeSteps; ++step) {
        each(step, pairs[0]);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const uint32_t first = pairs[0][i];
#pragma unroll
          for (int next = 1; next < kQuantizeSteps; ++next) pairs[next - 1][i] = pairs[next][i];
          pairs[kQuantizeSteps - 1][i] = first;
        }
      }
    }
  }
};

// kTransforms: the call has a rotary embedding or a rotation; this tensor may have neither.
template <Element kElement, int kColumns, bool kTransforms>
__global__ void __launch_bounds__(kColumns, kQuantizeThreads / kColumns)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
  QuantizeTile tile;
  if (!find_tile(params, &tile)) return;
  const QuantizedTensor& tensor = params.tensors[tile.tensor];

  constexpr int kLanes = kColumns / kThreadColumns;
  const int column = int(threadIdx.x) % kLanes * kThreadColumns;
  const int first_row = int(threadIdx.x) / kLanes, dim = tensor.dim, count = tile.count;
  const auto row_of = [&](int step) { return first_row + step * kQuantizeRows; };
  const uint16_t* const in = tensor.in.row(tile.batch, tile.row, tile.head);
  const long long in_stride = tensor.in.stride_seq;

  ThreadElements elements;
  if (tensor.in.width == 16) {
    elements.for_each<true>([&](int step, uint32_t(&pairs)[kPairs]) {
      load_wide(in + row_of(step) * in_stride, column, dim, row_of(step) < count, pairs);
    });
  } else {
    elements.for_each<false>([&](int step, uint32_t(&pairs)[kPairs]) {
      load_narrow(in + row_of(step) * in_stride, column, dim, row_of(step) < count,
                  tensor.in.width == 4, pairs);
    });
  }

  uint32_t largest = 0;
  if constexpr (kTransforms) {
    const bool has_rope = tensor.transforms && params.rotary.cos != nullptr;
    const bool rotates = tensor.transforms && params.rotates;
    uint32_t signs[kPairs];
    load_signs(params, column, signs);
    const float factor = column < dim ? rotation_factor(dim, column) : 0.f;
    float size = 0.f, x[kThreadColumns];
    const auto unpack = [&](const uint32_t(&pairs)[kPairs]) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        x[2 * i] = low_float<kElement>(pairs[i]);
        x[2 * i + 1] = high_float<kElement>(pairs[i]);
      }
    };
    const auto pack = [&](uint32_t(&pairs)[kPairs]) {
#pragma unroll
      for (const float each : x) size = larger_size(size, each);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = pack_odd(x[2 * i], x[2 * i + 1]);
    };
    if (!has_rope && (!rotates || dim % kThreadColumns == 0)) {
      elements.for_each<true>([&](int, uint32_t(&pairs)[kPairs]) {
        if (rotates) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) pairs[i] ^= signs[i];
        }
        unpack(pairs);
        if (rotates) rotate<kColumns, true>(column, dim, factor, x);
        pack(pairs);
      });
    } else {
      elements.for_each<false>([&](int step, uint32_t(&pairs)[kPairs]) {
        // The compiler computes what follows from the column for each row again: there are no
        // registers for all of it.
        const int c = hide_from_optimizer(column);
        unpack(pairs);
        if (has_rope && row_of(step) < count)
          apply_rope<kElement>(params.rotary, tensor.rotary_offset + tile.token + row_of(step),
                               in + row_of(step) * in_stride, c, x);
        if (rotates) {
#pragma unroll
          for (int i = 0; i < kThreadColumns; ++i) {
            const uint32_t sign = i % 2 == 0 ? signs[i / 2] << 16 : signs[i / 2] & 0x80000000u;
            x[i] = __uint_as_float(__float_as_uint(x[i]) ^ sign);
          }
          rotate<kColumns, false>(c, dim, factor, x);
        }
        pack(pairs);
      });
    }
    largest = __float_as_uint(size);
  } else {
    uint32_t sizes = 0;
    elements.for_each<true>([&](int, uint32_t(&pairs)[kPairs]) {
#pragma unroll
      for (const uint32_t pair : pairs) sizes = larger_sizes(sizes, pair);
    });
    largest = __float_as_uint(to_float<kElement>(uint16_t(max(sizes & 0xFFFFu, sizes >> 16))));
  }

  float factor;
  if (!block_factor<kColumns>(
          params, tensor, scale_at(tensor, tile), [&] { return largest; }, &factor))
    return;
  constexpr Element kHeld = kTransforms ? Element::kBFloat16 : kElement;
  unsigned char* const out = tensor.out.row(tile.batch, tile.row, tile.head);
  const auto out_row = [&](int step) { return out + row_of(step) * tensor.out.stride_seq; };
  if (tensor.out.width == 16) {
    elements.for_each<true>([&](int step, const uint32_t(&pairs)[kPairs]) {
      if (row_of(step) < count && column < dim)
        store_wide<kHeld>(pairs, factor, out_row(step) + column);
    });
  } else {
    elements.for_each<false>([&](int step, const uint32_t(&pairs)[kPairs]) {
      if (row_of(step) < count)
        store_narrow<kHeld>(pairs, factor, out_row(step), column, dim, tensor.out.width == 4);
    });
  }
}

// The kernel for a rotation without a rotary embedding, of tensors that allow accesses of 16 bytes.
// The elements stay in registers as they came; the kernel rotates them once for the largest and
// once more for the rounding.

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

// The kernels of one element type, by head dim and by what they do.

template <Element kElement>
const void* quantize_kernel_of(int columns, bool transforms) {
  const auto pick = [transforms](auto* transforming, auto* plain) {
    return reinterpret_cast<const void*>(transforms ? transforming : plain);
  };
  switch (columns) {
    case 64: return pick(quantize_kernel<kElement, 64, true>, quantize_kernel<kElement, 64, false>);
    case 128:
      return pick(quantize_kernel<kElement, 128, true>, quantize_kernel<kElement, 128, false>);
    default:
      return pick(quantize_kernel<kElement, 256, true>, quantize_kernel<kElement, 256, false>);
  }
}

template <Element kElement>
const void* quantize_rotating_kernel_of(int dim) {
  const auto address = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  switch (dim) {
    case 64: return address(quantize_rotating_kernel<kElement, 64>);
    case 96: return address(quantize_rotating_kernel<kElement, 96>);
    case 128: return address(quantize_rotating_kernel<kElement, 128>);
    case 192: return address(quantize_rotating_kernel<kElement, 192>);
    case 256: return address(quantize_rotating_kernel<kElement, 256>);
    default: return nullptr;
  }
}

}  // namespace flash3::cuda
