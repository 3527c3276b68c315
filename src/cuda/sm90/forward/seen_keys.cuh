// SPDX-License-Identifier: Apache-2.0
// What consumers that walk the lists of a mask (core/mask_lists.hpp) do otherwise: which keys of a
// tile a thread's two rows see, and, where tiles are half a block, which tiles a warpgroup passes.
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/sm90/device/mask_tile.cuh"
#include "cuda/sm90/forward/consume.cuh"
#include "cuda/sm90/forward/kernel_params.h"

namespace flash3::cuda::sm90 {

// Where a thread finds what its two rows see, in each work tile.
struct RowsOfMask {
  const MaskRange* range;  // of its first row, in the first range; the second row is 8 rows on
  const unsigned* words;   // of the thread, in the first slot

  // of: the first row of the work tile, the thread's first row in it, the thread among those of two
  // warpgroups.
  __device__ __forceinline__ RowsOfMask(const MaskMemory& mask, int batch, int head, int first_row,
                                        int row, int thread)
      : range(mask.range(0, batch, head, first_row + row)), words(mask.words + thread) {}

  // Those of both rows, as begin and end.
  __device__ __forceinline__ void read_ranges(const MaskMemory& mask, int which, uint2& upper,
                                              uint2& lower) const {
    const MaskShape& shape = mask.shape;
    const auto* at =
        reinterpret_cast<const uint2*>(range + which * (shape.batch * shape.heads * shape.rows()));
    upper = __ldg(at), lower = __ldg(at + 8);
  }
};

// Rows that see the keys whose bits are set, of which a word has 16 of each row: those of its
// second row come after those of the first.
struct BitMask {
  const uint32_t (&words)[2];

  template <int N>
  __device__ __forceinline__ void apply(const QueriesByKeys<N>&, float (&r_s)[N]) const {
    using View = QueriesByKeys<N>;
    static_assert(View::kKeys <= 32);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        float& x = View::at(r_s, r, k);
        x = words[k / 16] & 1u << (16 * r + k % 16) ? x : -kInfinity;
      }
  }
};

static_assert(ScoreMask<BitMask, QueriesByKeys<8>>);

// The 16 keys of a thread from this one on, by the range of a row.
__device__ __forceinline__ uint32_t seen_of(const uint2& range, int key) {
  return keys_before<16>(int(range.y) - key) & ~keys_before<16>(int(range.x) - key);
}

// What a thread's two rows see of a key tile. It is read while the scores are under way.
struct SeenKeys {
  int tile = 0;                   // the key tile
  bool masked = false;            // else all is seen
  bool by_bits = false;           // else by ranges
  uint32_t a[2] = {}, b[2] = {};  // words of bits in a; or the begins and ends of the two ranges

  template <int kTileN>
  __device__ __forceinline__ void read(const MaskMemory& mask, const RowsOfMask& rows,
                                       const MaskTile& listed, int warpgroup) {
    tile = listed.tile();
    masked = listed.kind() != kMaskFull;
    by_bits = listed.kind() != kMaskRange;
    if (!masked) return;
    if (listed.kind() == kMaskQuarters) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[half] = listed.sees(warpgroup, kTileN == kMaskBlock ? half : tile % 2) ? ~0u : 0;
      if constexpr (kTileN < kMaskBlock) masked = a[0] == 0;
    } else if (by_bits) {
      // 64 keys have 256 words, one of each thread.
      const unsigned* const words = rows.words + (long long)listed.data * kMaskWords;
      if constexpr (kTileN == kMaskBlock) {
        a[0] = __ldg(words), a[1] = __ldg(words + 256);
      } else {
        static_assert(2 * kTileN == kMaskBlock);
        a[0] = __ldg(words + tile % 2 * 256);
      }
    } else {
      uint2 upper, lower;
      rows.read_ranges(mask, listed.data, upper, lower);
      a[0] = upper.x, a[1] = upper.y, b[0] = lower.x, b[1] = lower.y;
    }
  }

  // By bits, whatever tells: one instruction makes seven predicates of them.
  template <class View>
  __device__ __forceinline__ void apply(const View& view, typename View::Scores& r_s) const {
    uint32_t words[2] = {a[0], a[1]};
    if (!by_bits) {
#pragma unroll
      for (int half = 0; half < View::kKeys / 16; ++half) {
        const int key = view.key(16 * half);
        words[half] = seen_of({a[0], a[1]}, key) | seen_of({b[0], b[1]}, key) << 16;
      }
    }
    BitMask{words}.apply(view, r_s);
  }
};

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
