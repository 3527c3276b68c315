// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/arithmetic.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/host/ticket.hpp"
#include "cuda/host/views.hpp"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/plan.hpp"
#include "cuda/sm90/host/bias_params.hpp"
#include "cuda/sm90/host/packed_copy.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

Status encode_maps(const ForwardProblem& problem, const TensorView& given_q,
                   const ForwardPlan& plan, ForwardParams* params) {
  const ForwardConfig& config = plan.kernel->config;
  const int bytes = config.element_bytes(), columns = box_columns(config.head_dim, bytes),
            columns_v = box_columns(config.head_dim_v, bytes),
            key_bytes = key_element_bytes(config);
  const int box_queries = plan.slot_rows > 0 ? plan.slot_rows : plan.pack.queries;
  const TensorView q = input_view(problem, tensor_rows(given_q, problem.sequences_q), plan.q);
  // q has rows, or there would be no call.
  const TensorView k =
      mappable(input_view(problem, tensor_rows(problem.k, problem.sequences_k), plan.k), q.data);
  const TensorView v =
      mappable(input_view(problem, tensor_rows(problem.v, problem.sequences_k), plan.v), q.data);
  FLASH3_CHECK(encode_map(q, plan.rows, {box_queries, columns, plan.pack.heads, bytes}, &params->q,
                          &params->q_rows));
  FLASH3_CHECK(encode_map(k, plan.rows,
                          {plan.box_keys, box_columns(config.head_dim, key_bytes), 1, key_bytes},
                          &params->k, &params->k_rows));
  FLASH3_CHECK(encode_map(v, plan.rows,
                          {plan.box_keys / config.raw_v_parts(),
                           box_columns(config.head_dim_v, key_bytes), 1, key_bytes},
                          &params->v, &params->v_rows));
  params->out_by_tma = plan.out_by_tma;
  if (plan.out_by_tma) {
    const TensorView out = tensor_rows(problem.out, problem.sequences_q);
    FLASH3_CHECK(encode_map(out, plan.rows, {box_queries, columns_v, plan.pack.heads}, &params->out,
                            &params->out_rows));
  }
  return {};
}

// cache_batch_idx is a table of one page a sequence, as long as an element.
KeyPages key_pages(const ForwardProblem& problem, const ForwardPlan& plan) {
  const KvCache& cache = problem.cache;
  const int elements = int(problem.k.batch);
  if (cache.paged)
    return {cache.page_table, cache.stride_table, int(cache.page_size), elements, plan.box_keys};
  return {cache.batch_idx, 1, std::max(1, int(problem.k.seq)), elements, plan.box_keys};
}

Fp8Params scales_of(const ForwardProblem& problem, const ForwardPlan& plan, float scale_log2) {
  Fp8Params fp8{};
  fp8.q_scale = problem.q_scale;
  fp8.k_scale = problem.k_scale;
  fp8.v_scale = problem.v_scale;
  fp8.q_factor = problem.softcap > 0.f ? 1.f : scale_log2;
  fp8.q_packed = problem.sequences_q.packed;
  fp8.k_packed = problem.sequences_k.packed;
  fp8.flush_tiles = plan.flush_tiles;
  fp8.sums = static_cast<char*>(problem.workspace) + plan.sums_offset;
  return fp8;
}

SplitSlots split_slots(const ForwardProblem& problem, const ForwardPlan& plan) {
  const KeySplitsPlan& splits = plan.splits;
  char* const workspace = static_cast<char*>(problem.workspace);
  SplitSlots slots{};
  slots.most = splits.most;
  slots.bits = splits.slot_bits;
  slots.mask = (1 << splits.slot_bits) - 1;
  slots.out = workspace + splits.out_offset;
  slots.max_and_sum = workspace + splits.sums_offset;
  slots.freed = reinterpret_cast<int*>(workspace + splits.counters_offset);
  slots.arrived = slots.freed + slots.mask + 1;
  return slots;
}

