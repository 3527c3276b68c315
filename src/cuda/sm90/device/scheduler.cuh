// SPDX-License-Identifier: Apache-2.0
// Which tile of work a block does next. The grid is persistent: one block per SM, and in each block
// one warp, the scheduler, that hands tiles to the other roles through a ring in shared memory,
// ahead of them. Their order is in tile_schedule.hpp. Where all tiles are of one length block b
// does tiles b, b + grid, b + 2·grid, …; under a band and in a ragged batch they differ in length,
// so after its first each block takes the next one from a counter in global memory.
#pragma once

#include "cuda/device/ptx/sync.cuh"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/sm90/device/pipeline.cuh"

namespace flash3::cuda::sm90 {

// The counter that blocks share when tiles differ in length. It lies in the caller's workspace,
// uninitialised: block 0 zeroes it and then publishes this launch's ticket; the last block to
// finish withdraws the ticket, so that a replay of a captured launch, which has the same ticket,
// starts over. No other launch has it (host: forward/launch.cpp).
class TileCounter {
 public:
  __device__ __forceinline__ explicit TileCounter(const TileSchedule& schedule)
      : schedule_(schedule) {}

  __device__ __forceinline__ void begin() const {
    if (schedule_.counter == nullptr || blockIdx.x != 0) return;
    schedule_.counter->next = gridDim.x;  // each block's first tile needs no counter
    schedule_.counter->finished_blocks = 0;
    store_release(&schedule_.counter->ticket, schedule_.ticket);
  }

  // The tile after `index`, which this block took last. The first time, when a tile is already
  // under way, it waits until block 0 has begun.
  __device__ __forceinline__ int next(int index) const {
    if (schedule_.counter == nullptr) return index + gridDim.x;
    wait_for_begin();
    return atomicAdd(&schedule_.counter->next, 1);
  }

  // After the last next().
  __device__ __forceinline__ void finish() const {
    if (schedule_.counter == nullptr) return;
    wait_for_begin();  // a block without any tile has not yet
    if (atomicAdd(&schedule_.counter->finished_blocks, 1) == int(gridDim.x) - 1) {
      store_release(&schedule_.counter->ticket, 0);
    }
  }

 private:
  __device__ __forceinline__ void wait_for_begin() const {
    while (load_acquire(&schedule_.counter->ticket) != schedule_.ticket) {
    }
  }

  const TileSchedule& schedule_;
};

// The ring through which the scheduler hands tiles out. Loaders keep a tile until they have loaded
// it.
inline constexpr int kTileSlots = 4;
struct TileRing {
  WorkTile tiles[kTileSlots];
  ListedSequence slots[kTileSlots][kMaxSlots];  // short sequences that share the tile
  RingBarriers<kTileSlots> barriers;
  uint64_t wanted;  // the K loader has nearly done its tile

  __device__ void init(int readers) {
    barriers.init(readers, 32);  // the whole warp writes a tile
    mbarrier_init(&wanted, 1);
  }
};

// The key tile after whose load the scheduler is asked for the next work tile.
__device__ __forceinline__ int ask_at(const WorkTile& work) {
  constexpr int kKeyTilesLeft = 1;
  return min(work.key_tile_begin + kKeyTilesLeft, work.key_tile_end - 1);
}

// Finds the sequence of a tile. By a whole warp, for indices that only grow.
class SequenceWalk {
 public:
  __device__ __forceinline__ explicit SequenceWalk(const SequenceList& list) : list_(list) {}

  // The sequence's place in the list; its end if there is no such tile.
  __device__ __forceinline__ int find(int index) {
    int passed = 32;
    while (passed == 32 && place_ < list_.count) {
      const int next =
          place_ + 1 + int(threadIdx.x % 32);  // this lane asks whether its tiles come later
      passed = __popc(__ballot_sync(~0u, next <= list_.count && list_.first_tile[next] <= index));
      place_ += passed;
    }
    return place_;
  }

