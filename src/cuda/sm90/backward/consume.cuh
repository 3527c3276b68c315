// SPDX-License-Identifier: Apache-2.0
// The consumer: one warpgroup holds dK and dV of 64 keys in its registers and takes all queries of
// a tile at once. It computes scores transposed, keys × queries, so that P and dS come out of the
// tensor cores as they go back in: as the register operand of dV = Pᵀ·dOut and dK = dSᵀ·Q. dQ alone
// needs the keys of both warpgroups: dS goes through shared memory for it, and each computes its
// half. Per query tile i, in the order of issue
//
//   Sᵀ_i = K·Q_iᵀ, dPᵀ_i = V·dOut_iᵀ    asynchronous, as all products
//   wait Sᵀ_i; Pᵀ_i = exp2(Sᵀ_i − lse)
//   wait dPᵀ_i; dSᵀ_i = Pᵀ_i ∘ (dPᵀ_i − delta)
//   dS_i to shared memory
//   dV += Pᵀ_i·dOut_i
//   the warpgroups meet
//   dQ_i = dS_i·K, this warpgroup's half
//   dK += dSᵀ_i·Q_i
//   wait dQ_i; stage it for the thread that adds it to the sums in global memory (produce.cuh)
//   wait dK
//
// At d 64 dQ is last (Traits::kDqLast): dK is issued before the meeting, and dQ is handed over
// under Sᵀ and dPᵀ of the next tile.
//
// FlashAttention-2, alg. 2; FlashAttention-3, §3.1.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/sm90/backward/produce.cuh"
#include "cuda/sm90/backward/scores.cuh"
#include "cuda/sm90/backward/store.cuh"

namespace flash3::cuda::sm90 {

// Descriptors of what a warpgroup's products read. Rows of K and V are its own 64 keys.
template <class Traits>
struct Operands {
  Descriptor k_rows, v_rows, k_columns, q_rows, q_columns, dout_rows, dout_columns, ds_rows;

