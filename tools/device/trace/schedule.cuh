// SPDX-License-Identifier: Apache-2.0
// The library's scheduler (cuda/sm90/device/scheduler.cuh) with stamps in its loop.
#pragma once

#include "cuda/sm90/device/scheduler.cuh"
#include "device/trace/recorder.cuh"

namespace flash3::device {

using namespace cuda;
using namespace cuda::sm90;

// As schedule_tiles(), of a batch of sequences of one length.
template <class Traits>
__device__ __forceinline__ void schedule_traced(const TileSchedule& schedule, TileRing& ring) {
  Recorder trace(int(Role::kScheduler), threadIdx.x % 32 == 0);
  PipelineState<kTileSlots> slot;
  const bool leader = threadIdx.x % 32 == 0;
  const TileCounter counter(schedule);
  if (leader) counter.begin();
  SequenceWalk walk(schedule.sequences);
  for (int index = blockIdx.x;;) {
    trace.begin(Phase::kWaitTile);
    wait(&ring.barriers.empty[slot.stage], slot.phase ^ 1, "tile_empty");
    trace.begin(Phase::kWriteTile);
    WorkTile& work = ring.tiles[slot.stage];
    write_tile<Traits::kTileN, Traits::kBand, false>(schedule, walk, index, work,
                                                     ring.slots[slot.stage], KeysOfBand{});
    __syncwarp();
    const bool valid = work.valid;
    arrive(&ring.barriers.full[slot.stage]);
    slot.advance();
    if (!valid) break;
    trace.begin(Phase::kWaitTile);
    if (schedule.counter != nullptr) {
      if (leader) wait(&ring.wanted, (slot.stage + 1) % 2, "tile_wanted");
      __syncwarp();
    }
    index = __shfl_sync(~0u, leader ? counter.next(index) : 0, 0);
  }
  if (leader) counter.finish();
  trace.end();
}

}  // namespace flash3::device