 private:
  const SequenceList& list_;
  int place_ = 0;
};

// What becomes of a work tile's keys: they are those of the band already.
struct KeysOfBand {
  __device__ void operator()(WorkTile&) const {}
};

// Writes the index-th tile, and the sequences that share it. By a whole warp. kListed: sequences
// are listed with their tiles whatever the launch.
template <int kTileN, bool kBand, bool kListed, class KeysOf>
__device__ __forceinline__ void write_tile(const TileSchedule& schedule, SequenceWalk& walk,
                                           int index, WorkTile& work,
                                           ListedSequence (&slots)[kMaxSlots],
                                           const KeysOf& keys_of) {
  const int lane = threadIdx.x % 32;
  const SequenceList& list = schedule.sequences;
  if (kListed || list.first_tile != nullptr) {
    const int place = walk.find(index);
    if (lane == 0 && place >= list.count) work.valid = false;
    if (lane == 0 && place < list.count) {
      work =
          work_tile_at(schedule, list.rows[place], kTileN, kBand, index - list.first_tile[place]);
      keys_of(work);
    }
    return;
  }
  if (lane == 0) work = work_tile_at(schedule, kTileN, kBand, index);
  if (lane == 0 && work.valid) keys_of(work);
  if (schedule.slot_rows == 0) return;
  __syncwarp();
  const int first = work.query / schedule.slot_rows;
  if (work.valid && lane < schedule.tile_queries / schedule.slot_rows)
    slots[lane] = first + lane < list.count ? list.rows[first + lane] : ListedSequence{};
}

// The scheduler's loop, by its whole warp. From the counter a tile is taken as late as the loaders
// allow: a block that held one in reserve while its present one is still long would leave others
// idle at the end. kAllWait: all lanes wait until it is wanted, not one. A warp of which one lane
// waits turns between two branches, in issue slots that FP8's consumers lack.
template <int kTileN, bool kBand, bool kListed = false, bool kAllWait = false,
          class KeysOf = KeysOfBand>
__device__ __forceinline__ void schedule_tiles(const TileSchedule& schedule, TileRing& ring,
                                               const KeysOf& keys_of = {}) {
  PipelineState<kTileSlots> slot;
  const bool leader = threadIdx.x % 32 == 0;
  const TileCounter counter(schedule);
  if (leader) counter.begin();
  if (schedule.sequences.rows != nullptr) wait_for_previous_kernel();
  SequenceWalk walk(schedule.sequences);
  for (int index = blockIdx.x;;) {
    wait(&ring.barriers.empty[slot.stage], slot.phase ^ 1, "tile_empty");
    WorkTile& work = ring.tiles[slot.stage];
    write_tile<kTileN, kBand, kListed>(schedule, walk, index, work, ring.slots[slot.stage],
                                       keys_of);
    __syncwarp();
    const bool valid = work.valid;
    arrive(&ring.barriers.full[slot.stage]);
    slot.advance();
    if (!valid) break;
    if (schedule.counter != nullptr) {
      // Each tile is wanted once: the slot of the next one tells the phase.
      static_assert(kTileSlots % 2 == 0);
      if (kAllWait || leader) wait(&ring.wanted, (slot.stage + 1) % 2, "tile_wanted");
      __syncwarp();
    }
    index = __shfl_sync(~0u, leader ? counter.next(index) : 0, 0);
  }
  if (leader) counter.finish();
}

// Any other role's view of the ring: by one thread, or by a whole warp.
struct TileReader {
  TileRing& ring;
  int step = 0;  // one register, where a state takes two

  // Waits for the next tile. False if there is no more work.
  __device__ __forceinline__ bool next() const {
    wait(&ring.barriers.full[slot().stage], slot().phase, "tile_full");
    return tile().valid;
  }
  __device__ __forceinline__ const WorkTile& tile() const { return ring.tiles[slot().stage]; }
  __device__ __forceinline__ const ListedSequence* slots() const {
    return ring.slots[slot().stage];
  }
  __device__ __forceinline__ int stage() const { return slot().stage; }

  // Done with the tile.
  __device__ __forceinline__ void release() {
    arrive(&ring.barriers.empty[slot().stage]);
    ++step;
  }

 private:
  __device__ __forceinline__ PipelineState<kTileSlots> slot() const {
    return PipelineState<kTileSlots>::at(step);
  }
};

}  // namespace flash3::cuda::sm90
