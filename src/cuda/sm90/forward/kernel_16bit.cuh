// SPDX-License-Identifier: Apache-2.0
// What 16-bit kernels are put together from. load_pages.cuh adds the paged ones, load_lists.cuh
// those that walk lists, device/score/softcap.cuh those with a softcap.
#pragma once

#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load.cuh"

namespace flash3::cuda::sm90 {

// Operands of a consumer (consume.cuh): float16 and bfloat16.
template <class Traits>
struct Operands16Bit {
  using Score = typename TileBias<Traits>::Score;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kProbabilityRegisters = kTileN / 4;
  static constexpr Descriptor kVLayout = Traits::VTile::kMajorMN;
  // Two warpgroups fall further apart where the next one may issue once the scores are there, three
  // and four issue sooner where it may once the products are issued.
  static constexpr PassTurn kPassTurn =
      Traits::kWarpgroups == 2 ? PassTurn::kWithScores : PassTurn::kAtIssue;
  // One copy of the softmax, not one a stage: less code to fetch. Four warpgroups, and three with
  // capped scores, have too few registers for a stage that is no constant.
  static constexpr bool kOneSoftmax =
      Traits::kWarpgroups < (Traits::kScore == ScoreKind::kSoftcap ? 3 : 4);

  __device__ __forceinline__ Operands16Bit(const ForwardParams&, const typename Traits::Shared&,
                                           int, int) {}

  static __device__ __forceinline__ void issue_scores(float (&r_s)[kTileN / 2], Descriptor q,
                                                      Descriptor k) {
    issue_abt<Traits::kElement, typename Traits::QTile, typename Traits::KTile>(r_s, q, k);
  }
  template <class Tile>
  __device__ __forceinline__ void issue_output(Tile& tile, Descriptor v) const {
    issue_add_ab<Traits::kElement, typename Traits::VTile>(tile.output, tile.probabilities, v);
  }

  template <class Tile>
  __device__ __forceinline__ void make_probabilities(Tile& tile) const {
    tile.softmax.exponentiate(tile.view(), tile.scores);
    if constexpr (Traits::kConfig.terms != BiasTerms::kNone) tile.bias.drop(tile);
    pack_probabilities<Traits::kElement>(tile.scores, tile.probabilities);
  }

  static __device__ __forceinline__ int warp_in_warpgroup(int thread) { return thread / 32; }

  // 16 bits have no scales.
  template <class Tile>
  __device__ __forceinline__ void begin_key_tile(Tile&, const typename Traits::KvState&,
                                                 const typename Traits::KvState&) {}
  template <class Tile>
  __device__ __forceinline__ void scale_scores(Tile&) const {}
  template <class Tile>
  __device__ __forceinline__ bool changes_output(const Tile&) const {
    return false;
  }
  template <class Tile>
  __device__ __forceinline__ void change_output(Tile& tile, bool,
                                                const typename Traits::KvState&) const {
    tile.softmax.scale_rows(tile.output, tile.alpha);
  }
  template <class Tile>
  __device__ __forceinline__ void complete_output(Tile&) const {}
  __device__ __forceinline__ void scale_normalisation(float (&)[2],
                                                      const typename Traits::KvState&) const {}
};

// ---- the epilogue: registers → shared memory, in the place of Q → global memory ----

// Stores a thread's two rows in float32, which has no room there, straight from registers.
template <int N>
__device__ __forceinline__ void store_float32(const ForwardParams& params, const WarpOutput& output,
                                              const float (&r_o)[N], int thread) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = thread / 32 * kWarpRows + thread % 32 / 4 + 8 * h;
    if (output.exists(row))
      store_fragment_row(output.address<float>(row), r_o, h, params.head_dim_v, params.out_in_quads,
                         thread);
  }
}

// Store of 16-bit consumers: the final output, staged in Q's place.
template <class Traits>
struct StoreInPlaceOfQ {
  static constexpr bool kInPlaceOfQ = true;

  // By lane 0 of each warp: until then the copy engine may still read its rows.
  static __device__ __forceinline__ void wait_until_read() { tma_store_wait_read(); }
  static __device__ __forceinline__ void store(const ForwardParams& params,
                                               const WarpOutput& output, uint8_t* staging,
                                               const float (&r_o)[Traits::OutTile::kCols / 2],
                                               int warpgroup, int thread) {
    using OutTile = typename Traits::OutTile;
    if (params.out_type == FloatType::kFloat32) {
      store_float32(params, output, r_o, thread);
      return;
    }
    // All four warps have read Q.
    sync(ForwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);

    const int lane = thread % 32;
    const int row = thread / 32 * 16 + lane % 16;
    const uint32_t base = uint32_t(__cvta_generic_to_shared(staging));
#pragma unroll
    for (int col = 0; col < OutTile::kCols; col += 16) {
      const float* r = &r_o[col / 2];
      stmatrix_x4(base + OutTile::offset(row, col + lane / 16 * 8),
                  pack2<Traits::kElement>(r[0], r[1]), pack2<Traits::kElement>(r[2], r[3]),
                  pack2<Traits::kElement>(r[4], r[5]), pack2<Traits::kElement>(r[6], r[7]));
    }
    fence_shared_for_async_proxy();
    sync(ForwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);

    const int first_row = thread / 32 * kWarpRows;
    if (params.out_by_tma) {
      // The warpgroup's rows in one go, or those of each slot.
      const int slot_rows = params.schedule.slot_rows;
      const bool begins = slot_rows == 0 ? thread == 0 : lane == 0 && first_row % slot_rows == 0;
      const ListedSequence& s = output.queries.sequence;
      if (begins && output.token(first_row) < s.q_length) {
        BoxAt at = box_at(params.out_rows, s.batch, s.q_first, s.q_length, output.token(first_row),
                          output.head(0));
#pragma unroll
        for (int c = 0; c < OutTile::kChunks; ++c) {
          at.dim = c * OutTile::kChunk;
          tma_store(&params.out, at,
                    staging + c * OutTile::kChunkBytes + first_row * OutTile::kRowBytes);
        }
        tma_store_commit();
      }
    } else {
      // Row strides or a base address that TMA does not take: element by element.
      for (int r = first_row; r < first_row + kWarpRows; ++r) {
        if (!output.exists(r)) continue;
        uint16_t* out = output.address<uint16_t>(r);
        for (int col = lane; col < params.head_dim_v; col += 32) {
          out[col] =
              reinterpret_cast<const uint16_t*>(staging + OutTile::offset(r, col / 8 * 8))[col % 8];
        }
      }
      sync(ForwardBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
    }
  }
};

// ---- the kernel ----

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::k16Bit)
struct PoliciesOf<kRow, kElement> {
  using Traits = ForwardTraits<kRow, kElement>;
  using Producer = TmaProducer<Traits>;
  using Operands = Operands16Bit<Traits>;
  using Store = StoreInPlaceOfQ<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
