// Which tile of work a block does next. The grid is persistent: one block per SM, and in each block
// one warp, the scheduler, that hands tiles to the other roles through a ring in shared memory, one
// tile ahead of them. Their order is in tile_schedule.hpp. Without a mask block b does tiles b,
// b + grid, b + 2·grid, …; under a band tiles differ in length, so after its first each block takes
// the next one from a counter in global memory.
#pragma once

#include "hopper/device/pipeline.cuh"
#include "hopper/device/ptx/memory.cuh"
#include "hopper/device/tile_schedule.hpp"

namespace flash3::hopper {

// The counter that blocks share when tiles differ in length. It lies in the caller's workspace,
// uninitialised: block 0 zeroes it and then publishes this launch's ticket; the last block to
// finish withdraws the ticket, so that a replay of a captured launch, which has the same ticket,
// starts over. No other launch has it (host: forward/launch.cpp).
class TileCounter {
 public:
  __device__ __forceinline__ TileCounter(TileCounterMemory* memory, unsigned long long ticket)
      : memory_(memory), ticket_(ticket) {
    if (memory_ == nullptr || blockIdx.x != 0) return;
    memory_->next = gridDim.x;  // each block's first tile needs no counter
    memory_->finished_blocks = 0;
    store_release(&memory_->ticket, ticket_);
  }

  // The tile after `index`, which this block took last. The first time, when a tile is already
  // under way, it waits until block 0 has begun.
  __device__ __forceinline__ int next(int index) {
    if (memory_ == nullptr) return index + gridDim.x;
    while (load_acquire(&memory_->ticket) != ticket_) {
    }
    return atomicAdd(&memory_->next, 1);
  }

  // After the last next(), which every block has called: its first tile is never the last.
  __device__ __forceinline__ void finish() {
    if (memory_ == nullptr) return;
    if (atomicAdd(&memory_->finished_blocks, 1) == int(gridDim.x) - 1) {
      store_release(&memory_->ticket, 0);
    }
  }

 private:
  TileCounterMemory* memory_;
  unsigned long long ticket_;
};

// The ring through which the scheduler hands tiles out.
inline constexpr int kTileSlots = 2;
struct TileRing {
  WorkTile tiles[kTileSlots];
  RingBarriers<kTileSlots> barriers;
  uint64_t wanted;  // the K loader has nearly done its tile

  __device__ void init(int readers) {
    barriers.init(readers);
    cuda::ptx::mbarrier_init(&wanted, 1);
  }
};

// The scheduler's loop. From the counter a tile is taken as late as the loaders allow: a block that
// held one in reserve while its present one is still long would leave others idle at the end.
template <int kTileN, bool kBand>
__device__ __forceinline__ void schedule_tiles(const TileSchedule& schedule, TileRing& ring) {
  PipelineState<kTileSlots> slot;
  PipelineState<1> wanted;
  TileCounter counter(schedule.counter, schedule.ticket);
  for (int index = blockIdx.x;; index = counter.next(index)) {
    const WorkTile work = decode_tile(schedule, kTileN, kBand, index);
    wait(&ring.barriers.empty[slot.stage], slot.phase ^ 1, BarrierName::kTileEmpty);
    ring.tiles[slot.stage] = work;
    arrive(&ring.barriers.full[slot.stage]);
    slot.advance();
    if (!work.valid) break;
    if (schedule.counter != nullptr) {
      wait(&ring.wanted, wanted.phase, BarrierName::kTileWanted);
      wanted.advance();
    }
  }
  counter.finish();
}

// Any other role's view of the ring: by one thread, or by a whole warp.
template <bool kWholeWarp>
struct TileReader {
  TileRing& ring;
  PipelineState<kTileSlots> slot = {};

  // False if there is no more work.
  __device__ __forceinline__ bool next(WorkTile& work) {
    wait(&ring.barriers.full[slot.stage], slot.phase, BarrierName::kTileFull);
    work = ring.tiles[slot.stage];
    if constexpr (kWholeWarp) {
      // Tells the compiler that loops over the tile are uniform: addresses of stages then stay in
      // uniform registers.
      work.query = uniform(work.query);
      work.key_tile_begin = uniform(work.key_tile_begin);
      work.key_tile_end = uniform(work.key_tile_end);
      work.valid = uniform(work.valid);
    }
    arrive(&ring.barriers.empty[slot.stage]);
    slot.advance();
    return work.valid;
  }

 private:
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
};

}  // namespace flash3::hopper
