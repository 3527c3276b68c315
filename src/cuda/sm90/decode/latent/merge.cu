// SPDX-License-Identifier: Apache-2.0
// Merges the partials of items that blocks of the latent kernel share, and stores their rows. A
// unit of work is a quarter of a row's head dims. Many units have few partials each: the grid deals
// them out to warps. Few units may have one of every block: a block has a unit, and its warps share
// the partials.
#include "cuda/sm90/decode/latent/merge.hpp"
#include "cuda/sm90/decode/latent/partials.cuh"
#include "cuda/sm90/decode/latent/traits.cuh"

namespace flash3::cuda::sm90 {
namespace {

inline constexpr int kWarps = kLatentMergeThreads / 32;
inline constexpr int kQuarter = 128, kQuarters = kLatentConfig.head_dim_v / kQuarter;
inline constexpr int kWords = kMaxDecodeBlocks / 32;

// What the headers of all blocks say, a bit for each block.
struct Headers {
  unsigned begins[kWords], continues[kWords], ends[kWords];
  int items;                                  // that have been begun and not ended
  short begun[kMaxDecodeBlocks];              // by which blocks
  LatentPartials partials[kMaxDecodeBlocks];  // of those
};

// All threads call it.
__device__ __forceinline__ void read_headers(const DecodeParams& params, int blocks,
                                             Headers& headers) {
  const int lane = threadIdx.x % 32;
  for (int word = threadIdx.x / 32; word < kWords; word += kWarps) {
    const int block = 32 * word + lane;
    LatentPartials partials{};
    if (block < blocks) headers.partials[block] = partials = partials_of_block(params, block);
    const unsigned begins = __ballot_sync(~0u, partials.begins != 0),
                   continues = __ballot_sync(~0u, partials.continues != 0),
                   ends = __ballot_sync(~0u, partials.continues != 0 && partials.ends != 0);
    if (lane == 0) {
      headers.begins[word] = begins;
      headers.continues[word] = continues;
      headers.ends[word] = ends;
    }
  }
  __syncthreads();
  int before = 0;
  for (int word = 0; word < kWords; ++word) {
    const unsigned begins = headers.begins[word];
    if (threadIdx.x / 32 == word % kWarps && begins >> lane & 1)
      headers.begun[before + __popc(begins & ((1u << lane) - 1))] = short(32 * word + lane);
    before += __popc(begins);
  }
  if (threadIdx.x == 0) headers.items = before;
  __syncthreads();
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A quarter of a row, merged so far: a lane has four head dims.
struct Quarter : Partial<4> {
  float largest = -kInfinity;  // score, where the call wants it

  __device__ __forceinline__ void add(const Quarter& other) {
    merge(other, Exp2{});
    largest = fmaxf(largest, other.largest);
  }

  __device__ __forceinline__ void add_largest(unsigned have, const float* of_partial) {
    const int lane = threadIdx.x % 32;
    largest = fmaxf(largest, warp_max(have >> lane & 1 ? *of_partial : -kInfinity));
  }

  // Merges a partial of each lane that has one: where its maximum and sum lie, and its quarter.
  __device__ __forceinline__ void add(unsigned have, const float2* of_partial, const float* from) {
    constexpr int kAtOnce = 8;  // loads in flight
    const int lane = threadIdx.x % 32;
    const auto address = reinterpret_cast<unsigned long long>(from);
    float4 x[kAtOnce];
    // Those of the first partials do not wait for the weights.
    int first = __ffs(have) - 1;
    load(have, first, address, x);
    float2 partial = {-kInfinity, 0.f};
    if (have >> lane & 1) partial = *of_partial;
    const float larger = fmaxf(max, warp_max(partial.x));
    if (larger == -kInfinity) return;  // no partial has seen a key
    const float alpha = merge_weight(max, larger, Exp2{}),
                weight = merge_weight(partial.x, larger, Exp2{});
    max = larger;
    sum = fmaf(sum, alpha, warp_sum(partial.y * weight));
#pragma unroll
    for (float& o : out) o *= alpha;
    const int end = 32 - __clz(have);
    while (true) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float w = __shfl_sync(~0u, weight, (first + i) % 32);
        if (first + i >= end) w = 0.f;  // a lane without a partial has the weight 0
        out[0] = fmaf(x[i].x, w, out[0]);
        out[1] = fmaf(x[i].y, w, out[1]);
        out[2] = fmaf(x[i].z, w, out[2]);
        out[3] = fmaf(x[i].w, w, out[3]);
      }
      first += kAtOnce;
      if (first >= end) return;
      load(have, first, address, x);
    }
  }

