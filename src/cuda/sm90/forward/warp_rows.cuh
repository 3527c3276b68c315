// SPDX-License-Identifier: Apache-2.0
// Which queries a consumer's rows are, which keys they see, and where they lie in the output: of
// the work tile's sequence, or of the short sequence whose slot a row lies in. Each warp puts its
// own into shared memory when a tile begins and reads them where they are needed, so that no
// registers hold them meanwhile.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/row_end.cuh"
#include "cuda/device/tile_schedule.hpp"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/params.h"

namespace flash3::cuda::sm90 {

// The 16 rows of a consumer warp: row r of the warpgroup is query `query + query_of(r)` of the
// sequence (HeadPack), in the heads of this group.
inline constexpr int kWarpRows = 16;
struct WarpQueries {
  ListedSequence sequence;
  int query, head_group;
};

// The warpgroup's queries of the tile's sequence.
__device__ __forceinline__ TileMask::Range warpgroup_queries(const ForwardParams& params,
                                                             const WorkTile& work, int warpgroup) {
  const int first = work.query + warpgroup * params.pack.queries;
  return {first, min(first + params.pack.queries, work.sequence.q_length)};
}

// The key tiles, of all, that these queries see; one that they do not where they see none.
__device__ __forceinline__ TileMask::Range seen_tiles(const TileMask& mask, int k_length,
                                                      const TileMask::Range& queries,
                                                      const TileMask::Range& all, int tile_n) {
  const TileMask::Range seen = mask.key_tiles(queries, k_length, tile_n);
  const int begin = uniform(max(all.begin, min(all.end - 1, seen.begin)));
  return {begin, uniform(max(begin + 1, min(all.end, seen.end)))};
}

// Key tiles that need no mask for these queries.
template <bool kBand>
__device__ __forceinline__ TileMask::Range unmasked_tiles(const TileMask& mask, int k_length,
                                                          bool in_slots,
                                                          const TileMask::Range& queries,
                                                          int tile_n) {
  if constexpr (!kBand) return {0, k_length / tile_n};
  if (in_slots) return {0, 0};
  return mask.full_tiles(queries, k_length, tile_n);
}

// Where a warp's rows lie: row r of the warpgroup is query `query + pack.query_of(r)`.
struct RowsOfWarp {
  const ListedSequence* sequence;
  int query;
  int row_of_slot;  // the slot's first, from the work tile's
  bool in_slot;
};

// Warp `warp` of a warpgroup. slots: the short sequences that share the tile, where some may.
template <bool kSlots>
__device__ __forceinline__ RowsOfWarp rows_of_warp(const ForwardParams& params,
                                                   const WorkTile& work,
                                                   const ListedSequence* slots, int warpgroup,
                                                   int warp) {
  const int slot_rows = params.schedule.slot_rows;
  if (!kSlots || slot_rows == 0)
    return {&work.sequence, work.query + warpgroup * params.pack.queries, 0, false};
  const int first = warpgroup * kWarpgroupRows;
  const int slot = unsigned(first + warp * kWarpRows) / unsigned(slot_rows);
  return {&slots[slot], first - slot * slot_rows, slot * slot_rows, true};
}

// Notes what each row of the warp sees. mask: the work tile's.
template <bool kBand>
__device__ __forceinline__ void note_keys(const ForwardParams& params, const WorkTile& work,
                                          const TileMask& mask, const RowsOfWarp& rows, int warp,
                                          int lane, RowKeys (&keys)[kWarpRows]) {
  if (lane >= kWarpRows) return;
  const int token = rows.query + params.pack.query_of(warp * kWarpRows + lane);
  const int q_length = rows.sequence->q_length, k_length = rows.sequence->k_length;
  if (!rows.in_slot) {
    keys[lane] = keys_of_row<kBand>(mask, k_length, token);
  } else {
    const auto own = TileMask::make(q_length, k_length, params.schedule.rule);
    const RowKeys seen = keys_of_row<true>(own, k_length, token);
    const int first_key = work.query + rows.row_of_slot;  // of the slot's in the long sequence
    keys[lane] = {first_key + max(seen.first, 0), first_key + seen.end};
  }
}

// ---- what rows become; a row is counted from the warpgroup's first ----

struct WarpOutput {
  const ForwardParams& params;
  const WarpQueries& queries;

