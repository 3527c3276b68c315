// SPDX-License-Identifier: Apache-2.0
// The producer: one thread issues all TMA loads, as far ahead of the consumers as the buffers
// allow. What an element stands for travels beside the tile: Q's scale with each warpgroup's rows,
// K's and V's with K's tile.
//
// V for the tensor cores. An FP8 product reads both operands along the reduction, and P·V reduces
// over keys, but V's rows are along its head dim: two warps of the producer transpose each tile,
// [keys, dims] into [dims, keys], while the consumers work on those before.
//
// A warp takes 32 keys × 16 dims at a time. ldmatrix with .trans hands out 16-bit pairs, two dims
// of one key: of eight keys × eight pairs, lane l has pair l / 4 of keys 2c and 2c + 1, c = l % 4.
// A byte permute of two such matrices, keys 0…7 and 8…15, parts the pair:
//
//   matrix 0   d0 d1 | d0 d1     keys 2c, 2c + 1          ┐    d0 d0 d0 d0    row of dim d0
//   matrix 1   d0 d1 | d0 d1     keys 8 + 2c, 8 + 2c + 1  ┘ ►  d1 d1 d1 d1    row of dim d1
//
// and stmatrix writes bytes 4c…4c + 3 of 16 keys' place in a row. So within 16 keys the order is
//
//   place 4c + i   holds key   2c, 2c + 1, 8 + 2c, 8 + 2c + 1   for i = 0…3
//
// which is the order in which a thread has the scores of a row (device/tile.cuh): P needs no
// exchange between threads to become the other operand. And within 16 dims the even ones come
// first, then the odd ones, so that stmatrix has no bank conflicts, and so that a thread ends up
// with four neighbouring columns of the output:
//
//   row 16·i + p   is dim   16·i + 2p        row 16·i + 8 + p   is dim   16·i + 2p + 1
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/traits_fp8.cuh"

