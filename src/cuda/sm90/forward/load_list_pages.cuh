// SPDX-License-Identifier: Apache-2.0
// The producer of kernels that walk the lists of a mask (load_lists.cuh) over keys that lie where a
// table says (load_pages.cuh): the warp that loads a key tile of a list looks up its boxes.
#pragma once

#include "cuda/sm90/forward/load_lists.cuh"
#include "cuda/sm90/forward/load_pages.cuh"

namespace flash3::cuda::sm90 {

// One lane's box of the key tiles of a work tile.
struct ListedBox {
  const KeyPages& pages;
  int at_row;  // of a key tile

  // Where the box of a key tile begins in K or V. Whatever a list holds, the row exists.
  __device__ __forceinline__ int row(const RowMap& rows, const ListedSequence& s, int tile_rows,
                                     const MaskTile& tile) const {
    return exists(s, tile_rows, tile) ? row_of_key(pages, rows, s, tile.tile() * tile_rows + at_row)
                                      : 0;
  }
  // Rows of it that hold keys.
  __device__ __forceinline__ int rows_with_keys(const ListedSequence& s, int tile_rows,
                                                const MaskTile& tile) const {
    return exists(s, tile_rows, tile) ? rows_left(pages, s, tile.tile() * tile_rows + at_row) : 0;
  }

 private:
  __device__ __forceinline__ bool exists(const ListedSequence& s, int tile_rows,
                                         const MaskTile& tile) const {
    return at_row < tile_rows &&
           unsigned(tile.tile()) * tile_rows + unsigned(at_row) < unsigned(s.k_length);
  }
};

// load_listed_tiles() for pages, by a whole warp.
template <class Traits, class Tile, class Note>
__device__ __forceinline__ void load_listed_pages(const ForwardParams& params, const TensorMap* map,
                                                  const RowMap& rows,
                                                  uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                                  RingBarriers<Traits::kStages>& barriers,
                                                  const char* empty, TileRing& ring,
                                                  uint64_t* wanted, const Note& note) {
  const KeyPages& pages = kernel_params(params).pages;
  const ListedBox box{pages, int(threadIdx.x % 32) * pages.box_rows};
  const bool leads = box.at_row == 0;
  if (leads) prefetch(map);
  typename Traits::KvState state;
  for (int tiles = 0;; ++tiles) {
    const auto slot = PipelineState<kTileSlots>::at(tiles);
    wait(&ring.barriers.full[slot.stage], slot.phase, "tile_full");
    const WorkTile& work = ring.tiles[slot.stage];
    if (!work.valid) break;
    const int begin = work.key_tile_begin;
    bool asks = wanted != nullptr && leads;
    if (asks && !work.has_keys()) arrive(wanted);
    ListPlace<Traits> next{kernel_params(params).mask, work.key_tile_end};
    const auto find_row = [&] {
      next.find_before(begin);
      return next.n < begin ? 0 : box.row(rows, work.sequence, Tile::kRows, next.tile(false));
    };
    int next_row = find_row();
    while (next.n >= begin) {
      const ListPlace<Traits> at = next;
      const int row = next_row;
      next_row = find_row();  // it comes while a stage is awaited
      const MaskTile tile = at.tile(next.n < begin);
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      uint64_t* const full = &barriers.full[state.stage];
      if (leads) note(state.stage, tile), arrive_expect_bytes(full, Tile::kBytes);
      __syncwarp();
      if (box.at_row < Tile::kRows) {
        const int left = box.rows_with_keys(work.sequence, Tile::kRows, tile);
        const BoxAt from{0, work.head_group / params.groups_per_kv_head, kRaggedEnd - left,
                         row + left, true};
        load_box<Tile>(stages[state.stage] + box.at_row * Tile::kRowBytes, map, from, full);
      }
      state.advance();
      if (asks && next.n < ask_at(work)) arrive(wanted), asks = false;
    }
    __syncwarp();
    if (leads) arrive(&ring.barriers.empty[slot.stage]);
  }
}

template <class Traits>
struct TmaProducer<Traits, true, true> : TmaBarriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      schedule_tiles<Traits::kTileN, true>(params.schedule, shared.tiles,
                                           KeysOfList<Traits>{kernel_params(params).mask});
    } else if (role == ProducerWarp::kLoadK) {
      load_listed_pages<Traits, typename Traits::KTile>(
          params, &params.k, params.k_rows, shared.k, shared.k_barriers, "k_empty", shared.tiles,
          &shared.tiles.wanted,
          [&](int stage, const MaskTile& tile) { note_tile(shared.listed[stage], tile); });
    } else if (role == ProducerWarp::kLoadV) {
      load_listed_pages<Traits, typename Traits::VTile>(params, &params.v, params.v_rows, shared.v,
                                                        shared.v_barriers, "v_empty", shared.tiles,
                                                        nullptr, [](int, const MaskTile&) {});
    } else if (threadIdx.x % 32 == 0) {
      load_q<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
