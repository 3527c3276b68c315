// SPDX-License-Identifier: Apache-2.0
// The producer: three threads, each with one stream of TMA loads, each as far ahead of the
// consumers as its buffer allows.
#pragma once

#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/traits.cuh"

namespace flash3::cuda::sm90 {

enum class ProducerWarp : int { kLoadQ = 0, kLoadK = 1, kLoadV = 2, kSchedule = 3 };

// Q rows of warpgroup w: as they lie in the sequence, or those of the slots.
template <class Traits>
__device__ __forceinline__ void load_query_rows(const ForwardParams& params, const WorkTile& work,
                                                const ListedSequence* slots, uint8_t* shared, int w,
                                                uint64_t* full) {
  using Tile = typename Traits::QTile;
  const int slot_rows = params.schedule.slot_rows;
  const int head = work.head_group * params.pack.heads;
  const auto load = [&](const ListedSequence& s, int row, int at_row) {
    load_box<Tile>(shared + at_row * Tile::kRowBytes, &params.q,
                   box_at(params.q_rows, s.batch, s.q_first, s.q_length, row, head), full);
  };
  if (slot_rows == 0) {
    arrive_expect_bytes(full, params.pack.rows() * (Tile::kCols * 2));
    load(work.sequence, work.query + w * params.pack.queries, 0);
  } else {
    arrive_expect_bytes(full, Tile::kBytes);
    const ListedSequence* own = slots + w * Tile::kRows / slot_rows;
    for (int row = 0; row < Tile::kRows; row += slot_rows) load(*own++, 0, row);
  }
}

// What comes beside Q's tiles: nothing, or those of a bias (tile_bias.cuh).
template <class Traits, bool kTiles = Traits::kConfig.bias_tiles()>
struct BiasLoader {
  __device__ __forceinline__ void load(const ForwardParams&, typename Traits::Shared&,
                                       const WorkTile&) const {}
};

// Q: each warpgroup's rows as soon as that warpgroup has stored its previous output, which lies in
// the same place.
template <class Traits>
__device__ __forceinline__ void load_q(const ForwardParams& params,
                                       typename Traits::Shared& shared) {
  TileReader tiles{shared.tiles};
  prefetch(&params.q);
  typename Traits::QState state;
  BiasLoader<Traits> bias;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    if (!work.has_keys()) continue;
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      auto& barriers = shared.q_barriers[w];
      wait(&barriers.empty[state.stage], state.phase ^ 1, "q_empty");
      load_query_rows<Traits>(params, work, tiles.slots(), shared.q[state.stage][w], w,
                              &barriers.full[state.stage]);
    }
    bias.load(params, shared, work);
    state.advance();
  }
}

// Key tile n of K or V.
template <class Traits, class Tile>
__device__ __forceinline__ void load_key_tile(const ForwardParams& params, const WorkTile& work,
                                              const ListedSequence* slots, int n,
                                              const TensorMap* map, const RowMap& rows,
                                              uint8_t* shared, uint64_t* full) {
  const int head = work.head_group / params.groups_per_kv_head,
            slot_rows = params.schedule.slot_rows;
  const auto load = [&](const ListedSequence& s, int row, int at_row) {
    load_box<Tile>(shared + at_row * Tile::kRowBytes, map,
                   box_at(rows, s.batch, s.k_first, s.k_length, row, head), full);
  };
  arrive_expect_bytes(full, Tile::kBytes);
  if (slot_rows == 0) {
    load(work.sequence, n * Tile::kRows, 0);
  } else {
    const ListedSequence* own = slots + (n * Tile::kRows - work.query) / slot_rows;
    for (int row = 0; row < Tile::kRows; row += slot_rows) load(*own++, 0, row);
  }
}

// K or V: the key tiles of each work tile from the last to the first. When few of them are left to
// load, `wanted`, if given, asks the scheduler for the next work tile. loaded: of V, whose hidden
// keys are cleared; those of K only make scores that the mask hides.
template <class Traits, class Tile>
__device__ __forceinline__ void load_key_tiles(const ForwardParams& params, const TensorMap* map,
                                               const RowMap& rows,
                                               uint8_t (&stages)[Traits::kStages][Tile::kBytes],
                                               RingBarriers<Traits::kStages>& barriers,
                                               const char* empty, TileRing& ring, uint64_t* wanted,
                                               uint64_t* loaded) {
  TileReader tiles{ring};
  prefetch(map);
  typename Traits::KvState state;
  uint32_t loaded_phase = 0;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    const int begin = work.key_tile_begin, end = work.key_tile_end, ask = ask_at(work);
    if (wanted != nullptr && !work.has_keys()) arrive(wanted);
    for (int n = end - 1; n >= begin; --n) {
      wait(&barriers.empty[state.stage], state.phase ^ 1, empty);
      uint64_t* const full = &barriers.full[state.stage];
      const bool may_hide =
          Traits::kBand && loaded != nullptr && params.schedule.may_hide_keys && n == begin;
      const int hidden = may_hide ? work.hidden_keys(Tile::kRows) : 0;
      load_key_tile<Traits, Tile>(params, work, tiles.slots(), n, map, rows, stages[state.stage],
                                  hidden > 0 ? loaded : full);
      if (hidden > 0) {
        clear_when_loaded<Tile>(stages[state.stage], hidden, loaded, loaded_phase, full);
        loaded_phase ^= 1;
      }
      state.advance();
      if (wanted != nullptr && n == ask) arrive(wanted);
    }
  }
}

// Whatever loads.
template <class Traits>
struct TmaBarriers {
  static constexpr int kTileReaders = 3;

  static __device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
    for (auto& barriers : shared.q_barriers) barriers.init(4);  // each warp
    shared.k_barriers.init(4 * Traits::kWarpgroups);            // each consumer warp
    shared.v_barriers.init(4 * Traits::kWarpgroups);
    if constexpr (Traits::kConfig.bias_tiles())
      for (auto& barriers : shared.bias_barriers) barriers.init(4);
  }
};

// The producer of 16-bit kernels: Q, K and V come by TMA. load_pages.cuh has that of paged ones,
// load_lists.cuh that of those that walk lists.
template <class Traits, bool kPaged = Traits::kConfig.paged, bool kLists = Traits::kLists>
struct TmaProducer;

template <class Traits>
struct TmaProducer<Traits, false, false> : TmaBarriers<Traits> {
  // Under a softcap ptxas then names the consumers' registers anew, and spills some at d 128.
  static constexpr bool kElects = Traits::kScore == ScoreKind::kPlain;

  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const ProducerWarp role{warp_in_warpgroup()};
    if (role == ProducerWarp::kSchedule) {
      schedule_tiles<Traits::kTileN, Traits::kBand>(params.schedule, shared.tiles);
    } else if (kElects ? elect_one() : threadIdx.x % 32 == 0) {
      if (role == ProducerWarp::kLoadQ) load_q<Traits>(params, shared);
      if (role == ProducerWarp::kLoadK)
        load_key_tiles<Traits, typename Traits::KTile>(params, &params.k, params.k_rows, shared.k,
                                                       shared.k_barriers, "k_empty", shared.tiles,
                                                       &shared.tiles.wanted, nullptr);
      if (role == ProducerWarp::kLoadV)
        load_key_tiles<Traits, typename Traits::VTile>(params, &params.v, params.v_rows, shared.v,
                                                       shared.v_barriers, "v_empty", shared.tiles,
                                                       nullptr, &shared.v_loaded);
    }
  }
};

}  // namespace flash3::cuda::sm90