namespace flash3::cuda::sm90 {

inline constexpr int kTransposeThreads = 64;

// A patch of 32 keys × 16 dims, as stmatrix takes it.
struct Patch {
  uint32_t r[4];
};
__device__ __forceinline__ Patch permuted(const uint32_t (&loaded)[4]) {
  constexpr uint32_t kFirst = 0x6420, kSecond = 0x7531;  // of each pair
  return {__byte_perm(loaded[0], loaded[1], kFirst), __byte_perm(loaded[0], loaded[1], kSecond),
          __byte_perm(loaded[2], loaded[3], kFirst), __byte_perm(loaded[2], loaded[3], kSecond)};
}
__device__ __forceinline__ void store(uint32_t to, const Patch& patch) {
  stmatrix_x4(to, patch.r[0], patch.r[1], patch.r[2], patch.r[3]);
}

// A part of a tile, the keys from first_key on. Each warp transposes every other 16 dims. Addresses
// are those of offset(), without a register for each: the swizzle flips bits of them.
template <class Traits>
__device__ __forceinline__ void transpose_part(uint32_t raw, uint32_t transposed, int first_key,
                                               int thread) {
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  constexpr int kKeys = RawVTile::kRows;
  constexpr int kBothWarps = 16 * (kTransposeThreads / 32);
  static_assert(RawVTile::kCols % kBothWarps == 0 && kKeys % 32 == 0);
  // Patches on their way together: their loads are all issued before the first is stored.
  constexpr int kRegisters = Traits::kConfig.producer_registers();
  constexpr int kPatches = kRegisters == 32 ? 1 : kKeys % 96 == 0 ? 3 : kKeys % 64 == 0 ? 2 : 1;
  // Few registers do not hold the addresses of several dims, nor of many keys.
  constexpr int kUnrolledDims =
      kRegisters < 32 || Traits::kRawParts > 1 ? 1 : RawVTile::kCols / kBothWarps;
  const int lane = thread % 32, first_dim = thread / 32 * 16;
  raw += RawVTile::offset(lane, first_dim);
  // Matrices of stmatrix: the first and second dims of 16 keys, then of the next 16.
  transposed += VTile::offset(first_dim + lane % 16, lane / 16 * 16);
#pragma unroll kUnrolledDims
  for (int dim = 0; dim < RawVTile::kCols; dim += kBothWarps) {
    const uint32_t from =
        (raw ^ uint32_t(dim % RawVTile::kChunk)) + dim / RawVTile::kChunk * RawVTile::kChunkBytes;
#pragma unroll
    for (int key = 0; key < kKeys; key += 32 * kPatches) {
      uint32_t r[kPatches][4];
#pragma unroll
      for (int i = 0; i < kPatches; ++i)
        ldmatrix_x4_transposed(from + (key + i * 32) * RawVTile::kRowBytes, r[i]);
#pragma unroll
      for (int i = 0; i < kPatches; ++i) {
        const int at = first_key + key + i * 32;
        store((transposed ^ uint32_t(at % VTile::kChunk)) +
                  at / VTile::kChunk * VTile::kChunkBytes + dim * VTile::kRowBytes,
              permuted(r[i]));
      }
    }
  }
}

// A part of V in its stage, which lies `from` bytes after the first one, raw. base: of shared
// memory. transpose_ahead.cuh has what warps do where a tile's part has the same stage each time.
template <class Traits, bool kAhead = Traits::kTransposesAhead>
struct PartOfV;
template <class Traits>
struct PartOfV<Traits, false> {
  static __device__ __forceinline__ void transpose(uint32_t base, uint32_t raw, int from,
                                                   uint32_t transposed, int first_key, int thread) {
    transpose_part<Traits>(raw + from, transposed, first_key, thread);
  }
};

// By kTransposeThreads.
template <class Traits>
__device__ __forceinline__ void transpose_v(typename Traits::Shared& shared, int thread) {
  using RawVTile = typename Traits::RawVTile;
  using VTile = typename Traits::VTile;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(&shared)),
                 raw = uint32_t(__cvta_generic_to_shared(shared.raw_v)),
                 transposed = uint32_t(__cvta_generic_to_shared(shared.v));
  TileReader tiles{shared.tiles};
  // One state for both rings, to spare registers: where tiles come in parts, a part is always in
  // the same stage, and of two stages of tiles the number is the phase of those.
  constexpr bool kInParts = Traits::kRawParts > 1;
  static_assert(kInParts ? Traits::kStages == 2 && Traits::kRawStages == Traits::kRawParts
                         : Traits::kRawStages == Traits::kStages);
  typename Traits::KvState to;
  while (uniform(tiles.next())) {
    int key_tiles = uniform(tiles.tile().key_tile_end - tiles.tile().key_tile_begin);
    tiles.release();
#pragma unroll 1
    for (; key_tiles > 0; --key_tiles) {
#pragma unroll
      for (int part = 0; part < Traits::kRawParts; ++part) {
        const typename Traits::RawState from{kInParts ? part : to.stage,
                                             kInParts ? uint32_t(to.stage) : to.phase};
        wait(&shared.raw_v_barriers.full[from.stage], from.phase, "raw_v_full");
        if (part == 0) wait(&shared.v_barriers.empty[to.stage], to.phase ^ 1, "v_empty");
        const uint32_t to_stage = transposed + to.stage * VTile::kBytes;
        const int first_key = part * RawVTile::kRows;
        PartOfV<Traits>::transpose(base, raw, from.stage * RawVTile::kBytes, to_stage, first_key,
                                   thread);
        arrive(&shared.raw_v_barriers.empty[from.stage]);
      }
      fence_shared_for_async_proxy();
      arrive(&shared.v_barriers.full[to.stage]);
      to.advance();
    }
  }
}

// ---- loads ----

// One thread loads everything, and two warps transpose V.
enum class Fp8ProducerWarp : int { kLoad = 0, kSchedule = 1, kTranspose = 2 };

