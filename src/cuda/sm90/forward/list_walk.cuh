// SPDX-License-Identifier: Apache-2.0
// What consumers that walk the lists of a mask (core/mask_lists.hpp) do otherwise: they read what
// rows see, and, where tiles are half a block, a warpgroup passes some.
#pragma once

#include "cuda/device/ptx/mma.cuh"
#include "cuda/sm90/device/seen_keys.cuh"
#include "cuda/sm90/forward/consume.cuh"
#include "cuda/sm90/forward/kernel_params.h"

namespace flash3::cuda::sm90 {

// issue_abt() with A in registers, as load_rows() has it.
template <Element T, class BTile>
__device__ __forceinline__ void issue_abt(float (&r)[BTile::kRows / 2],
                                          uint32_t (&r_a)[BTile::kCols / 4], Descriptor b) {
  mark_undefined(r);
  fence_operand(r_a);
  wgmma_fence();
#pragma unroll
  for (int col = 0; col < BTile::kCols; col += BTile::kStep) {
    Wgmma<T, BTile::kRows>::template rs<false>(r, &r_a[col / 4], b + BTile::k_step(col), col != 0);
  }
  wgmma_commit();
}

// Loads a warpgroup's rows of a tile as the operand in registers. 16 bits.
template <class Tile>
__device__ __forceinline__ void load_rows(uint32_t (&r)[Tile::kCols / 4], const void* shared,
                                          int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared));
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += 16)
    ldmatrix_x4(base + Tile::offset(row, col + lane / 16 * 8), &r[col / 4]);
}

template <class Traits>
struct KeyWalk<Traits, true> {
  // A key tile is half of a listed block, of which a warpgroup's queries may see nothing.
  static constexpr bool kPassesTiles = Traits::kTileN < Traits::kTileM;
  // Products of few keys read K as fast as shared memory gives it: Q comes from registers.
  static constexpr bool kQInRegisters = kPassesTiles && Traits::kConfig.head_dim <= 128;
  using Queries = uint32_t[kQInRegisters ? Traits::kConfig.head_dim / 4 : 1];

  struct OfWorkTile {
    RowsOfMask rows;
    SeenKeys seen = {};
    bool last = false;  // of the list
  };

  template <class C>
  static __device__ __forceinline__ OfWorkTile begin(const C& c) {
    static_assert(C::kDescribeUnderScores, "the work tile is still there");
    const WorkTile& work = c.tiles.tile();
    return {{kernel_params(c.params).mask, work.sequence.batch, work.head_group, work.query,
             c.warpgroup * kWarpgroupRows + c.row, c.warpgroup * kWarpgroupThreads + c.thread}};
  }
  template <class C, class Tile>
  static __device__ __forceinline__ void read(const C& c, Tile& tile, int stage) {
    const MaskTile listed = noted_tile(c.shared.listed[stage]);
    tile.walked.seen.template read<C::kTileN>(kernel_params(c.params).mask, tile.walked.rows,
                                              listed, c.warpgroup);
    __syncwarp();  // before one lane releases the stage
  }
  template <class Tile>
  static __device__ __forceinline__ int number(const Tile& tile) {
    return tile.walked.seen.tile;
  }
  template <class C, class Tile>
  static __device__ __forceinline__ void mask(const C&, Tile& tile) {
    tile.walked.seen.apply(tile.view(), tile.scores);
  }

  // ---- lists of which a warpgroup passes over tiles: those that are half a block ----
  // Warpgroups keep no step: each issues its products as they come.

  template <class C, class Tile, class Meanwhile>
  static __device__ __forceinline__ void first_scores(C& c, Tile& tile,
                                                      const Meanwhile& meanwhile) {
    const int stage = c.k_state.stage, q_stage = c.q_state.stage;
    c.pending_v = c.k_state;
    wait(&c.shared.q_barriers[c.warpgroup].full[q_stage], c.q_state.phase, "q_full");
    if constexpr (kQInRegisters)
      load_rows<typename C::QTile>(tile.queries, c.shared.q[q_stage][c.warpgroup], c.thread);
    wait(&c.shared.k_barriers.full[stage], c.k_state.phase, "k_full");
    issue_scores(c, tile, stage);
    if (C::kHoldQ && c.previous_q_is_held) c.release_q(1 - q_stage);
    tile.walked.last = noted_tile(c.shared.listed[stage]).last();
    read(c, tile, stage);
    meanwhile();
    wgmma_wait<0>();
    fence_operand(tile.scores);
    release(&c.shared.k_barriers.empty[stage], c.thread);
    c.k_state.advance();
  }

  template <class C, class Tile>
  static __device__ __forceinline__ void run(C& c, Tile& tile) {
#pragma unroll 1
    while (find_tile(c, tile)) {
      const int stage = c.k_state.stage;
      issue_scores(c, tile, stage);
      c.issue_output(tile, c.pending_v);
      read(c, tile, stage);
      wgmma_wait<1>();
      fence_operand(tile.scores);
      release(&c.shared.k_barriers.empty[stage], c.thread);
      const bool raised = c.begin_softmax(tile);
      wgmma_wait<0>();
      fence_operand(tile.output);
      fence_operand(tile.probabilities);
      release_v(c);
      c.finish_softmax(tile, raised, stage);
      c.k_state.advance();
    }
  }

  // V of the tile whose product is done, and of those that were passed over since.
  template <class C>
  static __device__ __forceinline__ void release_v(C& c) {
    auto& v = c.pending_v;
    for (; v.stage != c.k_state.stage || v.phase != c.k_state.phase; v.advance()) {
      wait(&c.shared.v_barriers.full[v.stage], v.phase, "v_full");
      release(&c.shared.v_barriers.empty[v.stage], c.thread);
    }
  }

 private:
  template <class C, class Tile>
  static __device__ __forceinline__ void issue_scores(C& c, Tile& tile, int stage) {
    if constexpr (kQInRegisters)
      issue_abt<Traits::kElement, typename Traits::KTile>(tile.scores, tile.queries,
                                                          c.k + stage * C::KTile::kBytes);
    else
      c.issue_scores(tile.scores, tile.q, stage);
  }

  // Goes on to the next key tile of the list that the warpgroup sees; false if there is none. K of
  // those between goes back unread. Their V waits for that of the tile before, and the other
  // warpgroup may wait for it: so that this one never waits for both, it takes one that it does not
  // see after as many as fill the ring with the one before.
  template <class C, class Tile>
  static __device__ __forceinline__ bool find_tile(C& c, Tile& tile) {
    for (int most = C::kStages - 1; !tile.walked.last; --most) {
      const int stage = c.k_state.stage;
      wait(&c.shared.k_barriers.full[stage], c.k_state.phase, "k_full");
      const MaskTile listed{unsigned(uniform(int(noted_tile(c.shared.listed[stage]).bits))), 0};
      tile.walked.last = listed.last();
      if (listed.sees(c.warpgroup, listed.tile() % 2) || most == 0) return true;
      __syncwarp();
      release(&c.shared.k_barriers.empty[stage], c.thread);
      c.k_state.advance();
    }
    return false;
  }
};

}  // namespace flash3::cuda::sm90
