// SPDX-License-Identifier: Apache-2.0
// The producer of tiles whose consumer warpgroups have 64 keys each. It has four warps, and one
// thread of each works: two load, and two add a consumer warpgroup's dQ to the sums in global
// memory by the copy engine.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/walk.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// ---- what a thread loads: K and V once, then tiles of Q with their LSE and of dOut with their
// delta

// What else goes with a query tile: note(stage), before the tile is loaded, tells its bytes, and
// load(stage, full) loads them.
struct NothingBeside {
  __device__ __forceinline__ int note(int) const { return 0; }
  __device__ __forceinline__ void load(int, uint64_t*) const {}
};

// What goes with a tile of Q: lists.cuh has that of kernels that walk lists.
// tile_bias.cuh that of kernels with a bias of each pair.
template <class Traits, bool kLists = Traits::kLists, bool kBiasTiles = Traits::kBiasTiles>
struct BesideQ;
template <class Traits>
struct BesideQ<Traits, false, false> : NothingBeside {
  __device__ __forceinline__ BesideQ(const BackwardParams&, typename Traits::Shared&,
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

// ---- the roles ----

// From kAddDq on there is a warp for each consumer warpgroup.
enum class BackwardProducerWarp : int { kLoadQ = 0, kLoadDout = 1, kAddDq = 2 };

// How blocks add to the sums of a query tile.
enum class DqAddition {
  kUnordered,    // sums are zero-initialised
  kFirstStores,  // sums are not: the first block stores, and the others wait for it
  kOrdered       // deterministic: one block after the other
};

template <class Traits, DqAddition kAddition>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       Walked& walked, int consumer) {
  constexpr int kOwnFloats = Traits::kOwnQuads * kWarpgroupThreads * 4;
  const int tiles = query_steps<Traits>(params, work);
  QueryWalk<Traits> walk{params, work};
  for (int i = 0; i < tiles; ++i) {
    const int warpgroup = hide_from_optimizer(consumer);  // a producer has few registers
    const DqSums<Traits> sums(params, work, warpgroup, walk(i));
    const auto wait_for_dq = [&]() __attribute__((always_inline)) {
      wait(&shared.dq_full[warpgroup], SingleState::at(walked.query_tiles).phase, "dq_full");
    };
    bool stores = false;
    if constexpr (kAddition == DqAddition::kOrdered) {
      const int order = sums.order();
      sums.semaphore().wait(order);
      stores = Traits::kBand && order == 0 && !params.workspace.zeroed;
    }
    if constexpr (kAddition == DqAddition::kFirstStores) {
      const bool stored = sums.semaphore().is_ready(DqSemaphore::kStored);
      wait_for_dq();
      stores = !stored && sums.semaphore().claim();
      if (!stored && !stores) sums.semaphore().wait(DqSemaphore::kStored);
    } else {
      wait_for_dq();
    }
    float* const to = sums.begin() + warpgroup * kOwnFloats;
    const void* const from = shared.fragments[warpgroup * Traits::kOwnQuads];
    if (stores) {
      bulk_store(to, from, kOwnFloats * 4);
    } else {
      bulk_add(to, from, kOwnFloats * 4);
    }
    tma_store_commit();
    tma_store_wait_read();
    arrive(&shared.dq_empty[warpgroup]);
    if (kAddition == DqAddition::kOrdered || stores) {
      tma_store_wait();
      fence_proxy_async_global();
      sums.semaphore().release();
    }
    ++walked.query_tiles;
  }
}

template <class Traits>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       Walked& walked, int consumer) {
  if (params.schedule.deterministic) {
    add_dq<Traits, DqAddition::kOrdered>(params, shared, work, walked, consumer);
  } else if (!Traits::kBand || params.workspace.zeroed) {
    add_dq<Traits, DqAddition::kUnordered>(params, shared, work, walked, consumer);
  } else {
    add_dq<Traits, DqAddition::kFirstStores>(params, shared, work, walked, consumer);
  }
}

template <class Traits>
__device__ __forceinline__ void load_q_side(const BackwardParams& params,
                                            typename Traits::Shared& shared, const KeyTile& work,
                                            Walked& walked) {
  load_k<Traits>(params, shared, work, walked);
  const int tiles = query_steps<Traits>(params, work);
  QueryWalk<Traits> walk{params, work};
  for (int i = 0; i < tiles; ++i) {
    const typename QueryWalk<Traits>::Place at = walk(i);
    load_q<Traits>(params, shared, work, walked, at, BesideQ<Traits>(params, shared, work, at));
  }
}

template <class Traits>
__device__ __forceinline__ void load_dout_side(const BackwardParams& params,
                                               typename Traits::Shared& shared, const KeyTile& work,
                                               Walked& walked) {
  const int tiles = query_steps<Traits>(params, work);
  QueryWalk<Traits> walk{params, work};
  // The place of V becomes free later than that of the first dOut.
  const int first = Traits::kPersistent && tiles > 0 ? 1 : 0;
  if (first == 1) load_dout<Traits>(params, shared, work, walked, walk(0));
  load_v<Traits>(params, shared, work, walked);
  for (int i = first; i < tiles; ++i) load_dout<Traits>(params, shared, work, walked, walk(i));
}

// What a thread of the producer does for a key tile. Not kLoadQ in persistent blocks.
template <class Traits>
__device__ __forceinline__ void produce(const BackwardParams& params,
                                        typename Traits::Shared& shared, const KeyTile& work,
                                        Walked& walked, BackwardProducerWarp role) {
  if (!Traits::kPersistent && role == BackwardProducerWarp::kLoadQ)
    load_q_side<Traits>(params, shared, work, walked);
  if (role == BackwardProducerWarp::kLoadDout) load_dout_side<Traits>(params, shared, work, walked);
  if (role >= BackwardProducerWarp::kAddDq)
    add_dq<Traits>(params, shared, work, walked, int(role) - int(BackwardProducerWarp::kAddDq));
}

template <class Traits>
__device__ __forceinline__ void produce(const BackwardParams& params,
                                        typename Traits::Shared& shared) {
  const BackwardProducerWarp role{warp_in_warpgroup()};
  if constexpr (Traits::kPersistent) {
    if (role == BackwardProducerWarp::kLoadQ) {
      hand_out_work<Traits>(params, shared, [&](const KeyTile& work, Walked& walked) {
        load_q_side<Traits>(params, shared, work, walked);
      });
      return;
    }
    if (!elect_one()) return;
    for (KeyTileReader<Traits> reader{shared}; reader.next(); reader.release())
      produce<Traits>(params, shared, reader.work(), reader.walked, role);
  } else {
    if (!elect_one()) return;
    Walked walked;
    produce<Traits>(params, shared, shared.work[0], walked, role);
  }
}

}  // namespace flash3::cuda::sm90
