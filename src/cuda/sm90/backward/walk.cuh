// SPDX-License-Identifier: Apache-2.0
// Where a block stands: which key tile it takes next, and how a persistent block hands it to its
// roles, one warp finding key tiles that all others read in a ring of two; which query tiles it
// walks over; and the float32 sums of their dQ in the workspace, to which all blocks that see a
// query tile add.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/traits.cuh"
#include "cuda/varlen/find_sequence.cuh"

namespace flash3::cuda::sm90 {

// What a role of a block has done before; the places in its rings follow. A block that is not
// persistent has done nothing before.
struct Walked {
  int key_tiles = 0;
  int query_tiles = 0;
  int cleared = 0;  // a loader's: key tiles with hidden keys
  int passed = 0;   // a consumer's: query tiles that a warpgroup passed (lists.cuh)
};

// Query tiles that the block of a key tile with lists walks over, of all heads, and how many blocks
// add to one of these before: lists.cuh.
template <class Traits>
__device__ __forceinline__ int listed_steps(const BackwardParams& params, const KeyTile& work);
template <class Traits>
__device__ __forceinline__ int listed_dq_order(const BackwardParams& params, const KeyTile& work,
                                               int head, int tile);

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
  if (leader)
    work = key_tile_at(schedule, sequence, heads, Traits::kTileN, Traits::kBand, index,
                       Traits::kLists);
  if constexpr (Traits::kLists) {
    __syncwarp();
    const bool has_list = work.valid && work.key < work.sequence.k_length;
    const int steps = has_list ? listed_steps<Traits>(params, work) : 0;
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

// ---- query tiles ----

// How many a block walks over.
template <class Traits>
__device__ __forceinline__ int query_steps(const BackwardParams& params, const KeyTile& work) {
  if constexpr (Traits::kLists) return work.query_tile_end;  // of all heads
  return work.query_tiles() * params.heads_per_kv_head;
}

// A block walks over the query tiles of every query head of its KV head. This is the i-th one.
struct QueryPlace {
  int head;   // among all query heads
  int tile;   // in the sequence
  int index;  // among all query tiles in the workspace

  QueryPlace() = default;
  __device__ __forceinline__ QueryPlace(const BackwardParams& params, const KeyTile& work, int i) {
    const int tiles = work.query_tiles(), own_head = i / tiles;
    head = work.kv_head * params.heads_per_kv_head + own_head;
    tile = work.query_tile_begin + (i - own_head * tiles);
    index = work.first_query_tile + head * params.schedule.query_tiles.tiles + tile;
  }
};

// The walk of a role. lists.cuh has that over lists.
template <class Traits, bool kLists = Traits::kLists>
struct QueryWalk;
template <class Traits>
struct QueryWalk<Traits, false> {
  using Place = QueryPlace;
  const BackwardParams& params;
  const KeyTile& work;

  // The i-th place. i: 0, 1, 2 …
  __device__ __forceinline__ QueryPlace operator()(int i) const { return {params, work, i}; }
};

// ---- the sums of dQ ----

// A counter in global memory that orders additions to them. One thread of a block uses it on behalf
// of the others.
struct DqSemaphore {
  // What the counter holds once the block that claimed the sums has stored its dQ.
  static constexpr int kStored = 2;

  int* count;

  __device__ __forceinline__ bool is_ready(int order) const { return load_acquire(count) >= order; }
  __device__ __forceinline__ void wait(int order) const {
    wait_until([&] { return is_ready(order); }, "dq_semaphore", order);
  }
  // Releases what this thread has added. It counts and does not store the order, so that no block
  // waits forever where cu_seqlens make sequences overlap.
  __device__ __forceinline__ void release() const { add_release(count, 1); }
  // Sums that are not zero-initialised: true for the first block that asks. It stores its dQ.
  __device__ __forceinline__ bool claim() const { return exchange_if(count, 0, 1) == 0; }
};

// The sums of the i-th query tile of a block's walk. `part` chooses the semaphore: the consumer
// warpgroups add their halves of dQ independently.
template <class Traits>
struct DqSums {
  const BackwardParams& params;
  const KeyTile& work;
  int part;
  int head;   // among all query heads
  int tile;   // in the sequence
  int index;  // among all query tiles in the workspace

  __device__ __forceinline__ DqSums(const BackwardParams& p, const KeyTile& w, int which_part,
                                    const QueryPlace& at)
      : params(p), work(w), part(which_part), head(at.head), tile(at.tile), index(at.index) {}

  __device__ __forceinline__ float* begin() const {
    return params.workspace.dq + int64_t(index) * (Traits::kTileM * Traits::kConfig.dq_columns());
  }
  // Deterministic: how many blocks add before this one.
  __device__ __forceinline__ int order() const {
    if constexpr (Traits::kLists) return listed_dq_order<Traits>(params, work, head, tile);
    return dq_order(params.schedule, work, Traits::kTileN, Traits::kBand, tile);
  }
  __device__ __forceinline__ DqSemaphore semaphore() const {
    return {params.workspace.dq_semaphores + int64_t(index) * kDqParts + part};
  }
};

}  // namespace flash3::cuda::sm90