 private:
  // Its four head dims of partials from `first` on; 0 of lanes that have none.
  template <int N>
  static __device__ __forceinline__ void load(unsigned have, int first, unsigned long long address,
                                              float4 (&x)[N]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int source = (first + i) % 32;
      const auto* const at = reinterpret_cast<const float4*>(__shfl_sync(~0u, address, source));
      x[i] = first + i < 32 && (have >> source & 1) ? at[lane] : float4{};
    }
  }
};

// Which of the partials of a unit a warp merges: of each so many eights, one.
struct WarpShare {
  int number, of;
};

// A quarter of a row of the item that a block has begun, from all blocks that share it.
__device__ __forceinline__ Quarter merge_quarter(const DecodeParams& params, int blocks,
                                                 const Headers& headers, int begin, int row,
                                                 int first_dim, const WarpShare& share) {
  const int lane = threadIdx.x % 32;
  Quarter all;
  bool ends = false;
  int passed = 0;
  for (int word = begin / 32; !ends && 32 * word < blocks; ++word) {
    const unsigned behind = word == begin / 32 ? ~1u << begin % 32 : ~0u,
                   last = headers.ends[word] & behind,
                   own = word == begin / 32 ? 1u << begin % 32 : 0u;
    ends = last != 0;
    const unsigned before = ends ? ((last & (0u - last)) << 1) - 1 : ~0u;
    unsigned have = (headers.continues[word] & behind & before) | own;
    if (share.of > 1) {
      const int number = passed + __popc(have & ((1u << lane) - 1));
      passed += __popc(have);
      have = __ballot_sync(~0u, (have >> lane & 1) && number / 8 % share.of == share.number);
    }
    if (have == 0) continue;
    const int block = min(32 * word + lane, blocks - 1);
    const LatentSlot slot = own >> lane & 1 ? LatentSlot::kBegun : LatentSlot::kContinued;
    all.add(have, partial_sum(params, blocks, block, slot, row),
            partial_row(params, blocks, block, slot, row) + first_dim);
    if (params.rows.max_logits.data != nullptr)
      all.add_largest(have, partial_largest(params, blocks, block, slot, row));
  }
  return all;
}

// Merges what the warps of a block have of a unit, for the first of them.
__device__ __forceinline__ void merge_warps(Quarter& all) {
  __shared__ Quarter quarters[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  quarters[warp][lane] = all;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all.add(quarters[w][lane]);
}

template <Element kElement>
__global__ void __launch_bounds__(kLatentMergeThreads)
    latent_merge_kernel(const __grid_constant__ DecodeParams params) {
  using Traits = LatentTraits<kLatentConfig, kElement>;
  __shared__ Headers headers;
  launch_dependents();
  wait_for_previous_kernel();
  const int blocks = params.blocks, lane = threadIdx.x % 32;
  read_headers(params, blocks, headers);
  const int units = headers.items * Traits::kRows * kQuarters, warp = threadIdx.x / 32;
  const bool few = units <= int(gridDim.x);
  const WarpShare share = few ? WarpShare{warp, kWarps} : WarpShare{0, 1};
#pragma unroll 1
  for (int unit = uniform(few ? blockIdx.x : blockIdx.x * kWarps + warp); unit < units;
       unit += gridDim.x * kWarps) {
    const int begin = headers.begun[unit / (Traits::kRows * kQuarters)],
              row = unit / kQuarters % Traits::kRows, quarter = unit % kQuarters;
    const LatentPartials& item = headers.partials[begin];
    if (row >= item.rows) continue;
    Quarter all = merge_quarter(params, blocks, headers, begin, row, quarter * kQuarter, share);
    if (few) {
      merge_warps(all);
      if (warp > 0) return;
    }
    DecodeRun run{};
    run.batch = item.batch;
    run.head_group = item.head_group;
    run.q_row = item.q_row;
    const QueryRow at = query_row(params, run, row);
    const RowResult result = finish_row(params, all.max, all.sum, all.largest, at.head);
    const OutRow<Traits> out(params, run, at);
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      out.store_pair(quarter * kQuarter + 4 * lane + i, all.out[i] * result.inverse_sum,
                     all.out[i + 1] * result.inverse_sum);
    if (quarter == 0 && lane == 0) store_values<Traits::kMaxLogits>(params, run, at, result.values);
  }
}

}  // namespace

const void* latent_merge_function(Element element) {
  return element == Element::kFloat16
             ? reinterpret_cast<const void*>(&latent_merge_kernel<Element::kFloat16>)
             : reinterpret_cast<const void*>(&latent_merge_kernel<Element::kBFloat16>);
}

}  // namespace flash3::cuda::sm90
