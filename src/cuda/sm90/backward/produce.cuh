// SPDX-License-Identifier: Apache-2.0
// The producer of tiles whose consumer warpgroups have 64 keys each. It has four warps, and one
// thread of each works: two load, and two add a consumer warpgroup's dQ to the sums in global
// memory by the copy engine.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/load.cuh"
#include "cuda/sm90/backward/walk.cuh"

namespace flash3::cuda::sm90 {

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
    load_q<Traits>(params, shared, work, walked, at, MaskBeside<Traits>(params, shared, work, at));
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
