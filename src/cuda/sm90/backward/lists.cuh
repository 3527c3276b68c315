// SPDX-License-Identifier: Apache-2.0
// What a backward kernel that walks the lists of a mask does otherwise (core/mask_lists.hpp). A
// block's keys are a block of keys of the mask, or half of one; it walks over the query tiles of
// the blocks of queries in that block's list, of one query head after the other. Beside each tile
// of Q the loader brings the words or the ranges that tell who sees what.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/consume.cuh"
#include "cuda/sm90/backward/kernel_params.h"
#include "cuda/sm90/backward/limits.hpp"
#include "cuda/sm90/device/mask_tile.cuh"

namespace flash3::cuda::sm90 {

// What goes with a listed query tile: which it is, and the words or ranges that tell who sees the
// block's keys, in the order of core/mask_lists.hpp.
template <int kWords>
struct alignas(16) ListedQueries {
  uint32_t words[kWords];
  MaskTile tile;
  int head;  // of queries; only of a kernel of biased scores
};
template <class Common, BackwardConfig kRow>
  requires(kRow.lists)
struct SharedOf<Common, kRow> : Common {
  ListedQueries<mask_words(kRow)> listed[kQueryStages];
};

// Query tiles of a block of queries.
template <class Traits>
inline constexpr int kQueryTilesOfBlock = kMaskBlock / Traits::kTileM;

__device__ __forceinline__ MaskList read_list(const MaskList* list) {
  const int2 x = __ldg(reinterpret_cast<const int2*>(list));
  return {x.x, x.y};
}

// The query tiles of a list: n counts those of all lists.
struct TilesOfList {
  int begin, end;
};
template <class Traits>
__device__ __forceinline__ TilesOfList listed_tiles(const BackwardParams& params,
                                                    const KeyTile& work, int head) {
  constexpr int kTiles = kQueryTilesOfBlock<Traits>;
  const MaskList list = read_list(
      kernel_params(params).mask.key_list(work.sequence.batch, head, work.key / kMaskBlock));
  return {list.begin * kTiles, (list.begin + list.count) * kTiles};
}

// Query tile n, and whether the walk goes over it: it sees some of the keys, or, where blocks take
// their turns at the sums of dQ by their places in lists, it exists.
template <class Traits>
struct ListedTile {
  MaskBlock block;  // of queries
  int tile;         // in the sequence
  bool walked;

