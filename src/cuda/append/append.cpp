// SPDX-License-Identifier: Apache-2.0
#include "cuda/append/append.hpp"

#include "core/arithmetic.hpp"
#include "core/explain.hpp"
#include "core/message.hpp"
#include "cuda/append/append_params.h"
#include "cuda/host/element_type.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/host/views.hpp"
#include "cuda/varlen/lengths.hpp"

namespace flash3::cuda {
namespace {

constexpr Index kLeastBlocks = 512, kMostBlocks = 1 << 20;
static_assert(kMostLanes * kPiece == kMaxHeadDim);

const void* function_of(const ForwardProblem& problem) {
  const Element from = element_type(problem.append.given ? problem.append.dtype : problem.dtype);
  return append_function(from, problem.has_fp8_keys() ? Element::kE4m3 : from, problem.rotates);
}

// Blocks of a sequence: enough for the longest, or of packed ones for the average; a block goes on
// to later tokens.
int blocks_of(const Sequences& s, Index batch) {
  const Index typical = s.packed ? ceil_div(Index{s.rows}, batch) : s.max_length;
  const Index wanted = ceil_div(typical, Index{kAppendTokens}),
              least = ceil_div(kLeastBlocks, batch);
  const Index most = ceil_div(s.max_length, Index{kAppendTokens});
  const Index blocks = wanted > least ? wanted : least;
  const Index room = ceil_div(kMostBlocks, batch);
  const Index bound = most < room ? most : room;
  return int(blocks < bound ? blocks : bound);
}

bool in_whole_pieces(const TensorView& t, flash3_dtype dtype) {
  const int bytes = dtype_size(dtype);
  return in_pieces(t, bytes, kPiece * bytes);
}

CopiedRows copied_rows(const TensorView& from, flash3_dtype from_dtype, const TensorView& to,
                       flash3_dtype to_dtype, const ScaleView& scale = {}) {
  return {from.data,
          from.stride_batch,
          from.stride_seq,
          from.stride_head,
          to.data,
          to.stride_batch,
          to.stride_seq,
          to.stride_head,
          int(from.heads),
          int(from.dim),
          in_whole_pieces(from, from_dtype) && in_whole_pieces(to, to_dtype),
          scale};
}

}  // namespace

AppendPlan plan_append(const ForwardProblem& problem, size_t* workspace) {
  AppendPlan plan;
  if (problem.has_tokens_to_append())
    plan.blocks = blocks_of(problem.append.sequences, problem.batch);
  if (!problem.transforms_q() || !problem.has_output()) return plan;
  const Sequences& q = problem.sequences_q;
  plan.q_blocks = blocks_of(q, problem.batch);
  const Index rows = q.packed ? q.rows : problem.batch * problem.seq_q;
  plan.q_offset =
      reserve_workspace(size_t(rows * problem.heads_q * problem.head_dim) * 2, workspace);
  return plan;
}

TensorView transformed_q(const ForwardProblem& problem, const AppendPlan& plan) {
  TensorView q = problem.q;
  if (plan.q_blocks == 0) return q;
  q.data = problem.workspace ? static_cast<char*>(problem.workspace) + plan.q_offset : nullptr;
  q.stride_head = problem.head_dim;
  q.stride_seq = problem.heads_q * q.stride_head;
  q.stride_batch = problem.sequences_q.packed ? 0 : problem.seq_q * q.stride_seq;
  return q;
}

void prepare_append(const ForwardProblem& problem, const AppendPlan& plan, Launches* launches) {
  if (!plan.launches()) return;
  auto& params = launches->make<AppendParams>();
  const Append& append = problem.append;
  const flash3_dtype to = problem.kv_dtype;
  if (append.given) {
    params.k = copied_rows(append.k, append.dtype, problem.k, to, problem.k_scale);
    params.v = copied_rows(append.v, append.dtype, problem.v, to, problem.v_scale);
  }
  params.q = copied_rows(problem.q, problem.dtype, transformed_q(problem, plan), problem.dtype);
  params.keys = lengths_of(problem.sequences_k);
  params.added = lengths_of(problem.append.sequences);
  params.queries = lengths_of(problem.sequences_q);
  params.page_table = problem.cache.page_table;
  params.page_table_stride = problem.cache.stride_table;
  params.page_size = int(problem.cache.page_size);
  params.batch_idx = problem.cache.batch_idx;
  params.elements = int(problem.k.batch);
  const RotaryView& rotary = problem.append.rotary;
  if (rotary.given && rotary.positions > 0)
    params.rotary = {rotary.cos,        rotary.sin,     rotary.stride_cos,
                     rotary.stride_sin, rotary.dim / 2, rotary.dtype == FLASH3_FLOAT32,
                     rotary.interleaved};
  params.positions = rotary.positions;
  params.offsets = problem.append.rotary_offsets;
  params.queries_advance = !problem.mask_rule.is_none();
  params.batch = int(problem.batch);
  params.blocks = plan.blocks;
  params.q_blocks = plan.q_blocks;
  params.lanes = problem.head_dim <= 64 ? 8 : problem.head_dim <= 128 ? 16 : kMostLanes;
  if (problem.rotates) fill_signs(problem.rotation_seed, params.signs);
  const Index blocks = problem.batch * (plan.blocks + plan.q_blocks);
  launches->add_kernel({function_of(problem), int(blocks), kAppendThreads}, &params,
                       "launching the append kernel");
}

std::string append_name(const ForwardProblem& problem) {
  const std::string to = short_name(element_type(problem.kv_dtype)),
                    from = short_name(element_type(problem.append.dtype));
  return message("append_", from, from == to ? "" : "_" + to, problem.rotates ? "_rotated" : "");
}

void explain_append(const ForwardProblem& problem, const AppendPlan& plan, Explanation* out) {
  if (!plan.launches()) return;
  const std::string keys = plan.blocks > 0 ? "the new keys and values go into the cache" : "",
                    q = plan.q_blocks > 0
                            ? describe_transformed_q(problem) + " goes into the workspace"
                            : "";
  out->add("first", message("a kernel of its own: ", keys, !keys.empty() && !q.empty() ? ", " : "",
                            q, "; ", problem.batch * (plan.blocks + plan.q_blocks), " blocks"));
}

}  // namespace flash3::cuda
