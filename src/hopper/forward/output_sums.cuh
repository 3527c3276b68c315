// SPDX-License-Identifier: Apache-2.0
// Two-level accumulation of O in FP8 kernels.
//
// The tensor cores sum products of e4m3 with some 13 bits behind the leading one of the sum: what a
// key adds to a long sum is cut off, and 8192 equal weights lose 13 % of their values. So O is
// flushed every few key tiles: added to float32 sums in shared memory or, where a tile leaves no
// room for them, in the workspace, and begun anew. A thread has its own elements of O there, and
// what they are to be multiplied by when O comes next: the softmax's rescaling since the last
// flush.
#pragma once

#include "hopper/forward/traits_fp8.cuh"

namespace flash3::hopper {

template <class Traits, bool kTwoLevel = Traits::kTwoLevel>
class OutputSums {
 public:
  using Output = float[Traits::kHeadDimV / 2];

  __device__ __forceinline__ OutputSums(const ForwardParams& params,
                                        typename Traits::Shared& shared)
      : params_(params), shared_(shared) {}

  // O has been multiplied by alpha.
  __device__ __forceinline__ void scale(const float (&alpha)[2]) const {
    float2& f = factors();
    f = {f.x * alpha[0], f.y * alpha[1]};
  }

  // Behind the product with key tile n + 1, of those in front of seen_end, from the last one down.
  __device__ __forceinline__ void flush(Output& r_o, int n, int seen_end) const {
    const int period = params_.fp8.flush_tiles;
    if (((n + 1) & (period - 1)) != 0) return;
    const bool is_first = n + period > seen_end - 2;
    const float2 factor = factors();
    // The branch stays inside the loop: more loads at once than these would need too many
    // registers.
#pragma unroll
    for (int i0 = 0; i0 < kQuads; i0 += kAtOnce) {
      if (!is_first) add_to(r_o, i0, factor);
#pragma unroll
      for (int i = i0; i < i0 + kAtOnce; ++i) {
        quad(i) = {r_o[4 * i], r_o[4 * i + 1], r_o[4 * i + 2], r_o[4 * i + 3]};
#pragma unroll
        for (int e = 0; e < 4; ++e) r_o[4 * i + e] = 0.f;
      }
    }
    factors() = {1.f, 1.f};
  }

  // Behind the last product: O is all of it again.
  __device__ __forceinline__ void take(Output& r_o, const TileMask::Range& seen) const {
    const int period = params_.fp8.flush_tiles;
    const int last_flushed = ((seen.end - 1) & -period) - 1;  // the first one in time
    if (last_flushed < seen.begin) return;
    const float2 factor = factors();
#pragma unroll
    for (int i0 = 0; i0 < kQuads; i0 += kAtOnce) add_to(r_o, i0, factor);
  }

 private:
  static constexpr int kQuads = Traits::kHeadDimV / 8;        // of two columns of both rows
  static constexpr int kAtOnce = Traits::kWarpgroups > 2 ? 2  // as registers allow
                                 : Traits::kTileN > 64   ? 4
                                                         : 8;

  __device__ __forceinline__ float4& quad(int i) const {
    const int warpgroup = warpgroup_index() - 1, thread = thread_in_warpgroup();
    if constexpr (Traits::kSharedSums) {
      return shared_.quads[warpgroup][i][thread];
    } else {
      const int64_t first = (int64_t(blockIdx.x) * Traits::kWarpgroups + warpgroup) * kQuads;
      return static_cast<float4*>(params_.fp8.sums)[(first + i) * kWarpgroupThreads + thread];
    }
  }
  __device__ __forceinline__ float2& factors() const {
    return shared_.factors[warpgroup_index() - 1][thread_in_warpgroup()];
  }
  // O += what has been flushed, some quads of it.
  __device__ __forceinline__ void add_to(Output& r_o, int first, const float2& factor) const {
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = quad(first + i);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float* const o = &r_o[4 * (first + i)];
      o[0] = fmaf(x[i].x, factor.x, o[0]);
      o[1] = fmaf(x[i].y, factor.x, o[1]);
      o[2] = fmaf(x[i].z, factor.y, o[2]);
      o[3] = fmaf(x[i].w, factor.y, o[3]);
    }
  }

  const ForwardParams& params_;
  typename Traits::Shared& shared_;
};

// Where a kernel has one accumulator alone.
template <class Traits>
class OutputSums<Traits, false> {
 public:
  using Output = float[Traits::kHeadDimV / 2];

  __device__ __forceinline__ OutputSums(const ForwardParams&, typename Traits::Shared&) {}
  __device__ __forceinline__ void scale(const float (&)[2]) const {}
  __device__ __forceinline__ void flush(Output&, int, int) const {}
  __device__ __forceinline__ void take(Output&, const TileMask::Range&) const {}
};

}  // namespace flash3::hopper
