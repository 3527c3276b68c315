// SPDX-License-Identifier: Apache-2.0
// The gradients of what is added to scores: dS, computed again tile by tile and summed in registers
// over all that one element was added to. So a sum needs no atomics, is always in one order, and
// takes no memory of dS's size; the main kernel knows nothing of it.
//
//   S = Q·Kᵀ, dP = dOut·Vᵀ;  P = exp2(S' − lse);  sum += P ∘ (dP − delta)
//
// A block sums tiles of one place, or, for gradients by distance, of one diagonal. One thread of
// the producer finds the tiles that are seen and loads them; a warpgroup has 64 queries.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/sm90/backward/bias_gradient_params.h"
#include "cuda/sm90/backward/store_gradient.cuh"
#include "cuda/sm90/device/pipeline.cuh"
#include "cuda/sm90/device/seen_keys.cuh"
#include "cuda/sm90/device/tile.cuh"

namespace flash3::cuda::sm90 {

// One tile of the sum.
struct SummedTile {
  ListedSequence sequence;
  int head, query, key;  // the tile's first
  MaskTile listed;
  bool valid;  // false: there are no more
};

template <int kDim, Element kElement_>
struct BiasGradientTraits {
  static constexpr Element kElement = kElement_;
  static constexpr int kWarpgroups = kDim > 128 ? 1 : 2;
  static constexpr int kTileM = 64 * kWarpgroups, kTileN = 64, kStages = kDim > 128 ? 1 : 2;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr bool kMovesRegisters = kWarpgroups == 2;  // to the consumers
  static constexpr int kKeyTilesOfQueryTile = kTileM / kTileN;
  using QTile = SharedTile<64, kDim>;  // a warpgroup's
  using KTile = SharedTile<kTileN, kDim>;
  using State = PipelineState<kStages>;

  struct Shared {
    uint8_t q[kStages][kWarpgroups][QTile::kBytes];
    uint8_t dout[kStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][KTile::kBytes];
    float sums[kTileM][kTileN + 1];
    float lse[kStages][kTileM];  // base 2
    float delta[kStages][kTileM];
    SummedTile tiles[kStages];
    RingBarriers<kStages> barriers;
  };
};

// ---- which tiles ----

// A block's place: of pairs, the key tile, the query tile, and the batch element and head of the
// result (of packed queries with rows, the sequence and the head); of diagonals, the diagonal, the
// head and the sequence.
struct SumPlace {
  int x, y, z;

  __device__ __forceinline__ explicit SumPlace(const BiasGradientParams& params)
      : x(int(blockIdx.x % params.blocks_x)),
        y(int(blockIdx.x / params.blocks_x % params.blocks_y)),
        z(int(blockIdx.x / params.blocks_x / params.blocks_y)) {}
};

__device__ __forceinline__ ListedSequence sequence_at(const BiasGradientParams& params, int i) {
  if (params.sequences.rows != nullptr) return params.sequences.rows[i];
  ListedSequence s = params.one_length;
  s.batch = i;
  return s;
}

// Whether some query of the tile sees some key, and what a mask's list has of its block.
template <class Traits>
__device__ __forceinline__ bool is_seen(const BiasGradientParams& params, SummedTile& tile) {
  const ListedSequence& s = tile.sequence;
  if (tile.query >= s.q_length || tile.key >= s.k_length) return false;
  const auto mask = TileMask::make(s.q_length, s.k_length, params.rule);
  const TileMask::Range rows = {tile.query, min(tile.query + Traits::kTileM, s.q_length)};
  const TileMask::Range keys = mask.key_tiles(rows, s.k_length, Traits::kTileN);
  const int n = tile.key / Traits::kTileN;
  if (n < keys.begin || n >= keys.end) return false;
  if (!params.lists) return true;
  const MaskList list = *params.mask.list(s.batch, tile.head, tile.query / kMaskBlock);
  const int block = tile.key / kMaskBlock;
  int first = 0, last = list.count;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (params.mask.blocks[list.begin + middle].block() < block)
      first = middle + 1;
    else
      last = middle;
  }
  if (first == list.count) return false;
  const MaskBlock found = params.mask.blocks[list.begin + first];
  if (found.block() != block) return false;
  tile.listed = MaskTile::of<kMaskBlock / Traits::kTileN>(found, n % (kMaskBlock / Traits::kTileN));
  return true;
}

