// SPDX-License-Identifier: Apache-2.0
// Adding dQ to the sums in global memory: in any order, or, deterministic, in turn.
#pragma once

#include "hopper/backward/kernel.cuh"
#include "hopper/backward/load.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/tma.cuh"

namespace flash3::hopper {

// In any order: the sums' counter is 1 when a block has claimed to be the first, and 2 when what it
// has stored there can be added to.
inline constexpr int kBegun = 2;

// The sums of the i-th query tile of the work, and the turns to add to them. Unless they begin as
// zeros, the first to come stores its dQ.
template <class Traits>
struct DqSums {
  const BackwardParams& params;
  const KeyTile& work;
  int part;   // of the tile's turns
  int tile;   // of the sequence
  int index;  // of all in the workspace

  __device__ __forceinline__ DqSums(const BackwardParams& params, const KeyTile& work, int part,
                                    int i)
      : params(params), work(work), part(part) {
    const QueryPlace at(params, work, i);
    tile = at.tile;
    index = at.index;
  }

  __device__ __forceinline__ float* begin() const {
    return params.rows.dq + int64_t(index) * (Traits::kTileM * Traits::kHeadDim);
  }

  __device__ __forceinline__ bool in_turn() const { return params.schedule.in_turn; }
  __device__ __forceinline__ int turn() const {
    return turn_of(params.schedule, work, Traits::kTileN, Traits::kBand, tile);
  }
  // By one thread, before it or its warpgroup adds.
  __device__ __forceinline__ bool has_come(int turn) const {
    return load_acquire(counter()) >= turn;
  }
  __device__ __forceinline__ void await(int turn) const {
    wait_until_at_least(counter(), turn, "dq_turn");
  }
  // In any order: true for the first one that asks.
  __device__ __forceinline__ bool claim() const { return exchange_if(counter(), 0, 1) == 0; }
  // By one thread, behind all additions of the turn. It counts, and does not store the
  // turn: so no block waits forever where cu_seqlens make sequences overlap.
  __device__ __forceinline__ void end_turn() const { add_release(counter(), 1); }

 private:
  __device__ __forceinline__ int* counter() const {
    return params.rows.turns + int64_t(index) * kTurns + part;
  }
};

// In which order blocks add, and who begins a sum.
enum class DqOrder { kAny, kAnyBehindFirst, kInTurn };

template <class Traits, DqOrder kOrder>
__device__ __forceinline__ void add_dq_in(const BackwardParams& params,
                                          typename Traits::Shared& shared, const KeyTile& work,
                                          int consumer) {
  constexpr int kOwnFloats = Traits::kOwnQuads * kWarpgroupThreads * 4;
  const int tiles = work.query_tiles() * params.heads_per_kv_head;
  for (int i = 0; i < tiles; ++i) {
    const int warpgroup =
        hide_from_optimizer(consumer);  // spares registers, of which a producer has few
    const DqSums<Traits> sums(params, work, warpgroup, i);
    bool first = false;
    if constexpr (kOrder == DqOrder::kInTurn) {
      const int turn = sums.turn();
      sums.await(turn);
      first = Traits::kBand && turn == 0 && !params.rows.zeroed;
    }
    if constexpr (kOrder == DqOrder::kAnyBehindFirst) {
      const bool begun = sums.has_come(kBegun);
      wait(&shared.dq_full[warpgroup], SingleState::at(i).phase, "dq_full");
      first = !begun && sums.claim();
      if (!begun && !first) sums.await(kBegun);
    } else {
      wait(&shared.dq_full[warpgroup], SingleState::at(i).phase, "dq_full");
    }
    float* const to = sums.begin() + warpgroup * kOwnFloats;
    const void* const from = shared.fragments[warpgroup * Traits::kOwnQuads];
    if (first) {
      bulk_store(to, from, kOwnFloats * 4);
    } else {
      bulk_add(to, from, kOwnFloats * 4);
    }
    tma_store_commit();
    tma_store_wait_read();
    arrive(&shared.dq_empty[warpgroup]);
    if (kOrder == DqOrder::kInTurn || first) {
      tma_store_wait();
      fence_proxy_async_global();
      sums.end_turn();
    }
  }
}

// The thread that adds a consumer warpgroup's dQ: it waits for the blocks in shared memory and lets
// the copy engine add them.
template <class Traits>
__device__ __forceinline__ void add_dq(const BackwardParams& params,
                                       typename Traits::Shared& shared, const KeyTile& work,
                                       int consumer) {
  if (params.schedule.in_turn) {
    add_dq_in<Traits, DqOrder::kInTurn>(params, shared, work, consumer);
  } else if (!Traits::kBand || params.rows.zeroed) {
    add_dq_in<Traits, DqOrder::kAny>(params, shared, work, consumer);
  } else {
    add_dq_in<Traits, DqOrder::kAnyBehindFirst>(params, shared, work, consumer);
  }
}

// A consumer warpgroup's side: its dQ of the i-th tile from registers to shared memory …
template <class Traits>
__device__ __forceinline__ void stage_dq(typename Traits::Shared& shared,
                                         const float (&r_dq)[Traits::kOwnQuads * 4], int warpgroup,
                                         int i, int thread) {
  wait(&shared.dq_empty[warpgroup], SingleState::at(i).phase ^ 1, "dq_empty");
#pragma unroll
  for (int quad = 0; quad < Traits::kOwnQuads; ++quad) {
    store_shared(&shared.fragments[warpgroup * Traits::kOwnQuads + quad][thread], &r_dq[4 * quad]);
  }
}

// … and over to the thread that adds it.
template <class Traits>
__device__ __forceinline__ void hand_dq_over(typename Traits::Shared& shared, int warpgroup) {
  fence_shared_for_async_proxy();
  arrive(&shared.dq_full[warpgroup]);
}

}  // namespace flash3::hopper
