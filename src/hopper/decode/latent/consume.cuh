// SPDX-License-Identifier: Apache-2.0
// The two consumer warpgroups. They take turns: one has the scores and the softmax of the even
// tiles of a run, the other of the odd ones. O is halved by head dims, so each multiplies every
// tile's P, its own from registers and the other's from shared memory:
//
//   own tile n:  O += P_{n−1}·V_{n−1} and S_n are issued | softmax of S_n | O += P_n·V_n
//
// The maximum follows lazily, as in the other decode kernels (decode/consume.cuh), and goes from
// warpgroup to warpgroup with P.
#pragma once

#include "hopper/decode/latent/queries.cuh"
#include "hopper/decode/latent/softmax.cuh"

namespace flash3::hopper {

template <class Traits>
class LatentConsumer : LatentSoftmax<Traits> {
  using Base = LatentSoftmax<Traits>;
  using Base::params_;
  using Base::shared_;
  using Base::sync_all;
  using Base::thread_;
  using Base::wait_for;
  using Base::warpgroup_;
  using typename Base::KvState;
  using typename Base::Probabilities;
  using typename Base::Scores;
  using typename Base::Sums;
  using HalfTile = typename Traits::HalfTile;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    LatentParts parts{};
    for (RunReader runs(shared_.runs); runs.next(); runs.release()) {
      const DecodeRun& run = runs.run();
      load_latent_queries<Traits>(params_, run, shared_, warpgroup_ * kWarpgroupThreads + thread_);
      sync_all();
      Sums sums;
      sums.clear();
      compute(run, sums);
      this->end_run(run, sums, parts);
    }
    if (warpgroup_ == 0 && thread_ == 0 && params_.slots > 0)
      parts_of_block(params_, part_block(params_)) = parts;
  }

 private:
  __device__ __forceinline__ void compute(const DecodeRun& run, Sums& sums) {
    const int begin = uniform(run.tiles.begin), end = uniform(run.tiles.end);
    if (begin >= end) return;
    Scores r_s;
    Probabilities r_p;
    int tile = begin + warpgroup_;
    if (warpgroup_ == 0) {
      issue_scores(r_s, state_);
      wgmma_wait<0>();
      end_own(run, tile, r_s, r_p, sums);
      state_.advance();
      tile += 2;
    }
    for (; tile < end; tile += 2) {
      const KvState before = state_;  // of the other's tile
      state_.advance();
      issue_others_output(sums, before);
      issue_scores(r_s, state_);
      wgmma_wait<1>();
      end_output(sums, before);
      wgmma_wait<0>();
      end_own(run, tile, r_s, r_p, sums);
      state_.advance();
    }
    if (tile == end) {  // the last tile is the other's
      issue_others_output(sums, state_);
      wgmma_wait<0>();
      end_output(sums, state_);
      state_.advance();
    }
  }

  // The scores of an own tile are there: softmax and O.
  __device__ __forceinline__ void end_own(const DecodeRun& run, int tile, Scores& r_s,
                                          Probabilities& r_p, Sums& sums) const {
    fence_operand(r_s);
    this->softmax(run, tile, state_, r_s, r_p, sums);
    issue_pv<Traits::kElement, HalfTile>(sums.out, r_p, values(state_));
    wgmma_wait<0>();
    end_output(sums, state_);
  }

  // Issues the scores of a tile: the rope parts are there first.
  __device__ __forceinline__ void issue_scores(Scores& r_s, const KvState& at) const {
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using QTile = typename Traits::QTile;
    using Mma = Wgmma<Traits::kElement, Traits::kTileN>;
    const Descriptor q = descriptor_in_cluster(QTile::kMajorK, shared_.q),
                     k = descriptor_in_cluster(KTile::kMajorK, shared_.k[at.stage]),
                     v = descriptor_in_cluster(VTile::kMajorK, shared_.v[at.stage]);
    wait_for(shared_.k_full[at.stage], at.phase, "k_full");
    mark_undefined(r_s);
    wgmma_fence();
#pragma unroll
    for (int col = 0; col < KTile::kCols; col += KTile::kStep)
      Mma::ss(r_s, q + QTile::k_step(VTile::kCols + col), k + KTile::k_step(col), col != 0);
#pragma unroll
    for (int group = 0; group < Traits::kGroups; ++group) {
      wait_for(shared_.v_full[at.stage][group], at.phase, "v_full");
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kGroupDims; i += VTile::kStep) {
        const int col = group * Traits::kGroupDims + i;
        Mma::ss(r_s, q + QTile::k_step(col), v + VTile::k_step(col), true);
      }
    }
    wgmma_commit();
  }

  // This warpgroup's head dims of V.
  __device__ __forceinline__ Descriptor values(const KvState& at) const {
    return descriptor_in_cluster(HalfTile::kMajorMN, shared_.v[at.stage]) +
           warpgroup_ * HalfTile::kBytes;
  }

  // Issues O += P·V of a tile of which the other warpgroup computes P.
  __device__ __forceinline__ void issue_others_output(Sums& sums, const KvState& at) const {
    using PTile = typename Traits::PTile;
    wait(&shared_.p_full[at.stage], at.phase, "p_full");
    this->take_max(at.stage, sums);
    const Descriptor p = descriptor_in_cluster(PTile::kMajorK, shared_.k[at.stage]), v = values(at);
    fence_operand(sums.out);
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Traits::kTileN; key += 16)
      Wgmma<Traits::kElement, Traits::kDims>::template ss<false, true>(
          sums.out, p + PTile::k_step(key), v + HalfTile::mn_step(key), true);
    wgmma_commit();
  }

  // O is there: the tile goes back.
  __device__ __forceinline__ void end_output(Sums& sums, const KvState& at) const {
    fence_operand(sums.out);
    if (params_.cluster == 1)
      release(&shared_.empty[at.stage], thread_);
    else if (thread_ % 32 < params_.cluster)  // all blocks of the cluster write into it
      mbarrier_arrive_at(&shared_.empty[at.stage], thread_ % 32);
  }

  KvState state_{};  // of the next tile
};

}  // namespace flash3::hopper