// Lists the sequences of a ragged batch for the kernel.
void prepare_list(const ForwardProblem& problem, const ForwardPlan& plan,
                  ForwardKernelParams* params, Launches* launches) {
  char* const workspace = static_cast<char*>(problem.workspace);
  VarlenScheduleParams list = varlen_schedule_params(problem, plan);
  list.rows = reinterpret_cast<ListedSequence*>(workspace + plan.list_offset);
  if (!list.in_order) list.first_tile = reinterpret_cast<int*>(workspace + plan.first_tile_offset);
  if (plan.kernel->config.split) list.counters = params->splits.freed;
  params->schedule.sequences = {list.rows, list.first_tile, list.batch};
  launches->add([list](void* stream) { return launch_varlen_schedule(list, stream); });
}

}  // namespace

Status prepare(const ForwardProblem& problem, const TensorView& q, const ForwardPlan& plan,
               Launches* launches) {
  const ForwardConfig& config = plan.kernel->config;
  auto& params = launches->make<ForwardKernelParams>();
  FLASH3_CHECK(encode_maps(problem, q, plan, &params));

  params.out_data = problem.out.data;
  params.out_type = float_type(problem.out_dtype);
  const int out_bytes = dtype_size(problem.out_dtype);
  params.out_in_quads = in_pieces(problem.out, out_bytes, 4 * out_bytes);
  params.out_stride_batch = problem.out.stride_batch;
  params.out_stride_seq = problem.out.stride_seq;
  params.out_stride_head = problem.out.stride_head;
  params.rows = row_outputs(problem);
  params.sink = sink_row(problem.sink);
  params.scale_log2 = problem.softmax_scale * float(kLog2E);
  const float slack = config.operands == Operands::kE4m3 ? kFp8Slack : kSlack;
  params.score_slack = slack / params.scale_log2;
  params.head_dim_v = problem.head_dim_v;
  params.pack = plan.pack;
  params.groups_per_kv_head = int(problem.queries_per_kv_head()) / plan.pack.heads;

  if (problem.softcap > 0.f) {
    params.softcap = make_softcap(problem.softmax_scale, problem.softcap, problem.softcap * kLog2E);
    params.score_slack = slack / params.softcap.a;  // P is nowhere steeper than at 0
  }
  if (config.terms != BiasTerms::kNone) {
    // FP8's scores are in base 2 beside any terms.
    const BiasTerms terms = config.fp8() ? BiasTerms::kAny : config.terms;
    params.biased = bias_params(problem, terms, problem.softcap > 0.f ? 1.f : params.scale_log2);
  }
  if (config.bias_tiles())
    FLASH3_CHECK(encode_bias(problem.bias, config.tile_m() / config.warpgroups, &params.biased,
                             &params.bias_tiles));
  if (config.score == ScoreKind::kBiased) params.score_slack = slack;
  params.least_exact = problem.max_logits.wanted ? 0.f : -params.score_slack;

  if (config.paged) params.pages = key_pages(problem, plan);
  if (config.lists) params.mask = problem.mask_lists.memory();
  if (config.split) params.splits = split_slots(problem, plan);
  if (config.operands != Operands::k16Bit) params.fp8 = scales_of(problem, plan, params.scale_log2);

  char* const workspace = static_cast<char*>(problem.workspace);
  params.schedule = tile_schedule(problem, plan);
  if (plan.dynamic) {
    params.schedule.counter = reinterpret_cast<TileCounterMemory*>(workspace + plan.counter_offset);
    params.schedule.ticket = new_ticket();
  }

  prepare_copy(problem, tensor_rows(q, problem.sequences_q), plan.q, launches);
  prepare_copy(problem, tensor_rows(problem.k, problem.sequences_k), plan.k, launches);
  prepare_copy(problem, tensor_rows(problem.v, problem.sequences_k), plan.v, launches);
  if (problem.is_ragged()) prepare_list(problem, plan, &params, launches);
  launches->add_kernel({plan.kernel->function, plan.grid, config.threads(),
                        shared_memory_bytes(config), problem.is_ragged()},
                       &params, "launching the forward kernel");
  return {};
}

}  // namespace flash3::cuda::sm90
