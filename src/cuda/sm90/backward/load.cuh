// SPDX-License-Identifier: Apache-2.0
// What a producer thread loads: the block's K and V once, then tiles of Q with their LSE and tiles
// of dOut with their delta.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/walk.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// What else goes with a query tile: note(stage), before the tile is loaded, tells its bytes, and
// load(stage, full) loads them.
struct NothingBeside {
  __device__ __forceinline__ int note(int) const { return 0; }
  __device__ __forceinline__ void load(int, uint64_t*) const {}
};

// What goes with a tile of Q: lists.cuh has that of kernels that walk lists.
template <class Traits, bool kLists = Traits::kLists>
struct MaskBeside;
template <class Traits>
struct MaskBeside<Traits, false> : NothingBeside {
  __device__ __forceinline__ MaskBeside(const BackwardParams&, typename Traits::Shared&,
                                        const KeyTile&, const QueryPlace&) {}
};

// Loads a query tile of Q or dOut, and one float a query beside it.
template <class Tile, class Beside = NothingBeside>
__device__ __forceinline__ void load_queries(const KeyTile& work, Walked& walked,
                                             const QueryPlace& at, const TensorMap* map,
                                             const RowMap& map_rows, const float* floats,
                                             uint8_t (&tiles)[kQueryStages][Tile::kBytes],
                                             float (&float_stages)[kQueryStages][Tile::kRows],
                                             RingBarriers<kQueryStages>& barriers,
                                             const char* empty, const Beside& beside = {}) {
  const auto [stage, phase] = QueryState::at(walked.query_tiles);
  wait(&barriers.empty[stage], phase ^ 1, empty);
  uint64_t* full = &barriers.full[stage];
  const int more = beside.note(stage);
  arrive_expect_bytes(full, Tile::kBytes + Tile::kRows * 4 + more);
  const ListedSequence& s = work.sequence;
  load_box<Tile>(tiles[stage], map,
                 box_at(map_rows, s.batch, s.q_first, s.q_length, at.tile * Tile::kRows, at.head),
                 full);
  bulk_load(float_stages[stage], floats + int64_t(at.index) * Tile::kRows, Tile::kRows * 4, full);
  beside.load(stage, full);
  ++walked.query_tiles;
}

// Loads the key tile's rows of K or V and clears those that no query sees. `loaded` is a barrier
// for this alone.
template <class Traits, class Tile>
__device__ __forceinline__ void load_keys(const KeyTile& work, Walked& walked, const TensorMap* map,
                                          const RowMap& map_rows, uint8_t* shared, uint64_t* full,
                                          uint64_t* loaded) {
  const ListedSequence& s = work.sequence;
  const int hidden = Traits::kBand ? work.hidden_keys() : 0;
  uint64_t* const barrier = hidden > 0 ? loaded : full;
  arrive_expect_bytes(barrier, Tile::kBytes);
  load_box<Tile>(shared, map,
                 box_at(map_rows, s.batch, s.k_first, s.k_length, work.key, work.kv_head), barrier);
  if (hidden > 0)
    clear_when_loaded<Tile>(shared, hidden, loaded, SingleState::at(walked.cleared++).phase, full);
}

template <class Traits>
__device__ __forceinline__ void load_k(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       Walked& walked) {
  const auto [slot, phase] = Traits::KeyState::at(walked.key_tiles);
  if constexpr (Traits::kPersistent) wait(&shared.k_barriers.empty[slot], phase ^ 1, "k_empty");
  load_keys<Traits, typename Traits::KTile>(work, walked, &params.k, params.k_rows, shared.k[slot],
                                            &shared.k_barriers.full[slot], &shared.k_loaded);
}

template <class Traits>
__device__ __forceinline__ void load_v(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       Walked& walked) {
  if constexpr (Traits::kPersistent)
    wait(&shared.v_empty, SingleState::at(walked.key_tiles).phase ^ 1, "v_empty");
  load_keys<Traits, typename Traits::VTile>(work, walked, &params.v, params.v_rows, shared.v,
                                            &shared.v_full, &shared.v_loaded);
}

template <class Traits, class Beside = NothingBeside>
__device__ __forceinline__ void load_q(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       Walked& walked, const QueryPlace& at,
                                       const Beside& beside = {}) {
  load_queries<typename Traits::QTile>(work, walked, at, &params.q, params.q_rows,
                                       params.workspace.lse_log2, shared.q, shared.lse,
                                       shared.q_barriers, "q_empty", beside);
}

template <class Traits>
__device__ __forceinline__ void load_dout(const BackwardParams& params,
                                          typename Traits::Shared& shared, const KeyTile& work,
                                          Walked& walked, const QueryPlace& at) {
  load_queries<typename Traits::DoutTile>(work, walked, at, &params.dout, params.dout_rows,
                                          params.workspace.delta, shared.dout, shared.delta,
                                          shared.dout_barriers, "dout_empty");
}

}  // namespace flash3::cuda::sm90
