// SPDX-License-Identifier: Apache-2.0
// Clock stamps of one role, by one of its threads. The other threads, and other blocks, go through
// the same instructions and store nothing: a branch here would part a warp between its products.
#pragma once

#include <cstdint>

#include "cuda/sm90/device/scheduler.cuh"
#include "device/trace/stamps.hpp"

namespace flash3::device {

// Set by the host before the launch; one for each file of traced kernels.
static __constant__ TraceTarget trace_target;

// The low half of the multiprocessor's clock into *to, with `what` after it, if i < kMostStamps.
// One statement, so that ptxas has no reason to part the clock from its place. PTX ISA 10.32,
// %clock.
__device__ __forceinline__ void store_stamp(Stamp* to, uint32_t i, uint32_t what) {
  asm volatile(
      "{\n"
      ".reg .pred kept;\n"
      ".reg .b32 clock;\n"
      "setp.lt.u32 kept, %1, %3;\n"
      "mov.u32 clock, %%clock;\n"
      "@kept st.global.v2.b32 [%0], {clock, %2};\n"
      "}" ::"l"(to),
      "r"(i), "r"(what), "n"(kMostStamps)
      : "memory");
}

// PTX ISA 10.34 %globaltimer; 10.33 %clock64; 10.11 %smid.
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ unsigned multiprocessor() {
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

class Recorder {
 public:
  // records: true in one thread of the role.
  __device__ __forceinline__ Recorder(int role, bool records)
      : next_(records && int(blockIdx.x) == trace_target.block ? 0 : kNever), role_(role) {}

  // The phase before this one, if any, ends.
  __device__ __forceinline__ void begin(Phase phase, int key_tile = 0) {
    store_stamp(&trace_target.buffer->stamps[role_][next_ % kMostStamps], next_,
                uint32_t(phase) | uint32_t(key_tile) << 8);
    ++next_;
  }

  // After the last phase.
  __device__ __forceinline__ void end() {
    begin(Phase::kEnd);
    if (next_ < kNever) trace_target.buffer->counts[role_] = next_;
  }

  // Consumer 0: what the host makes seconds of clocks from.
  __device__ __forceinline__ void note_time(int which) const {
    if (next_ >= kNever || role_ != int(Role::kConsumer)) return;
    trace_target.buffer->nanoseconds[which] = nanoseconds();
    trace_target.buffer->clocks[which] = clock64();
    if (which == 0) trace_target.buffer->multiprocessor = multiprocessor();
  }

 private:
  static constexpr uint32_t kNever = 1u << 31;  // the count of those that store nothing

  uint32_t next_;
  const int role_;
};

// The library's scheduler (cuda/sm90/device/scheduler.cuh) with stamps in its loop.

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
