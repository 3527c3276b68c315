// SPDX-License-Identifier: Apache-2.0
// Merges parts. A thread has four head dims of a row: it reads the row's LSEs, brings each part to
// the largest, and adds up, the parts in order. Memory bounds it.
#include "core/arithmetic.hpp"
#include "cuda/device/score/partial.hpp"
#include "cuda/device/score/row_end.cuh"
#include "cuda/merge/merge.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = kMergeThreads, kQuad = kMergeColumns;

__device__ __forceinline__ float4 load_quad(const MergeParams& p, const float* row, int col) {
  if (p.parts_in_quads) return __ldg(reinterpret_cast<const float4*>(row + col));
  float4 x{};
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    if (col + i < p.dim) (&x.x)[i] = __ldg(row + col + i);
  return x;
}

template <Element kElement>
__device__ __forceinline__ void store_pairs(const MergeParams& p, const float4& x, long long row,
                                            int col) {
  uint16_t* const to = static_cast<uint16_t*>(p.out) + row + col;
  const uint2 pairs = {pack2<kElement>(x.x, x.y), pack2<kElement>(x.z, x.w)};
  if (p.out_in_quads) {
    *reinterpret_cast<uint2*>(to) = pairs;
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    if (col + i < p.dim) to[i] = uint16_t((i < 2 ? pairs.x : pairs.y) >> (16 * (i % 2)));
}

__device__ __forceinline__ void store_quad(const MergeParams& p, const float4& x, long long row,
                                           int col) {
  if (p.type == FloatType::kFloat16) return store_pairs<Element::kFloat16>(p, x, row, col);
  if (p.type == FloatType::kBFloat16) return store_pairs<Element::kBFloat16>(p, x, row, col);
  float* const to = static_cast<float*>(p.out) + row + col;
  if (p.out_in_quads) {
    *reinterpret_cast<float4*>(to) = x;
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    if (col + i < p.dim) to[i] = (&x.x)[i];
}

// Four dims of a row of a head.
__device__ __forceinline__ void merge_quad(const MergeParams& p, long long row, int head, int col) {
  const float* const lse = p.lse_parts + head * p.lse_part_stride_head + row;
  const float sink = p.sink.data != nullptr ? load_sink(p.sink, head) : -kInfinity;
  float max = sink;
#pragma unroll 4
  for (int s = 0; s < p.count; ++s) max = fmaxf(max, __ldg(lse + s * p.lse_part_stride));
  const float origin = merge_origin(max);
  const auto exp = [](float x) { return expf(x); };
  float4 out{};
  float sum = merge_weight(sink, origin, exp);
  const float* const parts = p.parts + row * p.part_stride_row + head * p.part_stride_head;
#pragma unroll 4
  for (int s = 0; s < p.count; ++s) {
    const float part = __ldg(lse + s * p.lse_part_stride);
    if (part == -kInfinity) continue;  // saw no key: its out may hold anything
    const float weight = merge_weight(part, origin, exp);
    const float4 x = load_quad(p, parts + s * p.part_stride, col);
    sum += weight;
    out = {fmaf(weight, x.x, out.x), fmaf(weight, x.y, out.y), fmaf(weight, x.z, out.z),
           fmaf(weight, x.w, out.w)};
  }
  const float4 result =
      sum == 0.f ? float4{} : float4{out.x / sum, out.y / sum, out.z / sum, out.w / sum};
  store_quad(p, result, row * p.out_stride_row + head * p.out_stride_head, col);
  if (p.lse != nullptr && col == 0)
    p.lse[head * p.lse_stride_head + row] = sum == 0.f ? -kInfinity : origin + logf(sum);
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  const int quads = ceil_div(p.dim, kQuad), of_row = quads * p.heads;
  const long long all = p.rows * of_row;
  for (long long i = blockIdx.x * (long long)kThreads + threadIdx.x; i < all;
       i += gridDim.x * (long long)kThreads) {
    const long long row = i / of_row;
    const int in_row = int(i - row * of_row), head = in_row / quads;
    merge_quad(p, row, head, (in_row - head * quads) * kQuad);
  }
}

}  // namespace

const void* merge_function() { return reinterpret_cast<const void*>(&merge_kernel); }

}  // namespace flash3::cuda
