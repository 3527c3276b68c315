// SPDX-License-Identifier: Apache-2.0
// What a backward kernel that walks the lists of a mask does otherwise (core/mask_lists.hpp). A
// block's keys are a block of keys of the mask, or half of one; it walks over the query tiles of
// the blocks of queries in that block's list, of one query head after the other. Beside each tile
// of Q the loader brings the words or the ranges that tell who sees what.
#pragma once

#include "cuda/device/ptx/vectors.cuh"
#include "cuda/sm90/backward/load.cuh"
#include "cuda/sm90/backward/scores.cuh"
#include "cuda/sm90/backward/traits.cuh"

namespace flash3::cuda::sm90 {

// Query tiles of a block of queries.
template <class Traits>
inline constexpr int kQueryTilesOfBlock = kMaskBlock / Traits::kTileM;

__device__ __forceinline__ MaskList read_list(const MaskList* list) {
  const int2 x = __ldg(reinterpret_cast<const int2*>(list));
  return {x.x, x.y};
}

// Query tiles that the block of this work walks over, of all heads. By a whole warp.
template <class Traits>
__device__ __forceinline__ int listed_steps(const BackwardParams& params, const KeyTile& work) {
  int blocks = 0;
  for (int own = int(threadIdx.x % 32); own < params.heads_per_kv_head; own += 32) {
    const int head = work.kv_head * params.heads_per_kv_head + own;
    blocks +=
        read_list(params.mask.key_list(work.sequence.batch, head, work.key / kMaskBlock)).count;
  }
  return __reduce_add_sync(~0u, blocks) * kQueryTilesOfBlock<Traits>;
}

// A place in that walk.
template <class Traits>
struct ListedPlace : QueryPlace {
  MaskBlock block;  // of queries
  int n, end;       // the tile, and where its head's end, among those of all lists

  __device__ __forceinline__ ListedPlace(const BackwardParams& params, const KeyTile& work) {
    head = work.kv_head * params.heads_per_kv_head;
    open_list(params, work);
    find_tile(params, work);
  }
  __device__ __forceinline__ void advance(const BackwardParams& params, const KeyTile& work) {
    ++n;
    find_tile(params, work);
  }

 private:
  __device__ __forceinline__ void open_list(const BackwardParams& params, const KeyTile& work) {
    const MaskList list =
        read_list(params.mask.key_list(work.sequence.batch, head, work.key / kMaskBlock));
    n = list.begin * kQueryTilesOfBlock<Traits>;
    end = n + list.count * kQueryTilesOfBlock<Traits>;
  }
  __device__ __forceinline__ void find_tile(const BackwardParams& params, const KeyTile& work) {
    const int last_head = (work.kv_head + 1) * params.heads_per_kv_head - 1;
    while (n == end && head < last_head) {
      ++head;
      open_list(params, work);
    }
    if (n == end) return;
    const int2 x = __ldg(reinterpret_cast<const int2*>(params.mask.key_blocks) +
                         n / kQueryTilesOfBlock<Traits>);
    block = {x.x, x.y};
    tile = block.block() * kQueryTilesOfBlock<Traits> + n % kQueryTilesOfBlock<Traits>;
    index = work.first_query_tile + head * params.schedule.query_tiles.tiles + tile;
  }
};

template <class Traits>
struct QueryWalk<Traits, true> {
  using Place = ListedPlace<Traits>;
  const BackwardParams& params;
  const KeyTile& work;
  Place at{params, work};

  __device__ __forceinline__ Place operator()(int i) {
    if (i > 0) at.advance(params, work);
    return at;
  }
};

// Loads what tells who sees what of a listed query tile: words of 64 by 64 pairs, or ranges.
template <class Traits>
struct MaskBeside<Traits, true> {
  static constexpr int kWords = 64 * 64 / 32;  // that lie together
  static constexpr int kQueryParts = Traits::kTileM / 64, kKeyParts = Traits::kTileN / 64;
  static constexpr int kRangeBytes = Traits::kTileM * int(sizeof(MaskRange));
  const BackwardParams& params;
  typename Traits::Shared& shared;
  const KeyTile& work;
  const ListedPlace<Traits>& at;

  __device__ __forceinline__ MaskBeside(const BackwardParams& p, typename Traits::Shared& s,
                                        const KeyTile& w, const ListedPlace<Traits>& place)
      : params(p), shared(s), work(w), at(place) {}