// Starts to copy the scale of a block into shared memory.
__device__ __forceinline__ void copy_scale(float* shared, const RowScales& scales, int block) {
  if (scales.first) {
    copy_async(shared, scales.first + block * scales.stride);
  } else {
    *shared = 1.f;
  }
}

// Q rows of every warpgroup.
template <class Traits>
__device__ __forceinline__ void load_fp8_q(const ForwardParams& params,
                                           typename Traits::Shared& shared, const WorkTile& work,
                                           const typename Traits::QState& state) {
  using Tile = typename Traits::QTile;
  const ListedSequence& s = work.sequence;
  const RowScales scales = row_scales(fp8_params(params).q_scale, fp8_params(params).q_packed,
                                      s.q_first, s.batch, work.head_group);
#pragma unroll 1
  for (int w = 0; w < Traits::kWarpgroups; ++w) {
    auto& barriers = shared.q_barriers[w];
    uint64_t* full = &barriers.full[state.stage];
    const int row = work.query + w * kWarpgroupRows;
    wait(&barriers.empty[state.stage], state.phase ^ 1, "q_empty");
    load_box<Tile>(shared.q[state.stage][w], &params.q,
                   box_at(params.q_rows, s.batch, s.q_first, s.q_length, row, work.head_group),
                   full);
    // Rows after the end have no scale; any does for them.
    copy_scale(shared.q_scales[state.stage][w], scales,
               min(row, s.q_length - 1) / int(kScaleBlock));
    arrive_behind_copies(full);
    arrive_expect_bytes(full, Tile::kBytes);
  }
}

// The key tiles of work tiles. load_fp8_lists.cuh has those of kernels that walk lists.
template <class Traits, bool kLists = Traits::kLists>
struct Fp8KeyTiles;
template <class Traits>
struct Fp8KeyTiles<Traits, false> {
  static __device__ __forceinline__ void schedule(const ForwardParams& params,
                                                  typename Traits::Shared& shared) {
    schedule_tiles<Traits::kTileN, Traits::kBand, false, true>(params.schedule, shared.tiles);
  }
  // Which one is the n-th, that goes to this stage.
  static __device__ __forceinline__ int find(const ForwardParams&, typename Traits::Shared&,
                                             const WorkTile&, int n, int) {
    return n;
  }
};

