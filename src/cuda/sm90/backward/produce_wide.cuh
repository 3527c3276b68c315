// SPDX-License-Identifier: Apache-2.0
// The producer of wide tiles: one thread of each warp. Two load; in deterministic calls the other
// two use the semaphores of dQ for the warpgroup that adds it, because both the wait and the
// release take long.
#pragma once

#include "cuda/device/choice.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/produce.cuh"
#include "cuda/sm90/backward/walk.cuh"

namespace flash3::cuda::sm90 {

// A place that goes on to the next one, without a division.
struct AdvancingPlace : QueryPlace {
  // The first one.
  __device__ __forceinline__ AdvancingPlace(const BackwardParams& params, const KeyTile& work) {
    head = work.kv_head * params.heads_per_kv_head;
    tile = work.query_tile_begin;
    index = work.first_query_tile + head * params.schedule.query_tiles.tiles + tile;
  }
  __device__ __forceinline__ void advance(const BackwardParams& params, const KeyTile& work) {
    ++tile, ++index;
    if (tile == work.query_tile_end) {
      tile = work.query_tile_begin;
      index += params.schedule.query_tiles.tiles - work.query_tiles();
      ++head;
    }
  }
};

// That of a role's walk; over lists it goes on by itself.
template <class Traits>
using WidePlace = Choice<Traits::kLists, typename QueryWalk<Traits>::Place, AdvancingPlace>;

enum class WideProducerWarp : int { kLoadQ, kLoadDout, kWaitForSemaphore, kReleaseSemaphore };

// Loads all query tiles of Q or dOut, and one float a query beside them.
template <class Traits, class Tile, class BesideOf>
__device__ __forceinline__ void load_all_queries(const BackwardParams& params, const KeyTile& work,
                                                 int tiles, const TensorMap* map,
                                                 const RowMap& map_rows, const float* floats,
                                                 uint8_t (&tile_stages)[kQueryStages][Tile::kBytes],
                                                 float (&float_stages)[kQueryStages][Tile::kRows],
                                                 RingBarriers<kQueryStages>& barriers,
                                                 const char* empty, const BesideOf& beside_of) {
  const ListedSequence& s = work.sequence;
  WidePlace<Traits> at(params, work);
  for (int i = 0; i < tiles; ++i, at.advance(params, work)) {
    const auto [stage, phase] = QueryState::at(i);
    const BoxAt box =  // ahead of the wait
        box_at(map_rows, s.batch, s.q_first, s.q_length, at.tile * Tile::kRows, at.head);
    wait(&barriers.empty[stage], phase ^ 1, empty);
    uint64_t* full = &barriers.full[stage];
    const auto beside = beside_of(at);
    arrive_expect_bytes(full, Tile::kBytes + Tile::kRows * 4 + beside.note(stage));
    load_box<Tile>(tile_stages[stage], map, box, full);
    bulk_load(float_stages[stage], floats + int64_t(at.index) * Tile::kRows, Tile::kRows * 4, full);
    beside.load(stage, full);
  }
}

// Lets the warpgroup of dQ add to one query tile after the other.
template <class Traits>
__device__ __forceinline__ void wait_for_semaphores(const BackwardParams& params,
                                                    typename Traits::Shared& shared,
                                                    const KeyTile& work, int tiles) {
  WidePlace<Traits> at(params, work);
  for (int i = 0; i < tiles; ++i, at.advance(params, work)) {
    const DqSums<Traits> sums(params, work, 0, at);
    sums.semaphore().wait(sums.order());
    arrive(&shared.dq_ready);
    wait(&shared.dq_ready, SingleState::at(i).phase, "dq_ready");
  }
}

// Releases query tiles that the warpgroup of dQ has added to. It arrives at dq_ready too, so that
// the warpgroup is never two tiles ahead of it.
template <class Traits>
__device__ __forceinline__ void release_semaphores(const BackwardParams& params,
                                                   typename Traits::Shared& shared,
                                                   const KeyTile& work, int tiles) {
  WidePlace<Traits> at(params, work);
  if (tiles > 0) arrive(&shared.dq_ready);
  for (int i = 0; i < tiles; ++i, at.advance(params, work)) {
    wait(&shared.dq_added, SingleState::at(i).phase, "dq_added");
    if (i + 1 < tiles) arrive(&shared.dq_ready);
    DqSums<Traits>(params, work, 0, at).semaphore().release();
  }
}

template <class Traits>
__device__ __forceinline__ void produce_wide(const BackwardParams& params,
                                             typename Traits::Shared& shared, const KeyTile& work) {
  const WideProducerWarp role{warp_in_warpgroup()};
  const int tiles = query_steps<Traits>(params, work);
  Walked walked;
  if (role == WideProducerWarp::kLoadQ && elect_one()) {
    load_k<Traits>(params, shared, work, walked);
    load_all_queries<Traits, typename Traits::QTile>(
        params, work, tiles, &params.q, params.q_rows, params.workspace.lse_log2, shared.q,
        shared.lse, shared.q_barriers, "q_empty",
        [&](const WidePlace<Traits>& at) { return BesideQ<Traits>(params, shared, work, at); });
  }
  if (role == WideProducerWarp::kLoadDout && elect_one()) {
    load_v<Traits>(params, shared, work, walked);
    load_all_queries<Traits, typename Traits::DoutTile>(
        params, work, tiles, &params.dout, params.dout_rows, params.workspace.delta, shared.dout,
        shared.delta, shared.dout_barriers, "dout_empty",
        [](const QueryPlace&) { return NothingBeside{}; });
  }
  if (!params.schedule.deterministic) return;
  if (role == WideProducerWarp::kWaitForSemaphore && elect_one())
    wait_for_semaphores<Traits>(params, shared, work, tiles);
  if (role == WideProducerWarp::kReleaseSemaphore && elect_one())
    release_semaphores<Traits>(params, shared, work, tiles);
}

}  // namespace flash3::cuda::sm90