  __device__ __forceinline__ ListedTile(const BackwardParams& params, const KeyTile& work, int n) {
    constexpr int kTiles = kQueryTilesOfBlock<Traits>;
    const int2 x =
        __ldg(reinterpret_cast<const int2*>(kernel_params(params).mask.key_blocks) + n / kTiles);
    block = {x.x, x.y};
    tile = block.block() * kTiles + n % kTiles;
    int quarters = kAllQuarters;
    if constexpr (kTiles > 1) quarters &= quarters_of_rows(n % kTiles);
    if constexpr (Traits::kTileN < kMaskBlock)
      quarters &= quarters_of_keys(work.key / kMaskQuarter % 2);
    // Whatever lengths the mask was made with, no tile lies after the sequence's end.
    walked = tile * Traits::kTileM < work.sequence.q_length &&
             (params.schedule.deterministic || (block.quarters() & quarters) != 0);
  }
};

// Query tiles that the block of this work walks over, of all heads. By a whole warp.
template <class Traits>
__device__ __forceinline__ int listed_steps(const BackwardParams& params, const KeyTile& work) {
  int steps = 0;
  for (int own = 0; own < params.heads_per_kv_head; ++own) {
    const TilesOfList tiles =
        listed_tiles<Traits>(params, work, work.kv_head * params.heads_per_kv_head + own);
    for (int n = tiles.begin + int(threadIdx.x % 32); n < tiles.end; n += 32)
      steps += ListedTile<Traits>(params, work, n).walked;
  }
  return __reduce_add_sync(~0u, steps);
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
    const TilesOfList tiles = listed_tiles<Traits>(params, work, head);
    n = tiles.begin;
    end = tiles.end;
  }
  // From n on.
  __device__ __forceinline__ void find_tile(const BackwardParams& params, const KeyTile& work) {
    const int last_head = (work.kv_head + 1) * params.heads_per_kv_head - 1;
    for (;; ++n) {
      while (n == end && head < last_head) {
        ++head;
        open_list(params, work);
      }
      if (n == end) return;
      const ListedTile<Traits> found(params, work, n);
      if (!found.walked) continue;
      block = found.block;
      tile = found.tile;
      index = work.first_query_tile + head * params.schedule.query_tiles.tiles + tile;
      return;
    }
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
struct BesideQ<Traits, true, false> {
  static constexpr int kWords = 64 * 64 / 32;  // that lie together
  static constexpr int kQueryParts = Traits::kTileM / 64, kKeyParts = Traits::kTileN / 64;
  static constexpr int kRangeBytes = Traits::kTileM * int(sizeof(MaskRange)),
                       kBitBytes = kQueryParts * kKeyParts * kWords * 4;
  const BackwardParams& params;
  typename Traits::Shared& shared;
  const KeyTile& work;
  const ListedPlace<Traits>& at;

  __device__ __forceinline__ BesideQ(const BackwardParams& p, typename Traits::Shared& s,
                                     const KeyTile& w, const ListedPlace<Traits>& place)
      : params(p), shared(s), work(w), at(place) {}

  __device__ __forceinline__ int note(int stage) const {
    const int part = at.n % kQueryTilesOfBlock<Traits>;
    MaskBlock block = at.block;
    if constexpr (Traits::kConfig.wide) block = as_quarter(block, part, stage);
    shared.listed[stage].tile = MaskTile::of<kQueryTilesOfBlock<Traits>>(block, part);
    if constexpr (Traits::kBiased) shared.listed[stage].head = at.head;
    switch (at.block.kind()) {
      case kMaskRange: return kRangeBytes;
      case kMaskBits: return stages_bits(Traits::kConfig) ? kBitBytes : 0;
      default: return 0;
    }
  }
  __device__ __forceinline__ void load(int stage, uint64_t* full) const {
    const MaskKind kind = at.block.kind();
    uint32_t* const to = shared.listed[stage].words;
    if (kind == kMaskRange)
      bulk_load(to,
                kernel_params(params).mask.range(at.block.data, work.sequence.batch, at.head,
                                                 at.tile * Traits::kTileM),
                kRangeBytes, full);
    if (kind != kMaskBits || !stages_bits(Traits::kConfig)) return;
    const unsigned* const from = kernel_params(params).mask.words_of(at.block.data) +
                                 work.key % kMaskBlock / 64 * 2 * kWords +
                                 at.n % kQueryTilesOfBlock<Traits> * kWords;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
      bulk_load(to + part * kQueryParts * kWords, from + part * 2 * kWords,
                kQueryParts * kWords * 4, full);
  }

 private:
  // A tile of wide kernels is one quarter: their consumers have no registers for a third way to
  // tell, beside words and ranges.
  __device__ __forceinline__ MaskBlock as_quarter(MaskBlock block, int row_half, int stage) const {
    if (block.kind() != kMaskQuarters) return block;
    const int key_half = work.key / kMaskQuarter % 2;
    const bool seen = (block.quarters() & quarter_bit(row_half, key_half)) != 0;
    if (!seen) {
      for (uint32_t& word : shared.listed[stage].words) word = 0;
      fence_shared_for_async_proxy();  // before the stage's next words come
    }
    return MaskBlock::make(block.block(), block.quarters(), seen ? kMaskFull : kMaskBits, 0);
  }
};

// Deterministic: how many blocks add to this query tile before the block of this work, which take
// the key tiles of a head from the first on: those of the blocks before in the list of its queries.
template <class Traits>
__device__ __forceinline__ int listed_dq_order(const BackwardParams& params, const KeyTile& work,
                                               int head, int tile) {
  constexpr int kKeyTiles = kMaskBlock / Traits::kTileN;
  const int key_block = work.key / kMaskBlock;
  const MaskList list = read_list(kernel_params(params).mask.list(
      work.sequence.batch, head, tile / kQueryTilesOfBlock<Traits>));
  int first = 0, last = list.count;  // the block is in between
  while (first < last) {
    const int middle = (first + last) / 2;
    const int block = __ldg(&kernel_params(params).mask.blocks[list.begin + middle].bits) >> 6;
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
  static constexpr int kQueryParts = Traits::kTileM / 64;
  static constexpr bool kStagesBits = stages_bits(Traits::kConfig);
  // Words of two queries 8 apart that a thread looks its keys up in.
  static constexpr int kOwnWords = Traits::kTileM / 8;

  const MaskMemory& memory;
  typename Traits::Shared& shared;
  int first_key;                              // of the 64
  int stage = 0;                              // of the query tile
  uint32_t own[kStagesBits ? 1 : kOwnWords];  // words that are not staged

  __device__ __forceinline__ KeysMask(const BackwardParams& params, typename Traits::Shared& s,
                                      const KeyTile& work, int first, int)
      : memory(kernel_params(params).mask), shared(s), first_key(work.key + first) {}

  // Which query tile this stage of Q holds; of this one is what follows.
  __device__ __forceinline__ int query_tile(int q_stage) {
    stage = q_stage;
    return listed().tile();
  }

  __device__ __forceinline__ int head(const BackwardParams&, const KeyTile&, int) const {
    return shared.listed[stage].head;
  }

  // Whether any query of the tile sees any of the warpgroup's keys.
  __device__ __forceinline__ bool sees_any() const {
    return (seen_quarters() & quarters_of_keys(key_half())) != 0;
  }

  // The warpgroups meet once both have stored their dS. A warpgroup that passes the tile does not
  // come to the named barrier of one that does not: for synccheck that has to be one instruction.
  __device__ __forceinline__ void meet(Walked& walked, int warpgroup) const {
    const int seen = seen_quarters();
    if ((seen & quarters_of_keys(0)) != 0 && (seen & quarters_of_keys(1)) != 0)
      sync(BackwardBarrier::kDsStored, 0, kConsumerThreads);
    else
      meet_where_one_passes(walked, warpgroup);
  }

  // A query tile that sees none of the warpgroup's keys: its dS is 0, and dQ has the other's keys.
  // Where blocks take their turns at dQ it may see none of the other's either.
  __device__ __forceinline__ void pass_query_tile(Walked& walked, const Operands<Traits>& operand,
                                                  int step, bool is_first, bool is_last,
                                                  int warpgroup, int thread) const {
    using DsTile = typename Traits::DsTile;
    const auto [stage, phase] = QueryState::at(step);
    const int ds_stage = DsState::at(step).stage;
    if constexpr (Traits::kDqLast) hand_over_last_dq<Traits>(shared, warpgroup, !is_first);
    if constexpr (Traits::kPersistent) {
      if (is_first) wait_for_stored_keys<Traits>(shared, walked, warpgroup, thread);
      arrive_if(is_last, &shared.v_empty);
    }
    constexpr uint32_t kNone[Traits::kTileM / 4] = {};
    store_ds<DsTile>(shared.ds[ds_stage], kNone, warpgroup, thread);
    fence_shared_for_async_proxy();
    meet_where_one_passes(walked, warpgroup);
    float r_dq[Traits::kOwnQuads * 4];
    issue_dq<Traits>(r_dq, operand.k_columns, operand.ds_rows + ds_stage * DsTile::kBytes,
                     warpgroup);
    // After the meeting, before which the other warpgroup has freed the stages of the last tile;
    // and once dOut is there, which no one else may have awaited.
    wait(&shared.dout_barriers.full[stage], phase, "dout_full");
    arrive(&shared.dout_barriers.empty[stage]);
    arrive(&shared.q_barriers.empty[stage]);
    finish_dq<Traits, 0>(shared, r_dq, step, warpgroup, warpgroup, thread);
  }

  // While the scores are under way.
  __device__ __forceinline__ void read(int thread) {
    if constexpr (!kStagesBits) {
      if (listed().kind() != kMaskBits) return;
      const unsigned* const words = memory.words_of(listed().data) + words_of_quarter(0, thread);
#pragma unroll
      for (int i = 0; i < kOwnWords; ++i) own[i] = __ldg(words + place_of(i));
    }
  }

  template <int N>
  __device__ __forceinline__ KeysByQueries<N> view(int query, int thread) const {
    return {query + thread % 4 * 2, first_key + row_of(thread)};
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&r_s)[N], int, int thread) const {
    const int kind = listed().kind();
    if (kind == kMaskFull) return;
    if constexpr (!Traits::kConfig.wide)
      if (kind == kMaskQuarters) return apply_quarters(r_s);
    // Few registers hold what is computed here from the thread.
    if (kind == kMaskBits)
      apply_bits(r_s, hide_from_optimizer(thread));
    else
      apply_ranges(r_s, hide_from_optimizer(thread));
  }

 private:
  __device__ __forceinline__ const MaskTile& listed() const { return shared.listed[stage].tile; }
  // Those of the tile's queries.
  __device__ __forceinline__ int seen_quarters() const {
    const MaskTile tile{unsigned(uniform(int(listed().bits))), 0};
    return tile.quarters() & (kQueryParts > 1 ? kAllQuarters : quarters_of_rows(tile.tile() % 2));
  }

  // Each arrives at a barrier of its own and waits for the other's. They are barriers that wide
  // kernels alone need otherwise.
  __device__ __forceinline__ void meet_where_one_passes(Walked& walked, int warpgroup) const {
    static_assert(!Traits::kConfig.wide && Traits::kTileN == kMaskBlock);
    uint64_t *own = &shared.p_barriers.full[0], *other = &shared.ds_barriers.full[0];
    if (warpgroup != 0) own = &shared.ds_barriers.full[0], other = &shared.p_barriers.full[0];
    arrive(own);
    wait(other, uint32_t(walked.passed++ % 2), "ds_stored");
  }

  // A thread has this key and the one 8 further, from the first of the 64.
  static __device__ __forceinline__ int row_of(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  // The half of the listed block that these 64 queries are.
  __device__ __forceinline__ int row_half(int part) const {
    return kQueryParts > 1 ? part : listed().tile() % 2;
  }
  __device__ __forceinline__ int key_half() const { return first_key / kMaskQuarter % 2; }
  __device__ __forceinline__ bool sees(int part) const {
    return listed().sees(row_half(part), key_half());
  }

  template <int N>
  __device__ __forceinline__ void apply_quarters(float (&r_s)[N]) const {
#pragma unroll
    for (int part = 0; part < kQueryParts; ++part) {
      if (sees(part)) continue;
#pragma unroll
      for (int i = 0; i < N / kQueryParts; ++i) r_s[part * (N / kQueryParts) + i] = -kInfinity;
    }
  }

  // See mask_bit() in core/mask_lists.hpp. Words of a quarter, from the block's first on.
  __device__ __forceinline__ int words_of_quarter(int part, int thread) const {
    const int quarter = kStagesBits ? first_key % Traits::kTileN / kMaskQuarter * kQueryParts + part
                                    : key_half() * 2 + row_half(part);
    return quarter * 128 + thread % 4 * 2 * 4 + row_of(thread) % 8 / 2;
  }
  // Where the i-th word lies from there: for each 16 queries two, of neighbours.
  static __device__ __forceinline__ int place_of(int i) {
    return i / 8 * 128 + i / 2 % 4 * 32 + i % 2 * 4;
  }

  template <int N>
  __device__ __forceinline__ void apply_bits(float (&r_s)[N], int thread) const {
    const int key = row_of(thread), bit = key / 8 * 2 + key % 2;  // of the key 8 further 2 on
    const uint32_t* const staged = shared.listed[stage].words + words_of_quarter(0, thread);
#pragma unroll
    for (int i = 0; i < kOwnWords; ++i) {
      const uint32_t word = (kStagesBits ? load_shared(staged + place_of(i)) : own[i]) >> bit;
#pragma unroll
      for (int half = 0; half < 2; ++half)  // queries 8 apart
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = r_s[(i / 2 * 2 + half) * 4 + 2 * h + i % 2];
          x = word & 1u << (16 * half + 2 * h) ? x : -kInfinity;
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
