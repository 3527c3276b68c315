// SPDX-License-Identifier: Apache-2.0
// The epilogue of a consumer warpgroup: gradients go from registers to shared memory, where K and V
// were, and on to global memory; in float32 straight from registers.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/sm90/backward/walk.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

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

// Where a gradient is staged: rows row_block · 64 … of a tile, whose chunks of columns need not
// follow one another.
template <class Tile_, int kChunkBytes_ = Tile_::kChunkBytes>
struct StagedGradient {
  using Tile = Tile_;
  static constexpr int kChunkBytes = kChunkBytes_;

  uint8_t* tile;
  int row_block;

  __device__ __forceinline__ int row(int r) const { return row_block * kWarpgroupRows + r; }
  // The byte offset of an element; col a multiple of 8.
  static __device__ __forceinline__ int offset(int row, int col) {
    return col / Tile::kChunk * kChunkBytes + Tile::offset(row, col % Tile::kChunk);
  }
};

// Rounds the gradients of 64 keys and stages them.
template <Element kElement, class Staged>
__device__ __forceinline__ void stage_gradient(const Staged& staged,
                                               const float (&r)[Staged::Tile::kCols / 2],
                                               int thread) {
  const int lane = thread % 32;
  const int row = staged.row(thread / 32 * 16 + lane % 16);
  const uint32_t base = uint32_t(__cvta_generic_to_shared(staged.tile));
#pragma unroll
  for (int col = 0; col < Staged::Tile::kCols; col += 16) {
    const float* x = &r[col / 2];
    stmatrix_x4(base + Staged::offset(row, col + lane / 16 * 8), pack2<kElement>(x[0], x[1]),
                pack2<kElement>(x[2], x[3]), pack2<kElement>(x[4], x[5]),
                pack2<kElement>(x[6], x[7]));
  }
}

// Stores the gradients of 64 keys from first_key on. Unused keys get zeros. kLast: the warpgroup
// ends after it, so that the thread waits where it stores; ptxas makes a loop of each store if it
// waits elsewhere.
template <class Staged, bool kLast = false>
__device__ __forceinline__ void store_gradient(const GradientOut& out, const KeyTile& work,
                                               int first_key, const Staged& staged, int thread) {
  using Tile = typename Staged::Tile;
  const ListedSequence& s = work.sequence;
  const int count = min(kWarpgroupRows, s.k_capacity - first_key);
  if (count <= 0) return;
  if (out.map != nullptr) {
    if (thread == 0) {
      BoxAt at = box_at(out.map_rows, s.batch, s.k_first, s.k_capacity, first_key, work.kv_head);
#pragma unroll
      for (int c = 0; c < Tile::kChunks; ++c) {
        at.dim = c * Tile::kChunk;
        tma_store(out.map, at,
                  staged.tile + c * Staged::kChunkBytes + staged.row(0) * Tile::kRowBytes);
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
          staged.tile + Staged::offset(staged.row(r), col / 8 * 8))[col % 8];
    }
  }
}

// Takes the gradients of one warpgroup's 64 keys from its registers to global memory. They are
// staged at the keys' own rows.
template <Element kElement, bool kLast = false, class Staged>
__device__ __forceinline__ void finish_gradient(const GradientOut& out, const KeyTile& work,
                                                const Staged& staged,
                                                const float (&r)[Staged::Tile::kCols / 2],
                                                int warpgroup, int thread) {
  const int first_key = work.key + staged.row(0);
  stage_gradient<kElement>(staged, r, thread);
  fence_shared_for_async_proxy();
  sync(BackwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  store_gradient<Staged, kLast>(out, work, first_key, staged, thread);
  if (!kLast && thread == 0) tma_store_wait_read();  // a block's memory must outlive its stores
}

// Persistent: stores dV from where K was and dK from where dS was, and goes on.
template <class Traits>
__device__ __forceinline__ void store_own_keys(const BackwardParams& params,
                                               typename Traits::Shared& shared, const KeyTile& work,
                                               int k_slot,
                                               const float (&r_dk)[Traits::kHeadDim / 2],
                                               const float (&r_dv)[Traits::kHeadDimV / 2],
                                               int warpgroup, int thread) {
  using DsTile = typename Traits::DsTile;
  using OwnTile = SharedTile<kWarpgroupRows, Traits::kHeadDim>;
  static_assert(Traits::kHeadDimV <= Traits::kHeadDim);
  static_assert(OwnTile::kChunkBytes <= DsTile::kChunkBytes && OwnTile::kChunks <= kDsStages);
  const int first_key = work.key + warpgroup * kWarpgroupRows;
  const StagedGradient<typename Traits::VTile> dv{shared.k[k_slot], warpgroup};
  const StagedGradient<OwnTile, DsTile::kBytes> dk{shared.ds[0] + warpgroup * DsTile::kChunkBytes,
                                                   0};
  stage_gradient<Traits::kElement>(dv, r_dv, thread);
  stage_gradient<Traits::kElement>(dk, r_dk, thread);
  fence_shared_for_async_proxy();
  sync(BackwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  store_gradient(dv_out(params), work, first_key, dv, thread);
  store_gradient(dk_out(params), work, first_key, dk, thread);
}

// Persistent: waits until store_own_keys() of the key tile before has read what it staged, and
// frees that tile's K. The whole warpgroup calls this.
template <class Traits>
__device__ __forceinline__ void wait_for_stored_keys(typename Traits::Shared& shared,
                                                     const Walked& walked, int warpgroup,
                                                     int thread) {
  if (thread == 0) tma_store_wait_read();
  sync(BackwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  static_assert(Traits::kKeySlots == 2);
  const int slot_before = (walked.key_tiles + 1) % 2;
  arrive_if(walked.key_tiles > 0, &shared.k_barriers.empty[slot_before]);
}

// The end of a key tile in a consumer that holds dK and dV of 64 keys.
template <class Traits>
__device__ __forceinline__ void finish_own_keys(const BackwardParams& params,
                                                typename Traits::Shared& shared,
                                                const KeyTile& work, int k_slot,
                                                float (&r_dk)[Traits::kHeadDim / 2],
                                                const float (&r_dv)[Traits::kHeadDimV / 2],
                                                int warpgroup, int thread) {
#pragma unroll
  for (float& x : r_dk) x *= params.softmax_scale;
  if (params.float32_gradients) {
    // Each way computes it: of one in common ptxas makes the loop of 80x128 3 % slower.
    const int first_key = work.key + warpgroup * kWarpgroupRows;
    thread = hide_from_optimizer(thread);  // what follows from it waits in no register
    store_float32(dv_out(params), work, first_key, r_dv, thread);
    store_float32(dk_out(params), work, first_key, r_dk, thread);
    return;
  }
  // The gradients take the place of what both warpgroups must have read.
  sync(BackwardBarrier::kOwnKeysRead, 0, kConsumerThreads);
  if constexpr (Traits::kPersistent) {
    store_own_keys<Traits>(params, shared, work, k_slot, r_dk, r_dv, warpgroup, thread);
  } else {
    const StagedGradient<typename Traits::VTile> dv{shared.v, warpgroup};
    const StagedGradient<typename Traits::KTile> dk{shared.k[0], warpgroup};
    finish_gradient<Traits::kElement>(dv_out(params), work, dv, r_dv, warpgroup, thread);
    finish_gradient<Traits::kElement>(dk_out(params), work, dk, r_dk, warpgroup, thread);
  }
}

}  // namespace flash3::cuda::sm90
