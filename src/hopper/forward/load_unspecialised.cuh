// SPDX-License-Identifier: Apache-2.0
// Loads by the consumers themselves, for kernels without a producer warpgroup
// (ForwardSchedule::specialised), which exist to be measured.
#pragma once

#include "hopper/forward/load.cuh"

namespace flash3::hopper {

// The work tiles of a block without a scheduler, in turn; see TileReader.
template <class Traits>
struct OwnTiles {
  const TileSchedule& schedule;
  int index = blockIdx.x;
  WorkTile work = {};

  // False if there is no more work.
  __device__ __forceinline__ bool next() {
    work = decode_tile(schedule, Traits::kTileN, false, index);
    index += gridDim.x;
    return work.valid;
  }
  __device__ __forceinline__ const WorkTile& tile() const { return work; }
  __device__ __forceinline__ const SequenceRows* slots() const { return nullptr; }
  __device__ __forceinline__ void release() {}
};

// One thread's stream of K or V: the key tiles of all work tiles of the block, one after the other.
template <class Traits, class Tile>
struct OwnKeyTiles {
  OwnTiles<Traits> tiles;
  int n = -1;  // the next key tile
  typename Traits::KvState state = {};

  // Waits until every consumer has done with what lies in the stage, and loads the next key tile.
  __device__ __forceinline__ void load(const ForwardParams& params, const TensorMap* map,
                                       const RowMap& rows,
                                       uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                       RingBarriers<Traits::kStages>& barriers, const char* empty) {
    if (n < tiles.work.key_tile_begin) {
      if (!tiles.next()) return;
      n = tiles.work.key_tile_end - 1;
      if (!tiles.work.has_keys()) return;
    }
    wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
    load_key_tile<Traits, Tile>(params, tiles.work, tiles.slots(), n, map, rows,
                                stages[state.stage], &barriers.full[state.stage]);
    state.advance();
    --n;
  }
};

// What a consumer warpgroup loads: thread 0 its own rows of Q; that of warpgroup 0 also K and V for
// the block. Each key tile is asked for when warpgroup 0 has done with the one before it. Its stage
// held the one before that, which the other warpgroups have then passed too, or will without
// waiting for warpgroup 0: they are behind it by one turn at most.
template <class Traits>
struct OwnLoads {
  const ForwardParams& params;
  typename Traits::Shared& shared;
  const int warpgroup;
  const bool loads_q = threadIdx.x % kWarpgroupThreads == 0, loads_kv = threadIdx.x == 0;
  OwnTiles<Traits> q_tiles{params.schedule};
  OwnKeyTiles<Traits, typename Traits::KTile> k_tiles{{params.schedule}};
  OwnKeyTiles<Traits, typename Traits::VTile> v_tiles{{params.schedule}};

  __device__ __forceinline__ void begin() {
    for (int stage = 0; stage < Traits::kQStages; ++stage) load_q(stage);
    load_k();
    load_v();
  }
  // Q of the block's next work tile. The stage is free: this thread has seen its store leave.
  __device__ __forceinline__ void load_q(int stage) {
    if (loads_q && q_tiles.next() && q_tiles.work.has_keys()) {
      load_query_rows<Traits>(params, q_tiles.work, q_tiles.slots(), shared.q[stage][warpgroup],
                              warpgroup, &shared.q_barriers[warpgroup].full[stage]);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_k() {
    if (loads_kv)
      k_tiles.load(params, &params.k, params.k_rows, shared.k, shared.k_barriers, "k_empty");
    __syncwarp();
  }
  __device__ __forceinline__ void load_v() {
    if (loads_kv)
      v_tiles.load(params, &params.v, params.v_rows, shared.v, shared.v_barriers, "v_empty");
    __syncwarp();
  }
};

}  // namespace flash3::hopper
