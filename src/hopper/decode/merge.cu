// SPDX-License-Identifier: Apache-2.0
// Merges parts. A thread has four head dims of a row: it reads the row's LSEs, brings each part to
// the largest, and adds up, the parts in order. Memory bounds it.
#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "hopper/decode/merge.hpp"
#include "hopper/device/sink.cuh"
#include "hopper/host/cuda_status.hpp"
#include "hopper/host/row_pieces.hpp"
#include "hopper/host/sink.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 128;
constexpr int kQuad = 4;
constexpr int kBlocksOfMultiprocessor = 16;

struct MergeParams {
  const float* parts;
  long long part_stride, part_stride_row, part_stride_head;
  const float* lse_parts;
  long long lse_part_stride, lse_part_stride_head;
  void* out;
  long long out_stride_row, out_stride_head;
  FloatType type;
  float* lse;  // or null
  long long lse_stride_head;
  SinkRow sink;
  long long rows;
  int heads, count, dim;              // count: of the parts
  bool parts_in_quads, out_in_quads;  // rows of aligned groups of four
};

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
  const float origin = max == -kInfinity ? 0.f : max;
  float4 out{};
  float sum = expf(sink - origin);
  const float* const parts = p.parts + row * p.part_stride_row + head * p.part_stride_head;
#pragma unroll 4
  for (int s = 0; s < p.count; ++s) {
    const float part = __ldg(lse + s * p.lse_part_stride);
    if (part == -kInfinity) continue;  // saw no key: its out may hold anything
    const float weight = expf(part - origin);
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

const char* out_name(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT32 ? "fp32" : dtype == FLASH3_FLOAT16 ? "fp16" : "bf16";
}

}  // namespace

Status plan(const MergeProblem& problem, const Device& device, MergePlan* plan) {
  const Index threads = problem.rows * problem.heads * ceil_div(problem.head_dim_v, kQuad);
  const Index blocks = ceil_div(threads, Index{kThreads}),
              most = Index{device.multiprocessors} * kBlocksOfMultiprocessor;
  *plan = {.grid = int(blocks < most ? blocks : most)};
  return {};
}

void explain(const MergeProblem& problem, const MergePlan& plan, Explanation* out) {
  out->add("kernel", message("merge_", out_name(problem.out_dtype)));
  out->add("why", "one kernel merges any number of parts, of any head dim");
  out->add("grid",
           message(plan.grid, " blocks of ", kThreads, " threads, four head dims of a row ",
                   "each at a time, over ", problem.rows, " rows of ", problem.heads, " heads"));
  out->add("load", in_pieces(problem.out_parts, 4)
                       ? "16 bytes at once"
                       : "element by element: out_parts' base, strides or rows are not multiples "
                         "of 16 bytes");
}

Status launch(const MergeProblem& problem, const MergePlan& plan) {
  MergeParams params{};
  params.parts = static_cast<const float*>(problem.out_parts.data);
  params.part_stride = problem.out_parts.stride_batch;
  params.part_stride_row = problem.out_parts.stride_seq;
  params.part_stride_head = problem.out_parts.stride_head;
  params.lse_parts = problem.lse_parts.data;
  params.lse_part_stride = problem.lse_parts.stride_batch;
  params.lse_part_stride_head = problem.lse_parts.stride_head;
  params.out = problem.out.data;
  params.out_stride_row = problem.out.stride_seq;
  params.out_stride_head = problem.out.stride_head;
  params.type = float_type(problem.out_dtype);
  params.lse = problem.lse.data;
  params.lse_stride_head = problem.lse.stride_head;
  params.sink = sink_row(problem.sink);
  params.rows = problem.rows;
  params.heads = int(problem.heads);
  params.count = int(problem.parts);
  params.dim = problem.head_dim_v;
  params.parts_in_quads = in_pieces(problem.out_parts, 4);
  params.out_in_quads = in_pieces(problem.out, problem.out_dtype == FLASH3_FLOAT32 ? 4 : 2);
  merge_kernel<<<unsigned(plan.grid), kThreads, 0, static_cast<cudaStream_t>(problem.stream)>>>(
      params);
  return cuda_status(cudaPeekAtLastError(), "launching the merge kernel");
}

}  // namespace flash3::hopper