// Calls visit(tile) for each tile of the block's sum that is seen.
template <class Traits, bool kDiagonals, class Visit>
__device__ __forceinline__ void for_each_tile(const BiasGradientParams& params,
                                              const Visit& visit) {
  const auto visit_if_seen = [&](const ListedSequence& s, int head, int m, int n) {
    SummedTile tile{s, head, m * Traits::kTileM, n * Traits::kTileN, {}, true};
    if (is_seen<Traits>(params, tile)) visit(tile);
  };
  constexpr int kRatio = Traits::kKeyTilesOfQueryTile;
  const SumPlace at(params);
  // One of them, or all; none where there is nothing to load.
  const auto sequences_from = [&](bool all, int one) {
    return TileMask::Range{all ? 0 : one, all ? params.batch : min(one + 1, params.batch)};
  };
  if constexpr (kDiagonals) {
    const DiagonalSums& sums = params.diagonals;
    const int diagonal = sums.first + at.x, head = at.y;
    const TileMask::Range sequences = sequences_from(sums.sequences == 1, at.z);
    for (int i = sequences.begin; i < sequences.end; ++i) {
      const ListedSequence s = sequence_at(params, i);
      const int first = ceil_div(max(-diagonal, 0), kRatio);
      for (int m = first; m < params.m_tiles; ++m) visit_if_seen(s, head, m, diagonal + kRatio * m);
    }
  } else {
    const PairGradient& pairs = params.pairs;
    const int n = at.x, out_head = at.z % pairs.heads, out = at.z / pairs.heads;
    TileMask::Range sequences = sequences_from(pairs.sums_batch, out);
    if (params.parts.parts > 1) {
      const int each = params.parts.sequences;
      sequences = {out * each, min((out + 1) * each, params.batch)};
    }
    for (int i = sequences.begin; i < sequences.end; ++i) {
      const ListedSequence s = sequence_at(params, i);
      for (int h = pairs.sums_heads ? 0 : out_head;
           h < (pairs.sums_heads ? params.heads_q : out_head + 1); ++h)
        for (int m = pairs.sums_rows ? 0 : at.y; m < (pairs.sums_rows ? params.m_tiles : at.y + 1);
             ++m)
          visit_if_seen(s, h, m, n);
    }
  }
}

// ---- the producer, one thread ----

template <class Traits, bool kDiagonals>
__device__ __forceinline__ void load_tiles(const BiasGradientParams& params,
                                           typename Traits::Shared& shared) {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  typename Traits::State state;
  const auto next_stage = [&] {
    wait(&shared.barriers.empty[state.stage], state.phase ^ 1, "bias_gradient_empty");
    return state.stage;
  };
  for_each_tile<Traits, kDiagonals>(params, [&](const SummedTile& tile) {
    const int stage = next_stage();
    shared.tiles[stage] = tile;
    uint64_t* const full = &shared.barriers.full[stage];
    const ListedSequence& s = tile.sequence;
    // The workspace has whole tiles of the main kernel.
    const QueryTiles& at = params.query_tiles;
    const int64_t statistics =
        (int64_t(at.first(s.batch, s.q_first)) + int64_t(tile.head) * at.tiles) * at.tile_m +
        tile.query;
    const int bytes =
        4 * min(Traits::kTileM, ceil_div(s.q_length, at.tile_m) * at.tile_m - tile.query);
    arrive_expect_bytes(full, 2 * (Traits::kWarpgroups * QTile::kBytes + KTile::kBytes + bytes));
    bulk_load(shared.lse[stage], params.lse_log2 + statistics, bytes, full);
    bulk_load(shared.delta[stage], params.delta + statistics, bytes, full);
    const auto rows = [&](const RowMap& map, int row, int head) {
      return box_at(map, s.batch, s.q_first, s.q_length, row, head);
    };
    const auto keys = [&](const RowMap& map) {
      return box_at(map, s.batch, s.k_first, s.k_length, tile.key,
                    tile.head / params.heads_per_kv_head);
    };
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const int row = tile.query + 64 * w;
      load_box<QTile>(shared.q[stage][w], &params.q, rows(params.q_rows, row, tile.head), full);
      load_box<QTile>(shared.dout[stage][w], &params.dout, rows(params.dout_rows, row, tile.head),
                      full);
    }
    load_box<KTile>(shared.k[stage], &params.k, keys(params.k_rows), full);
    load_box<KTile>(shared.v[stage], &params.v, keys(params.v_rows), full);
    state.advance();
  });
  const int stage = next_stage();
  shared.tiles[stage].valid = false;
  arrive(&shared.barriers.full[stage]);
}

// ---- a consumer warpgroup ----

template <class Traits>
struct TileSum {
  using View = QueriesByKeys<Traits::kTileN / 2>;
  using Scores = typename View::Scores;

  const BiasGradientParams& params;
  typename Traits::Shared& shared;
  const int warpgroup, thread = thread_in_warpgroup();
  const int row = 64 * warpgroup + thread / 32 * 16 + thread % 32 / 4;  // and 8 further

