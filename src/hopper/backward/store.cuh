// SPDX-License-Identifier: Apache-2.0
// The epilogue of a consumer warpgroup: gradients go from registers to shared memory, where K and V
// were, and on to global memory; in float32 straight from registers.
#pragma once

#include "hopper/backward/traits.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// Where dK or dV goes.
struct GradientOut {
  const TensorMap* map;  // null where TMA cannot store the rows; then threads store elements
  const RowMap& map_rows;
  const ElementView& view;
  int columns;
};
__device__ __forceinline__ GradientOut dk_out(const BackwardParams& params) {
  return {params.dk_by_tma ? &params.dk : nullptr, params.dk_rows, params.dk_out, params.head_dim};
}
__device__ __forceinline__ GradientOut dv_out(const BackwardParams& params) {
  return {params.dv_by_tma ? &params.dv : nullptr, params.dv_rows, params.dv_out,
          params.head_dim_v};
}

// Where the gradients of key first_key go, in elements of the tensor.
__device__ __forceinline__ int64_t first_element(const ElementView& view, const KeyTile& work,
                                                 int first_key) {
  const ListedSequence& s = work.sequence;
  return s.batch * view.stride_batch + work.kv_head * view.stride_head +
         (int64_t(s.k_first) + first_key) * view.stride_seq;
}

// Stores the gradients of 64 keys from first_key on in float32, straight from registers: shared
// memory has no room for them.
template <int N>
__device__ __forceinline__ void store_float32(const GradientOut& out, const KeyTile& work,
                                              int first_key, const float (&r)[N], int thread) {
  const ElementView& view = out.view;
  float* const data = static_cast<float*>(view.data) + first_element(view, work, first_key);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * h;
    if (first_key + row < work.sequence.k_capacity)
      store_fragment_row(data + row * view.stride_seq, r, h, out.columns, view.aligned, thread);
  }
}

// Rounds 64 rows and stores them to rows row_block · 64 … of the tile.
template <Element kElement, class Tile>
__device__ __forceinline__ void stage_gradient(uint8_t* tile, const float (&r)[Tile::kCols / 2],
                                               int row_block, int thread) {
  const int lane = thread % 32;
  const int row = row_block * kWarpgroupRows + thread / 32 * 16 + lane % 16;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(tile));
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += 16) {
    const float* x = &r[col / 2];
    stmatrix_x4(base + Tile::offset(row, col + lane / 16 * 8), pack2<kElement>(x[0], x[1]),
                pack2<kElement>(x[2], x[3]), pack2<kElement>(x[4], x[5]),
                pack2<kElement>(x[6], x[7]));
  }
}

// Stores the gradients of 64 keys from first_key on. Unused keys get zeros. kLast: the warpgroup
// ends behind it, so that the thread waits where it stores; ptxas makes a loop of each store if it
// waits elsewhere.
template <class Tile, bool kLast = false>
__device__ __forceinline__ void store_gradient(const GradientOut& out, const KeyTile& work,
                                               int first_key, const uint8_t* tile, int row_block,
                                               int thread) {
  const ListedSequence& s = work.sequence;
  const int count = min(kWarpgroupRows, s.k_capacity - first_key);
  if (count <= 0) return;
  const int first_row = row_block * kWarpgroupRows;
  if (out.map != nullptr) {
    if (thread == 0) {
      BoxAt at = box_at(out.map_rows, s.batch, s.k_first, s.k_capacity, first_key, work.kv_head);
#pragma unroll
      for (int c = 0; c < Tile::kChunks; ++c) {
        at.dim = c * Tile::kChunk;
        tma_store(out.map, at, tile + c * Tile::kChunkBytes + first_row * Tile::kRowBytes);
      }
      tma_store_commit();
      if constexpr (kLast) tma_store_wait_read();
    }
    return;
  }
  const ElementView& view = out.view;
  uint16_t* data = static_cast<uint16_t*>(view.data) + first_element(view, work, first_key);
  for (int r = thread / 32; r < count; r += 4) {
    for (int col = thread % 32; col < out.columns; col += 32) {
      data[r * view.stride_seq + col] = reinterpret_cast<const uint16_t*>(
          tile + Tile::offset(first_row + r, col / 8 * 8))[col % 8];
    }
  }
}

// Takes one warpgroup's 64 keys from its registers to global memory, through the tile.
template <Element kElement, class Tile, bool kLast = false>
__device__ __forceinline__ void finish_gradient(const GradientOut& out, const KeyTile& work,
                                                uint8_t* tile, const float (&r)[Tile::kCols / 2],
                                                int row_block, int warpgroup, int thread) {
  const int first_key = work.key + row_block * kWarpgroupRows;
  stage_gradient<kElement, Tile>(tile, r, row_block, thread);
  fence_shared_for_async_proxy();
  sync(BackwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  store_gradient<Tile, kLast>(out, work, first_key, tile, row_block, thread);
  if (!kLast && thread == 0) tma_store_wait_read();  // a block's memory must outlive its stores
}

// The end of a consumer that holds dK and dV of 64 keys.
template <class Traits>
__device__ __forceinline__ void finish_own_keys(const BackwardParams& params,
                                                typename Traits::Shared& shared,
                                                const KeyTile& work,
                                                float (&r_dk)[Traits::kHeadDim / 2],
                                                const float (&r_dv)[Traits::kHeadDimV / 2],
                                                int warpgroup, int thread) {
#pragma unroll
  for (float& x : r_dk) x *= params.softmax_scale;
  if (params.float32_gradients) {
    const int first_key = work.key + warpgroup * kWarpgroupRows;
    thread = hide_from_optimizer(thread);  // what follows from it waits in no register
    store_float32(dv_out(params), work, first_key, r_dv, thread);
    store_float32(dk_out(params), work, first_key, r_dk, thread);
    return;
  }
  // The gradients take the place of K and V: both warpgroups must have read them.
  sync(BackwardBarrier::kOwnKeysRead, 0, kConsumerThreads);
  finish_gradient<Traits::kElement, typename Traits::VTile>(dv_out(params), work, shared.v, r_dv,
                                                            warpgroup, warpgroup, thread);
  finish_gradient<Traits::kElement, typename Traits::KTile>(dk_out(params), work, shared.k, r_dk,
                                                            warpgroup, warpgroup, thread);
}

}  // namespace flash3::hopper