  __device__ __forceinline__ Operands(const typename Traits::Shared& shared, int k_slot,
                                      int warpgroup)
      : k_rows(descriptor(Traits::KTile::kMajorK, shared.k[k_slot]) +
               warpgroup * 64 * Traits::KTile::kRowBytes),
        v_rows(descriptor(Traits::VTile::kMajorK, shared.v) +
               warpgroup * 64 * Traits::VTile::kRowBytes),
        k_columns(descriptor(Traits::KTile::kMajorMN, shared.k[k_slot])),
        q_rows(descriptor(Traits::QTile::kMajorK, shared.q)),
        q_columns(descriptor(Traits::QTile::kMajorMN, shared.q)),
        dout_rows(descriptor(Traits::DoutTile::kMajorK, shared.dout)),
        dout_columns(descriptor(Traits::DoutTile::kMajorMN, shared.dout)),
        ds_rows(descriptor(Traits::DsTile::kMajorK, shared.ds)) {}
};

// Issues a warpgroup's half of dQ: half of the queries, or 64 of the columns, transposed where the
// queries are no M of a tensor core product. k: the columns of K; ds: the rows of dS.
template <class Traits>
__device__ __forceinline__ void issue_dq(float (&r_dq)[Traits::kOwnQuads * 4], Descriptor k,
                                         Descriptor ds, int warpgroup) {
  using KTile = typename Traits::KTile;
  using DsTile = typename Traits::DsTile;
  constexpr bool kByQueries = Traits::kHeadDim == 64;
  if constexpr (kByQueries) {
    ds = ds + warpgroup * Traits::kTileM / 2 * DsTile::kRowBytes;
  } else {
    // Columns after head_dim are read from beyond K, and nothing uses the result.
    static_assert(Traits::kConfig.dq_columns() == kConsumerWarpgroups * 64);
    k = k + warpgroup * (64 / KTile::kChunk) * KTile::kChunkBytes;
  }
  if constexpr (Traits::kConfig.dq_transposed()) {
    issue_transposed_dq<Traits::kElement, DsTile, KTile>(r_dq, k, ds);
  } else {
    issue_dq_block<Traits::kElement, DsTile, KTile>(r_dq, ds, k);
  }
}

// Makes Pᵀ and dSᵀ of masked scores, once dPᵀ is there.
template <class Traits, int N>
__device__ __forceinline__ void compute_ds(const Probabilities<Traits>& probabilities,
                                           typename Traits::Shared& shared, int stage, int thread,
                                           const KeysByQueries<N>& view, float (&r_s)[N],
                                           float (&r_dp)[N], uint32_t (&r_p)[N / 2],
                                           uint32_t (&r_ds)[N / 2]) {
  // Registers do not hold all of the LSE: it is loaded pair by pair.
  probabilities.compute(view, r_s, r_p,
                        [&](int pair) { return load_query_pair(shared.lse[stage], pair, thread); });
  // ptxas would move most exponentials after the wait, where dP does not cover them.
  if constexpr (Traits::kDqLast) order_before<N / 2>(r_s, &shared.never_written);
  // They hold half of delta, but not under a softcap: that half is loaded while dP runs.
  constexpr int kPairs = N / 4, kAhead = Traits::kFull ? 0 : kPairs / 2;
  float2 r_delta[kAhead + 1];
#pragma unroll
  for (int pair = 0; pair < kAhead; ++pair)
    r_delta[pair] = load_query_pair(shared.delta[stage], pair, thread);
  wgmma_wait<0>();  // dP
  fence_operand(r_dp);
  probabilities.subtract(r_dp, r_s, [&](int pair) {
    return pair < kAhead ? r_delta[pair] : load_query_pair(shared.delta[stage], pair, thread);
  });
  probabilities.round(r_s, r_p);
  pack_probabilities<Traits::kElement>(r_dp, r_ds);
}

// Waits until at most kPending products are under way, so that dV or dK is complete, and frees the
// stage of dOut or Q that it read. r_a: its operand in registers.
template <int kPending, int N, int M>
__device__ __forceinline__ void complete_gradient(float (&r)[N], uint32_t (&r_a)[M],
                                                  uint64_t* empty) {
  wgmma_wait<kPending>();
  fence_operand(r);
  fence_operand(r_a);
  arrive(empty);
}

// Hands the staged dQ to the thread that adds it.
template <class Traits>
__device__ __forceinline__ void hand_over_dq(typename Traits::Shared& shared, int warpgroup) {
  fence_shared_for_async_proxy();
  arrive(&shared.dq_full[warpgroup]);
}

// The same where dQ is last: dQ of the tile before, if there is one.
template <class Traits>
__device__ __forceinline__ void hand_over_last_dq(typename Traits::Shared& shared, int warpgroup,
                                                  bool staged) {
  fence_shared_for_async_proxy();
  arrive_if(staged, &shared.dq_full[warpgroup]);
}

// Waits for dQ of the block's step-th query tile, and stages it.
template <class Traits, int kPending>
__device__ __forceinline__ void finish_dq(typename Traits::Shared& shared,
                                          float (&r_dq)[Traits::kOwnQuads * 4], int step,
                                          int warpgroup, int late_warpgroup, int late_thread) {
  wgmma_wait<kPending>();
  fence_operand(r_dq);
  wait(&shared.dq_empty[late_warpgroup], SingleState::at(step).phase ^ 1, "dq_empty");
#pragma unroll
  for (int quad = 0; quad < Traits::kOwnQuads; ++quad) {
    store_shared(&shared.fragments[late_warpgroup * Traits::kOwnQuads + quad][late_thread],
                 &r_dq[4 * quad]);
  }
  if constexpr (!Traits::kDqLast) hand_over_dq<Traits>(shared, warpgroup);
}

template <class Traits>
__device__ __forceinline__ void accumulate(const BackwardParams& params,
                                           typename Traits::Shared& shared, const KeyTile& work,
                                           Walked& walked, int warpgroup) {
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  using DsTile = typename Traits::DsTile;
  constexpr Element kElement = Traits::kElement;
  constexpr int kTileM = Traits::kTileM;

  const int thread = thread_in_warpgroup();
  const auto [k_slot, k_phase] = Traits::KeyState::at(walked.key_tiles);
  KeysMask<Traits> mask(params, shared, work, warpgroup * kWarpgroupRows, thread);
  const Operands<Traits> operand(shared, k_slot, warpgroup);
  float r_dk[Traits::kHeadDim / 2] = {}, r_dv[Traits::kHeadDimV / 2] = {};
  const int tiles = query_steps<Traits>(params, work);
  int m = work.query_tile_begin;
  wait(&shared.k_barriers.full[k_slot], k_phase, "k_full");
  wait(&shared.v_full, SingleState::at(walked.key_tiles).phase, "v_full");
  const int end = walked.query_tiles + tiles;
  bool is_first = true;
#pragma unroll 1
  for (int& step = walked.query_tiles; step < end; ++step) {
    const auto [stage, phase] = QueryState::at(step);
    const int ds_stage = DsState::at(step).stage;
    float r_s[kTileM / 2], r_dp[kTileM / 2];
    wait(&shared.q_barriers.full[stage], phase, "q_full");
    if constexpr (Traits::kLists) {
      m = mask.query_tile(stage);
      if (!mask.sees_any()) {
        mask.pass_query_tile(walked, operand, step, is_first, step + 1 == end, warpgroup, thread);
        is_first = false;
        continue;
      }
    }
    issue_abt<kElement, KTile, QTile>(r_s, operand.k_rows, operand.q_rows + stage * QTile::kBytes);
    wait(&shared.dout_barriers.full[stage], phase, "dout_full");
    issue_abt<kElement, VTile, DoutTile>(r_dp, operand.v_rows,
                                         operand.dout_rows + stage * DoutTile::kBytes);
    if constexpr (Traits::kDqLast) hand_over_last_dq<Traits>(shared, warpgroup, !is_first);
    if constexpr (Traits::kLists) mask.read(hide_from_optimizer(thread));
    const auto view = mask.template view<kTileM / 2>(m * kTileM, thread);
    [[maybe_unused]] const int head =
        Traits::kBiased ? mask.head(params, work, step - end + tiles) : 0;
    Probabilities<Traits> probabilities(params, work, head, view);
    wgmma_wait<1>();  // S
    fence_operand(r_s);
    if constexpr (Traits::kPersistent) {
      if (is_first) wait_for_stored_keys<Traits>(shared, walked, warpgroup, thread);
    }
    uint32_t r_p[kTileM / 4], r_ds[kTileM / 4];
    probabilities.begin(view, r_s, r_p);
    if constexpr (Traits::kBiasTiles)
      PairTiles<Traits>{params, work, head}.add(view, shared.bias[stage], warpgroup, thread, r_s);
    mask.apply(r_s, m * kTileM, thread);
    compute_ds<Traits>(probabilities, shared, stage, thread, view, r_s, r_dp, r_p, r_ds);
    if constexpr (Traits::kPersistent) arrive_if(step + 1 == end, &shared.v_empty);
    // Under a softcap there are no registers for addresses that the compiler would compute early.
    const int late_thread = Traits::kFull ? hide_from_optimizer(thread) : thread,
              late_warpgroup = Traits::kFull ? hide_from_optimizer(warpgroup) : warpgroup;
    store_ds<DsTile>(shared.ds[ds_stage], r_ds, late_warpgroup, late_thread);
    const auto issue_dk = [&]() __attribute__((always_inline)) {
      issue_add_ab<kElement, QTile>(r_dk, r_ds, operand.q_columns + stage * QTile::kBytes);
    };
    // dV, and dK where dQ is last, run under the fence and the meeting; issued earlier they would
    // hold the stores up.
    issue_add_ab<kElement, DoutTile>(r_dv, r_p, operand.dout_columns + stage * DoutTile::kBytes);
    if constexpr (Traits::kDqLast) issue_dk();
    fence_shared_for_async_proxy();
    bool stores_ds = false;
    if constexpr (Traits::kBiasTiles) {
      stores_ds = PairTiles<Traits>{params, work, head}.stores(warpgroup, thread);
      if (stores_ds) tma_store_wait_read();  // of the dS before
    }
    mask.meet(walked, warpgroup);
    if constexpr (Traits::kBiasTiles)
      if (stores_ds) PairTiles<Traits>{params, work, head}.store(m * kTileM, shared.ds[ds_stage]);

    float r_dq[Traits::kOwnQuads * 4];
    issue_dq<Traits>(r_dq, operand.k_columns, operand.ds_rows + ds_stage * DsTile::kBytes,
                     warpgroup);
    if constexpr (!Traits::kDqLast) issue_dk();
    complete_gradient<2>(r_dv, r_p, &shared.dout_barriers.empty[stage]);
    if constexpr (Traits::kDqLast) {
      complete_gradient<1>(r_dk, r_ds, &shared.q_barriers.empty[stage]);
      finish_dq<Traits, 0>(shared, r_dq, step, warpgroup, late_warpgroup, late_thread);
    } else {
      finish_dq<Traits, 1>(shared, r_dq, step, warpgroup, late_warpgroup, late_thread);
      complete_gradient<0>(r_dk, r_ds, &shared.q_barriers.empty[stage]);
    }
    if constexpr (!Traits::kLists) m = work.next(m);
    is_first = false;
  }
  if constexpr (Traits::kDqLast) hand_over_last_dq<Traits>(shared, warpgroup, !is_first);
  if constexpr (Traits::kPersistent) {
    arrive_if(is_first, &shared.v_empty);
    if (is_first) wait_for_stored_keys<Traits>(shared, walked, warpgroup, thread);
  }
  if constexpr (Traits::kBiasTiles) tma_store_wait_read();  // the block's memory must outlive them
  finish_own_keys<Traits>(params, shared, work, k_slot, r_dk, r_dv, warpgroup, thread);
}

template <class Traits>
struct Roles<Traits, false> {
  using Shared = typename Traits::Shared;

  static __device__ __forceinline__ void produce(const BackwardParams& params, Shared& shared,
                                                 const KeyTile&) {
    sm90::produce<Traits>(params, shared);
  }
  static __device__ __forceinline__ void consume(const BackwardParams& params, Shared& shared,
                                                 const KeyTile& work, int warpgroup) {
    if constexpr (Traits::kPersistent) {
      for (KeyTileReader<Traits> reader{shared}; reader.next(); reader.release())
        accumulate<Traits>(params, shared, reader.work(), reader.walked, warpgroup);
      tma_store_wait_read();  // the block's memory must outlive its stores
    } else {
      Walked walked;
      accumulate<Traits>(params, shared, work, walked, warpgroup);
    }
  }
};

}  // namespace flash3::cuda::sm90