  __device__ __forceinline__ int token(int row) const {
    return queries.query + params.pack.query_of(row);
  }
  // False: idle, or after the end of the sequence.
  __device__ __forceinline__ bool exists(int row) const {
    return token(row) < queries.sequence.q_length && row < params.pack.rows();
  }
  __device__ __forceinline__ int head(int row) const {
    return queries.head_group * params.pack.heads + params.pack.head_of(row);
  }
  template <class T>
  __device__ __forceinline__ T* address(int row) const {
    return static_cast<T*>(params.out_data) + queries.sequence.batch * params.out_stride_batch +
           head(row) * params.out_stride_head +
           (int64_t(queries.sequence.q_first) + token(row)) * params.out_stride_seq;
  }
  // Stores what the call wants of a row.
  template <bool kMaxLogits>
  __device__ __forceinline__ void store(int row, const RowValues& values) const {
    store_row_values<kMaxLogits>(params.rows, queries.sequence.batch, head(row),
                                 queries.sequence.q_first + token(row), values);
  }
};

// Stores what the call wants of a thread's two rows, row_in_warpgroup + 8·h; each quad has its rows
// four times over, one thread writes.
template <class Softmax>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const WarpOutput& output,
                                           int row_in_warpgroup, const Softmax& softmax,
                                           const float (&lse)[2]) {
  constexpr bool kMaxLogits = Softmax::kKeepsLargest;
  RowValues values[2] = {{lse[0], 0.f}, {lse[1], 0.f}};
  if (kMaxLogits && params.rows.max_logits.data != nullptr) {  // of whole quads
    values[0].max_logit = softmax.max_logit(0);
    values[1].max_logit = softmax.max_logit(1);
  }
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (output.exists(row)) output.store<kMaxLogits>(row, values[h]);
  }
}

// Takes the sinks of a thread's two rows into their normalisation and LSE.
__device__ __forceinline__ void add_sinks(const ForwardParams& params, const WarpOutput& output,
                                          int row_in_warpgroup, float (&inverse_sum)[2],
                                          float (&lse)[2]) {
  if (params.sink.data == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (output.exists(row))
      add_sink(load_sink(params.sink, output.head(row)), inverse_sum[h], lse[h]);
  }
}

// Rows that see no key: output 0, LSE −∞ or the sink. Each warp stores its own.
__device__ __forceinline__ void store_empty(const ForwardParams& params, const WarpOutput& output,
                                            int thread) {
  const int lane = thread % 32, first_row = thread / 32 * kWarpRows;
  for (int row = first_row; row < first_row + kWarpRows; ++row) {
    if (!output.exists(row)) continue;
    const auto clear = [&](auto* out) {
      for (int col = lane; col < params.head_dim_v; col += 32) out[col] = 0;
    };
    if (params.out_type == FloatType::kFloat32) {
      clear(output.address<float>(row));
    } else {
      clear(output.address<uint16_t>(row));
    }
  }
  const int row = first_row + lane;
  if (lane >= kWarpRows || !output.exists(row)) return;
  const bool has_sink = params.sink.data != nullptr;
  const float lse = has_sink ? load_sink(params.sink, output.head(row)) : -kInfinity;
  output.store<true>(row, {lse, -kInfinity});
}

// What becomes of rows whose last product is under way, and of those of a work tile without keys.
// split.cuh has what they become where blocks share a work tile.
template <class Traits, bool kSplit = Traits::kSplit>
struct FinishedRows;
template <class Traits>
struct FinishedRows<Traits, false> {
  template <class Consumer, class Tiles>
  static __device__ __forceinline__ void note(const Consumer&, const Tiles&) {}
  template <class Consumer>
  static __device__ __forceinline__ void pass(const Consumer&) {}

  // Under the product, with V of last_v.
  template <class Consumer, class Tile>
  __device__ __forceinline__ void begin(const Consumer& c, Tile& tile,
                                        const typename Traits::KvState& last_v,
                                        float (&inverse_sum)[2], float (&lse)[2]) {
    tile.softmax.finish(inverse_sum, lse);
    add_sinks(c.params, c.output(), c.row, inverse_sum, lse);
    store_rows(c.params, c.output(), c.row, tile.softmax, lse);
    tile.operands.scale_normalisation(inverse_sum, last_v);
    if constexpr (Consumer::kBiased) tile.bias.scale_normalisation(inverse_sum);
  }
  // When O is there.
  template <class Consumer, class Tile, class Store>
  __device__ __forceinline__ void finish(const Consumer&, Tile& tile, float (&inverse_sum)[2],
                                         float (&)[2], const Store& store) {
    tile.softmax.scale_rows(tile.output, inverse_sum);
    store();
  }
};

// Key tiles of a work tile, from one warpgroup's point of view.
struct KeyTileRanges {
  TileMask::Range loaded;    // for the block: each of them is to be released
  TileMask::Range seen;      // by this warpgroup's queries, or one that they do not see
  TileMask::Range unmasked;  // no mask runs through them
};

}  // namespace flash3::cuda::sm90