  __device__ __forceinline__ int note(int stage) const {
    const MaskKind kind = at.block.kind();
    shared.listed[stage].tile = {at.tile << 2 | kind, at.block.data};
    return kind == kMaskFull   ? 0
           : kind == kMaskBits ? int(sizeof(shared.listed[stage].words))
                               : kRangeBytes;
  }
  __device__ __forceinline__ void load(int stage, uint64_t* full) const {
    const MaskKind kind = at.block.kind();
    if (kind == kMaskFull) return;
    uint32_t* const to = shared.listed[stage].words;
    if (kind != kMaskBits) {
      bulk_load(
          to,
          params.mask.range(at.block.data, work.sequence.batch, at.head, at.tile * Traits::kTileM),
          kRangeBytes, full);
      return;
    }
    const unsigned* const from = params.mask.words_of(at.block.data) +
                                 work.key % kMaskBlock / 64 * 2 * kWords +
                                 at.n % kQueryTilesOfBlock<Traits> * kWords;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
      bulk_load(to + part * kQueryParts * kWords, from + part * 2 * kWords,
                kQueryParts * kWords * 4, full);
  }
};

// Deterministic: how many blocks add to this query tile before the block of this work, which take
// the key tiles of a head from the first on: those of the blocks before in the list of its queries.
template <class Traits>
__device__ __forceinline__ int listed_dq_order(const BackwardParams& params, const KeyTile& work,
                                               int head, int tile) {
  constexpr int kKeyTiles = kMaskBlock / Traits::kTileN;
  const int key_block = work.key / kMaskBlock;
  const MaskList list =
      read_list(params.mask.list(work.sequence.batch, head, tile / kQueryTilesOfBlock<Traits>));
  int first = 0, last = list.count;  // the block is in between
  while (first < last) {
    const int middle = (first + last) / 2;
    const int block = __ldg(&params.mask.blocks[list.begin + middle].block_and_kind) >> 2;
    if (block < key_block)
      first = middle + 1;
    else
      last = middle;
  }
  return first * kKeyTiles + work.key % kMaskBlock / Traits::kTileN;
}

// Masks a warpgroup's 64 keys in the listed query tiles that need it.
template <class Traits>
struct KeysMask<Traits, true> {
  typename Traits::Shared& shared;
  int first_key;  // of the 64
  int stage = 0;  // of the query tile

  __device__ __forceinline__ KeysMask(typename Traits::Shared& s, const KeyTile& work, int first,
                                      int)
      : shared(s), first_key(work.key + first) {}

  // Which query tile this stage of Q holds; of this one is what follows.
  __device__ __forceinline__ int query_tile(int q_stage) {
    stage = q_stage;
    return shared.listed[stage].tile.tile();
  }

  template <int N>
  __device__ __forceinline__ KeysByQueries<N> view(int query, int thread) const {
    return {query + thread % 4 * 2, first_key + row_of(thread)};
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&r_s)[N], int, int thread) const {
    const int kind = shared.listed[stage].tile.kind();
    if (kind == kMaskFull) return;
    // Few registers hold what is computed here from the thread.
    if (kind == kMaskBits)
      apply_bits(r_s, hide_from_optimizer(thread));
    else
      apply_ranges(r_s, hide_from_optimizer(thread));
  }

 private:
  // A thread has this key and the one 8 further, from the first of the 64.
  static __device__ __forceinline__ int row_of(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  // See mask_bit() in core/mask_lists.hpp.
  template <int N>
  __device__ __forceinline__ void apply_bits(float (&r_s)[N], int thread) const {
    constexpr int kQueryParts = Traits::kTileM / 64;
    const int key = row_of(thread);
    const uint32_t* const words = shared.listed[stage].words +
                                  first_key % Traits::kTileN / 64 * kQueryParts * 128 +
                                  thread % 4 * 2 * 4 + key % 8 / 2;
    const int bit = key / 8 * 2 + key % 2;  // that of the key 8 further is 2 on
#pragma unroll
    for (int queries = 0; queries < N / 8; ++queries) {  // 16 of them
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t word =
            load_shared(words + queries / 4 * 128 + queries % 4 * 32 + e * 4) >> bit;
#pragma unroll
        for (int half = 0; half < 2; ++half)  // queries 8 apart
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& x = r_s[(2 * queries + half) * 4 + 2 * h + e];
            x = word & 1u << (16 * half + 2 * h) ? x : -kInfinity;
          }
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void apply_ranges(float (&r_s)[N], int thread) const {
    const auto* const ranges = reinterpret_cast<const float*>(shared.listed[stage].words);
    const int key = first_key + row_of(thread);
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 range = load_shared(ranges + (8 * j + thread % 4 * 2 + e) * 2);
        const int first = __float_as_int(range.x), last = __float_as_int(range.y);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (!(key + 8 * h >= first && key + 8 * h < last)) r_s[4 * j + 2 * h + e] = -kInfinity;
      }
  }
};

}  // namespace flash3::cuda::sm90
