// SPDX-License-Identifier: Apache-2.0
// The lists of blocks of queries. A thread block has one: each of its warps looks at a block of
// keys at a time, and then all of them write those that some query sees, in order.
#pragma once

#include "cuda/device/ptx/sync.cuh"
#include "cuda/mask/by_documents.cuh"
#include "cuda/mask/by_ranges.cuh"
#include "cuda/mask/query_block.cuh"

namespace flash3::cuda {

// Takes room for n of what *counter counts; where it begins, as an unsigned number that is beyond
// the room if there is none. Says in the counts what there was no room for, and what an int does
// not count.
__device__ __forceinline__ unsigned take_room(MaskCounts* counts, int* counter, unsigned n,
                                              long long room, int many) {
  const unsigned at = atomicAdd(reinterpret_cast<unsigned*>(counter), n);
  int flags = 0;
  if ((long long)at + n > room) flags |= kNoRoom;
  if (at <= unsigned(kMostInt) && (long long)at + n > kMostInt) flags |= kNoRoom | many;
  if (flags != 0) atomicOr(&counts->overflow, flags);
  return at;
}

// A warp writes the bits of a block of which it has seen(row).
__device__ __forceinline__ int write_bits(const MaskMemory& to, const KeyBits (&seen)[4]) {
  const int lane = threadIdx.x % 32;
  unsigned slot = 0;
  if (lane == 0)
    slot = take_room(to.counts, &to.counts->partial_blocks, 1, to.shape.partial_blocks,
                     kManyPartialBlocks);
  slot = __shfl_sync(~0u, slot, 0);
  if (slot >= to.shape.partial_blocks) return 0;
  unsigned* const words = to.words_of(int(slot));
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const auto word = [&](int part) {
        return mask_word(seen[2 * pair], seen[2 * pair + 1], half, part);
      };
      *reinterpret_cast<uint4*>(words + words_of_lane(lane, pair, half)) =
          make_uint4(word(0), word(1), word(2), word(3));
    }
  return int(slot);
}

template <class Source>
struct ListMaker {
  static constexpr int kThreads = Source::kThreads, kWarps = kThreads / 32;

  // Of a thread block.
  struct Shared {
    typename Source::Ranges ranges;
    typename Source::Shared source;
    KeptBlocks<kThreads, Source::kMostBlocks> kept;
    int found;
    unsigned begin;
  };
  const MaskParams& p;
  Shared& shared;

  // Looks at blocks [first, first + count) of keys and keeps what it finds; how many of a warp's
  // are seen. Where it writes, blocks that need bits get them.
  __device__ __forceinline__ int look(Source& source, const QueryBlock& of, int first, int count,
                                      bool writes) const {
    source.prepare(first, count);
    int found = 0;
    for (int i = threadIdx.x / 32; i < count; i += kWarps) {
      KeyBits rows[4];
      const Seen seen = source(shared.ranges, of, first + i, rows);
      found += seen.quarters != 0;
      int data = seen.range;
      if constexpr (Source::kNeedsBits)
        if (seen.kind == kMaskBits && writes) data = write_bits(p.memory, rows);
      if (threadIdx.x % 32 == 0)
        shared.kept.keep(i, MaskBlock::make(first + i, seen.quarters, seen.kind, data));
    }
    return found;
  }

  __device__ __forceinline__ void make(long long list) const {
    const QueryBlock of(p, list);
    Source source(p, of, shared.source);
    if (threadIdx.x == 0) shared.found = 0;
    find_ranges<kThreads>(p, of, shared.ranges,
                          [&](int r, int row) { return source.range(r, row); });
    const MaskRange keys = shared.ranges.keys();
    const int first = keys.begin < keys.end ? keys.begin / kMaskBlock : 0,
              last = keys.begin < keys.end ? (keys.end - 1) / kMaskBlock + 1 : 0;
    const int at_once = source.most_blocks();
    const bool once = last - first <= at_once;  // else a second look writes

    int found = 0;
    for (int at = first; at < last; at += at_once)
      found += look(source, of, at, min(at_once, last - at), once);
    if (threadIdx.x % 32 == 0 && found != 0) atomicAdd(&shared.found, found);
    __syncthreads();
    found = shared.found;
    if (threadIdx.x == 0)
      shared.begin = found == 0 ? 0
                                : take_room(p.memory.counts, &p.memory.counts->blocks,
                                            unsigned(found), p.memory.shape.blocks, kManyBlocks);
    __syncthreads();
    const unsigned begin = shared.begin;
    const bool fits = (long long)begin + found <= p.memory.shape.blocks;
    if (threadIdx.x == 0)
      *p.memory.list(of.batch, of.head, of.block) =
          fits && found != 0 ? MaskList{int(begin), found} : MaskList{0, 0};
    if (!fits || found == 0) return;
    MaskBlock* to = p.memory.blocks + begin;
    for (int at = first; at < last; at += at_once) {
      const int count = min(at_once, last - at);
      if (!once) {
        __syncthreads();  // what was looked at before has been written
        look(source, of, at, count, true);
        __syncthreads();
      }
      to = shared.kept.write(count, to);
    }
  }
};

// Thread blocks of a multiprocessor that ptxas leaves registers for; 0: as many as it likes, which
// for some sources are so many that it spills.
template <class Source>
inline constexpr int kLeastBlocks = 0;
template <>
inline constexpr int kLeastBlocks<ByBand> = 4;
template <>
inline constexpr int kLeastBlocks<ByDocuments> = 4;

template <class Source>
__global__ void __launch_bounds__(Source::kThreads, kLeastBlocks<Source>)
    lists_kernel(const __grid_constant__ MaskParams p) {
  __shared__ typename ListMaker<Source>::Shared shared;
  wait_for_previous_kernel();
  launch_dependents();
  ListMaker<Source>{p, shared}.make(blockIdx.x);
}

}  // namespace flash3::cuda
