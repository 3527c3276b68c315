// SPDX-License-Identifier: Apache-2.0
#include "cuda/merge/merge.hpp"

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/host/views.hpp"

namespace flash3::cuda {
namespace {

constexpr int kBlocksOfMultiprocessor = 16;

const char* out_name(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT32 ? "fp32" : dtype == FLASH3_FLOAT16 ? "fp16" : "bf16";
}

}  // namespace

Status plan(const MergeProblem& problem, const Device& device, size_t*, MergePlan* plan) {
  const Index threads = problem.rows * problem.heads * ceil_div(problem.head_dim_v, kMergeColumns);
  const Index blocks = ceil_div(threads, Index{kMergeThreads}),
              most = Index{device.multiprocessors} * kBlocksOfMultiprocessor;
  *plan = {.grid = int(blocks < most ? blocks : most)};
  return {};
}

void explain(const MergeProblem& problem, const MergePlan& plan, Explanation* out) {
  out->add("kernel", message("merge_", out_name(problem.out_dtype)));
  out->add("why", "one kernel merges any number of parts, of any head dim");
  out->add("grid",
           message(plan.grid, " blocks of ", kMergeThreads, " threads, four head dims of a row ",
                   "each at a time, over ", problem.rows, " rows of ", problem.heads, " heads"));
  out->add("load", in_pieces(problem.out_parts, 4)
                       ? "16 bytes at once"
                       : "element by element: out_parts' base, strides or rows are not multiples "
                         "of 16 bytes");
}

Status prepare(const MergeProblem& problem, const MergePlan& plan, Launches* launches) {
  auto& params = launches->make<MergeParams>();
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
  launches->add_kernel({merge_function(), plan.grid, kMergeThreads}, &params,
                       "launching the merge kernel");
  return {};
}

}  // namespace flash3::cuda
