// SPDX-License-Identifier: Apache-2.0
// Two-level accumulation of O in FP8 kernels.
//
// The tensor cores keep about 13 bits below the leading bit of a sum and cut off the rest: 8192
// equal weights lose 13 %. So every few key tiles a thread flushes O: it adds its elements to
// float32 sums, and the next product begins O anew. The sums lie in shared memory, or in the
// workspace where a tile leaves no room; there O is sent to be added, and nobody waits, as long as
// the softmax has not rescaled its rows since the last flush. Each thread keeps two factors of such
// rescaling.
#pragma once

#include "cuda/device/ptx/async_copies.cuh"
#include "cuda/sm90/forward/traits_fp8.cuh"

namespace flash3::cuda::sm90 {

// Adds kCount quads of earlier output, from quad `first` on, each with its row's factor: a quad is
// two columns of each of a thread's two rows. load(i): quad i.
template <int kCount, int N, class Load>
__device__ __forceinline__ void add_quads(float (&r_o)[N], int first, float upper, float lower,
                                          const Load& load) {
  float4 x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = load(first + i);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float* const o = &r_o[4 * (first + i)];
    o[0] = fmaf(x[i].x, upper, o[0]);
    o[1] = fmaf(x[i].y, upper, o[1]);
    o[2] = fmaf(x[i].z, lower, o[2]);
    o[3] = fmaf(x[i].w, lower, o[3]);
  }
}

template <class Traits, bool kTwoLevel = Traits::kTwoLevel>
class OutputSums {
 public:
  using Output = float[Traits::kHeadDimV / 2];

  __device__ __forceinline__ OutputSums(const ForwardParams& params,
                                        typename Traits::Shared& shared)
      : params_(params), shared_(shared) {}

  // Call this when O has been multiplied by alpha.
  __device__ __forceinline__ void scale(const float (&alpha)[2]) const {
    float2& f = factors();
    f = {f.x * alpha[0], f.y * alpha[1]};
  }

  // Whether O is flushed after the product with key tile n + 1; tiles run from the last one down.
  // The next product, with key tile n, begins O anew.
  __device__ __forceinline__ bool is_due(int n) const {
    return ((n + 1) & (fp8_params(params_).flush_tiles - 1)) == 0;
  }

  // Flushes O when it is due. seen_end: of the key tiles.
  __device__ __forceinline__ void flush(Output& r_o, int n, int seen_end) const {
    const int period = fp8_params(params_).flush_tiles;
    const bool is_first = n + period > seen_end - 2;
    const float2 factor = factors();
    float4* const sums = first_quad();
    // Sums far away seldom need a factor: nobody waits for what is then added to them.
    if (!Traits::kSharedSums && !is_first && __all_sync(~0u, factor.x == 1.f && factor.y == 1.f)) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) add_to_global(&sums[i * kStride].x, &r_o[4 * i]);
    } else {
      // The branch stays inside the loop: more loads at once than these would need too many
      // registers.
#pragma unroll
      for (int i0 = 0; i0 < kQuads; i0 += kAtOnce) {
        if (!is_first) add_to<kAtOnce>(r_o, sums, i0, factor);
#pragma unroll
        for (int i = i0; i < i0 + kAtOnce; ++i)
          sums[i * kStride] = {r_o[4 * i], r_o[4 * i + 1], r_o[4 * i + 2], r_o[4 * i + 3]};
      }
    }
    factors() = {1.f, 1.f};
  }

  // Call this after the last product. Adds the flushed sums to O, which is then complete.
  __device__ __forceinline__ void take(Output& r_o, const TileMask::Range& seen) const {
    const int period = fp8_params(params_).flush_tiles;
    const int last_flushed = ((seen.end - 1) & -period) - 1;  // the first one in time
    const float2 factor = factors();
    float4* const sums = first_quad();
    // A branch at each step: ptxas would load all sums at once.
#pragma unroll
    for (int i0 = 0; i0 < kQuads; i0 += kAtEnd)
      if (last_flushed >= hide_from_optimizer(seen.begin)) add_to<kAtEnd>(r_o, sums, i0, factor);
  }

 private:
  static constexpr int kQuads = Traits::kHeadDimV / 8;  // two columns of the thread's two rows each
  // As registers allow.
  static constexpr int kAtOnce = Traits::kHeadDimV > 192 && Traits::kTileN > 64    ? 1
                                 : Traits::kWarpgroups > 2 || Traits::kTileN > 128 ? 2
                                 : Traits::kTileN > 64                             ? 4
                                                                                   : 8;
  static constexpr int kAtEnd = Traits::kWarpgroups > 2 ? 2 : 8;  // scores are gone then

  // This thread's; the others are kStride further each.
  static constexpr int kStride = kWarpgroupThreads;
  __device__ __forceinline__ float4* first_quad() const {
    const int warpgroup = warpgroup_index() - 1, thread = thread_in_warpgroup();
    if constexpr (Traits::kSharedSums) {
      return &shared_.quads[warpgroup][0][thread];
    } else {
      const int64_t first = (int64_t(blockIdx.x) * Traits::kWarpgroups + warpgroup) * kQuads;
      return static_cast<float4*>(fp8_params(params_).sums) + first * kStride + thread;
    }
  }
  __device__ __forceinline__ float2& factors() const {
    return shared_.factors[warpgroup_index() - 1][thread_in_warpgroup()];
  }
  // O += what has been flushed, some quads of it: from global memory by way of the L2 cache, where
  // additions are made.
  template <int kCount>
  __device__ __forceinline__ void add_to(Output& r_o, const float4* sums, int first,
                                         const float2& factor) const {
    add_quads<kCount>(r_o, first, factor.x, factor.y, [&](int i) {
      return Traits::kSharedSums ? sums[i * kStride] : __ldcg(sums + i * kStride);
    });
  }

  const ForwardParams& params_;
  typename Traits::Shared& shared_;
};

// A kernel without sums in two levels: nothing to do.
template <class Traits>
class OutputSums<Traits, false> {
 public:
  using Output = float[Traits::kHeadDimV / 2];

  __device__ __forceinline__ OutputSums(const ForwardParams&, typename Traits::Shared&) {}
  __device__ __forceinline__ void scale(const float (&)[2]) const {}
  __device__ __forceinline__ bool is_due(int) const { return false; }
  __device__ __forceinline__ void flush(Output&, int, int) const {}
  __device__ __forceinline__ void take(Output&, const TileMask::Range&) const {}
};

}  // namespace flash3::cuda::sm90
