// SPDX-License-Identifier: Apache-2.0
// A block without a producer: the consumers load what they read, and find their work tiles
// themselves.
#pragma once

#include "device/ablation/instance.cuh"

namespace flash3::device {

// In the place of the library's producer: its warpgroup leaves at once.
template <class Traits>
struct NoProducer : TmaProducer<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams&, typename Traits::Shared&) {}
};

// The work tiles of a block without a scheduler; see TileReader.
template <class Traits>
struct OwnTiles {
  const TileSchedule& schedule;
  int index = blockIdx.x;
  WorkTile work = {};

  // False if there is no more work.
  __device__ __forceinline__ bool next() {
    work = work_tile_at(schedule, Traits::kTileN, false, index);
    index += gridDim.x;
    return work.valid;
  }
  __device__ __forceinline__ const WorkTile& tile() const { return work; }
  __device__ __forceinline__ const ListedSequence* slots() const { return nullptr; }
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

// What a consumer warpgroup loads: its first thread the warpgroup's rows of Q; that of warpgroup 0
// also K and V for the block. Each key tile is asked for when warpgroup 0 has done with the one
// before it. Its stage held the one before that, which the other warpgroups have then left too, or
// will without waiting for warpgroup 0: ping-pong keeps them one key tile behind it at most.
template <class Traits>
struct OwnLoads {
  const ForwardParams& params;
  typename Traits::Shared& shared;
  const int warpgroup;
  const bool loads_q = threadIdx.x % kWarpgroupThreads == 0, loads_kv = loads_q && warpgroup == 0;
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

// Base: a 16-bit consumer of the library, whose steps are followed by the loads that they make room
// for.
template <class Traits, class Base>
struct LoadingConsumer : Base {
  using typename Base::Tile;
  OwnTiles<Traits> tiles{this->params.schedule};
  OwnLoads<Traits> loads{this->params, this->shared, this->warpgroup};

  __device__ __forceinline__ LoadingConsumer(const ForwardParams& p, typename Traits::Shared& s,
                                             int w)
      : Base(p, s, w) {
    loads.begin();
  }

  template <class Meanwhile>
  __device__ __forceinline__ void first_key_tile(Tile& tile, const Meanwhile& meanwhile) {
    this->first_scores(tile, meanwhile);
    loads.load_k();
    if (this->previous_q_is_held) loads.load_q(1 - this->q_state.stage);
    this->begin_softmax(tile);
    tile.operands.make_probabilities(tile);
  }

  __device__ __forceinline__ void run_softmax(Tile& tile, int stage) {
    this->wait_for_scores(tile, stage);
    loads.load_k();
    const bool rescale = this->find_maxima(tile);
    this->wait_for_output(tile, this->v_stage_at(stage));
    loads.load_v();
    this->finish_softmax(tile, rescale, stage);
  }

  __device__ __forceinline__ void finish_output(Tile& tile, float (&inverse_sum)[2],
                                                float (&lse)[2]) {
    Base::finish_output(tile, inverse_sum, lse);
    loads.load_v();
    if constexpr (!Base::kHoldQ) loads.load_q(this->q_state.stage);
  }
};

}  // namespace flash3::device