  // Of a thread's two rows; +∞ and 0 of those that do not exist.
  struct RowStatistics {
    float lse[2], delta[2];
  };
  __device__ __forceinline__ RowStatistics statistics_of(const SummedTile& tile, int stage) const {
    RowStatistics of;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = tile.query + row + 8 * r < tile.sequence.q_length;
      of.lse[r] = exists ? shared.lse[stage][row + 8 * r] : kInfinity;
      of.delta[r] = exists ? shared.delta[stage][row + 8 * r] : 0.f;
    }
    return of;
  }

  __device__ __forceinline__ View view_of(const SummedTile& tile) const {
    return {tile.query + row, tile.key + thread % 4 * 2};
  }

  // What a tile's scores get, if it is the same for all tiles of the block: they have one place, or
  // lie on one diagonal, and no sequence has terms of its own.
  Scores same_terms;

  __device__ __forceinline__ void read_same_terms(const SummedTile& tile, const View& view) {
#pragma unroll
    for (float& x : same_terms) x = 0.f;
    add_bias(HeadBias(params.biased, tile.sequence, tile.head, params.rule), view, same_terms);
  }

  __device__ __forceinline__ void make_values(const SummedTile& tile, const View& view,
                                              Scores& r_s) const {
    const BiasParams& biased = params.biased;
    if (biased.bias.capped) {
      const ModOf<ScoreKind::kSoftcap> cap{params.softcap};
      remap_tile(cap, r_s);
#pragma unroll
      for (float& s : r_s) s = cap.value(s);
    }
    if (params.same_terms) {
#pragma unroll
      for (int i = 0; i < Traits::kTileN / 2; ++i)
        r_s[i] = fmaf(r_s[i], biased.scale_log2, same_terms[i]);
    } else {
      add_bias(HeadBias(biased, tile.sequence, tile.head, params.rule), view, r_s);
    }
  }

  __device__ __forceinline__ void mask(const SummedTile& tile, const View& view,
                                       Scores& r_s) const {
    const ListedSequence& s = tile.sequence;
    if (params.lists) {
      // A block of the mask has 128 queries, of which a tile may be a half.
      const int first = tile.query / kMaskBlock * kMaskBlock, in_block = tile.query - first + row;
      const int half = in_block / 64;
      const RowsOfMask rows(params.mask, s.batch, tile.head, first, in_block, 128 * half + thread);
      SeenKeys seen;
      seen.read<Traits::kTileN>(params.mask, rows, tile.listed, half);
      if (seen.masked) seen.apply(view, r_s);
      return;
    }
    const auto whole = TileMask::make(s.q_length, s.k_length, params.rule);
    const RowKeys own[2] = {keys_of_row<true>(whole, s.k_length, view.row(0)),
                            keys_of_row<true>(whole, s.k_length, view.row(1))};
    const auto sees_all = [&](const RowKeys& row) {
      return row.first <= view.key(0) && row.end > view.key(View::kKeys - 1);
    };
    if (__all_sync(~0u, sees_all(own[0]) && sees_all(own[1]))) return;
    const auto rows = [&](int r) { return own[r]; };
    RangeMask<decltype(rows)>{rows}.apply(view, r_s);
  }

  // Adds dS of the tile.
  __device__ __forceinline__ void add(const SummedTile& tile, int stage, Scores& r_sum) {
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    Scores r_s, r_dp;
    issue_abt<Traits::kElement, QTile, KTile>(
        r_s, descriptor(QTile::kMajorK, shared.q[stage][warpgroup]),
        descriptor(KTile::kMajorK, shared.k[stage]));
    issue_abt<Traits::kElement, QTile, KTile>(
        r_dp, descriptor(QTile::kMajorK, shared.dout[stage][warpgroup]),
        descriptor(KTile::kMajorK, shared.v[stage]));
    const RowStatistics of = statistics_of(tile, stage);
    wgmma_wait<0>();
    fence_operand(r_s);
    fence_operand(r_dp);
    const View view = view_of(tile);
    make_values(tile, view, r_s);
    mask(tile, view, r_s);
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 2; ++i)
      r_s[i] = exp2_approx(r_s[i] - of.lse[View::row_of(i)]);
    const DroppedWeights& dropped = params.biased.dropped;
    if (dropped.threshold != 0) {
      const HeadDropout dropout(dropped, tile.sequence.batch * params.heads_q + tile.head);
#pragma unroll
      for (float& x : r_dp) x *= dropped.scale;
      DropoutWords<View> words;
      words.draw(dropout, view);
      words.drop(dropout, r_dp);
    }
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 2; ++i)
      r_sum[i] = fmaf(r_s[i], r_dp[i] - of.delta[View::row_of(i)], r_sum[i]);
  }

  __device__ __forceinline__ void run(Scores& r_sum) {
    typename Traits::State state;
    bool is_first = true;
    for (;; state.advance()) {
      wait(&shared.barriers.full[state.stage], state.phase, "bias_gradient_full");
      const SummedTile& tile = shared.tiles[state.stage];
      if (!tile.valid) return;
      if (params.same_terms && is_first) read_same_terms(tile, view_of(tile));
      is_first = false;
      add(tile, state.stage, r_sum);
      arrive(&shared.barriers.empty[state.stage]);
    }
  }

  // ---- what becomes of the sums ----

  __device__ __forceinline__ void sync_consumers() const {
    named_barrier_sync(1, 128 * Traits::kWarpgroups);
  }
  __device__ __forceinline__ void share(const Scores& r_sum) {
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 2; ++i)
      shared.sums[row + View::row_offset(View::row_of(i))]
                 [thread % 4 * 2 + View::key_offset(View::key_of(i))] = r_sum[i];
    sync_consumers();
  }

  // Neighbouring threads store neighbouring keys.
  __device__ __forceinline__ void store_pairs() const {
    const PairGradient& to = params.pairs;
    const SumPlace at(params);
    const int own = 128 * warpgroup + thread, threads = 128 * Traits::kWarpgroups;
    // Sequences of a ragged batch are listed in another order, and rows of packed ones follow
    // each other.
    const int out = at.z / to.heads, head = at.z % to.heads;
    ListedSequence s{};
    s.batch = out;
    if (!to.sums_batch && out < params.batch) s = sequence_at(params, out);
    const long long first = (to.batch > 1 ? s.batch : 0) * to.stride_batch + head * to.stride_head +
                            (to.by_sequence ? s.q_first * to.stride_row : 0);
    const int key = at.x * Traits::kTileN;
    if (to.sums_rows) {
      if (own >= Traits::kTileN || key + own >= to.keys) return;
      float sum = 0.f;
      for (int i = 0; i < Traits::kTileM; ++i) sum += shared.sums[i][own];
      store_gradient(to, first + (key + own) * to.stride_key, sum);
      return;
    }
    const int query = at.y * Traits::kTileM, rows = to.by_sequence ? s.q_length : to.rows;
    for (int i = own / Traits::kTileN; i < Traits::kTileM; i += threads / Traits::kTileN) {
      const int j = own % Traits::kTileN;
      if (query + i < rows && key + j < to.keys)
        store_gradient(to, first + (query + i) * to.stride_row + (key + j) * to.stride_key,
                       shared.sums[i][j]);
    }
  }

  // Sums of the tile's diagonals, from the one of its last query and first key on.
  __device__ __forceinline__ void store_diagonals() const {
    const DiagonalSums& to = params.diagonals;
    const SumPlace at(params);
    float* const window =
        to.data +
        ((int64_t(at.z) * params.heads_q + at.y) * to.diagonals + at.x) * DiagonalSums::kWindow;
    for (int d = 128 * warpgroup + thread; d < DiagonalSums::kWindow;
         d += 128 * Traits::kWarpgroups) {
      const int offset = d - (Traits::kTileM - 1);  // j − i
      float sum = 0.f;
      for (int i = max(0, -offset); i < min(Traits::kTileM, Traits::kTileN - offset); ++i)
        sum += shared.sums[i][i + offset];
      window[d] = sum;
    }
  }
};

template <int kDim, Element kElement, bool kDiagonals>
__global__ void __launch_bounds__(BiasGradientTraits<kDim, kElement>::kThreads, 1)
    bias_gradient_kernel_of_block(const __grid_constant__ BiasGradientParams params) {
  using Traits = BiasGradientTraits<kDim, kElement>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.barriers.init(128 * Traits::kWarpgroups);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = warpgroup_index();
  if (warpgroup == Traits::kWarpgroups) {
    if constexpr (Traits::kMovesRegisters) release_registers<40>();
    if (threadIdx.x % 128 == 0) load_tiles<Traits, kDiagonals>(params, shared);
    return;
  }
  if constexpr (Traits::kMovesRegisters) acquire_registers<232>();
  TileSum<Traits> sum{params, shared, warpgroup};
  typename TileSum<Traits>::Scores r_sum = {};
  sum.run(r_sum);
  sum.share(r_sum);
  if constexpr (kDiagonals)
    sum.store_diagonals();
  else
    sum.store_pairs();
}

}  // namespace flash3::cuda::sm90
