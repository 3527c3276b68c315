// SPDX-License-Identifier: Apache-2.0
// Which key tile a block takes next, and how a persistent block hands it to its roles: one warp
// finds key tiles, and all others read them in a ring of two.
#pragma once

#include "cuda/sm90/backward/lists.cuh"
#include "cuda/sm90/backward/traits.cuh"
#include "cuda/varlen/find_sequence.cuh"

namespace flash3::cuda::sm90 {

// Writes the block's next work; `before`: how many key tiles it has had. Without a ticket a block
// has one. A whole warp calls this.
template <class Traits>
__device__ __forceinline__ void find_work(const BackwardParams& params, int before, KeyTile& work) {
  const KeySchedule& schedule = params.schedule;
  const SequenceList& list = schedule.sequences;
  const bool leader = threadIdx.x % 32 == 0;
  constexpr int kNone = 0x7fffffff;
  int index = before == 0 ? int(blockIdx.x) : kNone, heads = schedule.kv_heads;
  if (params.ticket != nullptr)
    index = __shfl_sync(~0u, leader ? atomicAdd(params.ticket, 1) : 0, 0);
  ListedSequence sequence = schedule.one_length;
  if (list.rows != nullptr) {
    const ListedTile found = find_sequence(list, index);
    sequence = found.valid ? found.sequence : ListedSequence{};  // which has no tile
    index = found.index;
    heads = schedule.heads_k;
  }
  // Key tiles with lists differ in length, as those under a band.
  if (leader) work = key_tile_at(schedule, sequence, heads, Traits::kTileN, Traits::kBand, index);
  if constexpr (Traits::kLists) {
    __syncwarp();
    const int steps = work.valid ? listed_steps<Traits>(params, work) : 0;
    if (leader) work.query_tile_begin = 0, work.query_tile_end = steps;
  }
}

// The threads that read a key tile beside the warp that finds it: the consumers, and three threads
// of the producer.
inline constexpr int kKeyTileReaders = kConsumerThreads + 3;

// A thread's view of the ring.
template <class Traits>
struct KeyTileReader {
  typename Traits::Shared& shared;
  Walked walked{};

  // Waits for the next key tile. False if there is none.
  __device__ __forceinline__ bool next() const {
    const auto [slot, phase] = Traits::KeyState::at(walked.key_tiles);
    wait(&shared.work_barriers.full[slot], phase, "work_full");
    return work().valid;
  }
  __device__ __forceinline__ const KeyTile& work() const {
    return shared.work[Traits::KeyState::at(walked.key_tiles).stage];
  }
  // Done with it, and with its query tiles.
  __device__ __forceinline__ void release() {
    arrive(&shared.work_barriers.empty[Traits::KeyState::at(walked.key_tiles).stage]);
    ++walked.key_tiles;
  }
};

// Finds one key tile after the other; one thread calls load(work, walked) for each. By a whole
// warp.
template <class Traits, class Load>
__device__ __forceinline__ void hand_out_work(const BackwardParams& params,
                                              typename Traits::Shared& shared, const Load& load) {
  Walked walked;
  for (;;) {
    const auto [slot, phase] = Traits::KeyState::at(walked.key_tiles);
    wait(&shared.work_barriers.empty[slot], phase ^ 1, "work_empty");
    KeyTile& work = shared.work[slot];
    find_work<Traits>(params, walked.key_tiles, work);
    __syncwarp();
    if (elect_one()) {
      arrive(&shared.work_barriers.full[slot]);
      if (work.valid) load(work, walked);
    }
    __syncwarp();
    if (!work.valid) return;
    ++walked.key_tiles;
  }
}

}  // namespace flash3::cuda::sm90