// Everything, by one thread. The key tiles of each work tile from the last to the first, K before
// V, and Q after the first K: where Q has one slot, the next Q waits for the last products of the
// tile before. When few key tiles are left to load, the scheduler is asked for the next work tile.
template <class Traits>
__device__ __forceinline__ void load_fp8(const ForwardParams& params,
                                         typename Traits::Shared& shared) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::RawVTile;
  TileReader tiles{shared.tiles};
  prefetch(&params.q);
  prefetch(&params.k);
  prefetch(&params.v);
  typename Traits::QState q_state;
  typename Traits::KvState k_state;
  typename Traits::RawState v_state;
  uint32_t loaded_phase = 0;
  for (; tiles.next(); tiles.release()) {
    const WorkTile& work = tiles.tile();
    if (!work.has_keys()) {
      arrive(&shared.tiles.wanted);
      continue;
    }
    const ListedSequence& s = work.sequence;
    const int first = work.key_tile_end - 1, ask = ask_at(work),
              head = work.head_group / params.groups_per_kv_head,
              last_block = (s.k_length - 1) / int(kScaleBlock);
    const auto scales_of = [&](const ScaleView& view) {
      return row_scales(view, fp8_params(params).k_packed, s.k_first, s.batch, head);
    };
    const RowScales k_scales = scales_of(fp8_params(params).k_scale),
                    v_scales = scales_of(fp8_params(params).v_scale);
    const bool hides =
        Traits::kBand && params.schedule.may_hide_keys && work.hidden_keys(Traits::kTileN) > 0;
    const int with_hidden_keys = hides ? work.key_tile_begin : -1;
#pragma unroll 1
    for (int n = first; n >= work.key_tile_begin; --n) {
      uint64_t* full = &shared.k_barriers.full[k_state.stage];
      wait(&shared.k_barriers.empty[k_state.stage], k_state.phase ^ 1, "k_empty");
      const int key_tile = Fp8KeyTiles<Traits>::find(params, shared, work, n, k_state.stage);
      load_box<KTile>(
          shared.k[k_state.stage], &params.k,
          box_at(params.k_rows, s.batch, s.k_first, s.k_length, key_tile * KTile::kRows, head),
          full);
      KeyTileScales& scales = shared.key_scales[k_state.phase][k_state.stage];
      const int block = min(key_tile * KTile::kRows / int(kScaleBlock), last_block);
      copy_scale(&scales.k, k_scales, block);
      copy_scale(&scales.v, v_scales, block);
      arrive_behind_copies(full);
      arrive_expect_bytes(full, KTile::kBytes);
      k_state.advance();
      if (n == first) {
        load_fp8_q<Traits>(params, shared, work, q_state);
        q_state.advance();
      }

#pragma unroll 1
      for (int first_key = 0; first_key < Traits::kTileN; first_key += VTile::kRows) {
        full = &shared.raw_v_barriers.full[v_state.stage];
        wait(&shared.raw_v_barriers.empty[v_state.stage], v_state.phase ^ 1, "raw_v_empty");
        uint8_t* const raw_v = shared.raw_v[v_state.stage];
        const auto load_v = [&](uint64_t* barrier) {
          arrive_expect_bytes(barrier, VTile::kBytes);
          load_box<VTile>(raw_v, &params.v,
                          box_at(params.v_rows, s.batch, s.k_first, s.k_length,
                                 key_tile * Traits::kTileN + first_key, head),
                          barrier);
        };
        const int hidden = Traits::kBand && n == with_hidden_keys
                               ? work.hidden_keys(Traits::kTileN) - first_key
                               : 0;
        if (hidden <= 0) {
          load_v(full);
        } else {
          load_v(&shared.v_loaded);
          clear_when_loaded<VTile>(raw_v, min(hidden, VTile::kRows), &shared.v_loaded, loaded_phase,
                                   full);
          loaded_phase ^= 1;
        }
        v_state.advance();
      }
      if (n == ask) arrive(&shared.tiles.wanted);
    }
  }
}

// Whatever loads.
template <class Traits>
struct Fp8Barriers {
  static constexpr int kTileReaders = 1 + kTransposeThreads;  // the loader, transposers

  static __device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
    // The copies of scales make an arrival of their own; those of rows one of each lane's.
    for (auto& barriers : shared.q_barriers) barriers.init(4, Traits::kRowScales ? 1 + 32 : 2);
    shared.k_barriers.init(4 * Traits::kWarpgroups, 2);
    shared.v_barriers.init(4 * Traits::kWarpgroups, kTransposeThreads);
    shared.raw_v_barriers.init(kTransposeThreads);
  }
};

// The producer of FP8 kernels. load_fp8_pages.cuh has that of paged ones.
template <class Traits, bool kPaged = Traits::kConfig.paged>
struct Fp8Producer;

template <class Traits>
struct Fp8Producer<Traits, false> : Fp8Barriers<Traits> {
  static __device__ __forceinline__ void run(const ForwardParams& params,
                                             typename Traits::Shared& shared) {
    const Fp8ProducerWarp role{warp_in_warpgroup()};
    if (role == Fp8ProducerWarp::kSchedule) {
      Fp8KeyTiles<Traits>::schedule(params, shared);
    } else if (role >= Fp8ProducerWarp::kTranspose) {
      transpose_v<Traits>(shared, int(threadIdx.x) - 32 * int(Fp8ProducerWarp::kTranspose));
    } else if (elect_one()) {
      load_fp8<Traits>(params, shared);
    }
  }
};

}  // namespace flash3::cuda::sm90
