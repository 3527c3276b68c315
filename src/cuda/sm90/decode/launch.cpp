// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "core/arithmetic.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/host/ticket.hpp"
#include "cuda/host/views.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/decode/schedule.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/tensor_map.hpp"
#include "cuda/varlen/lengths.hpp"
#include "flash3/schedule.h"

namespace flash3::cuda::sm90 {
namespace {

static_assert(offsetof(DecodeRun, head_group) == kHeadGroupWord * sizeof(int));

// Rows of a head are far apart: 256 would bring what other blocks read at another time.
constexpr int kL2Bytes = 128;

CacheView cache_view(const TensorView& t, int element_bytes) {
  return {t.data,        t.stride_batch, t.stride_seq,
          t.stride_head, int(t.dim),     in_pieces(t, element_bytes)};
}

DecodeSchedule schedule_at(void* data, const DecodePlan& plan) {
  char* const begin = static_cast<char*>(data);
  return {reinterpret_cast<DecodeRun*>(begin),
          reinterpret_cast<MergeLists*>(begin + plan.lists_offset)};
}

// Where the call's own schedule lies, or the caller's.
void* schedule_data(const ForwardProblem& problem, const DecodePlan& plan) {
  if (problem.schedule) return problem.schedule->data;
  return static_cast<char*>(problem.workspace) + plan.schedule_offset;
}

void fill_fp8(const ForwardProblem& problem, DecodeParams* params) {
  params->q_type = element_type(problem.dtype);
  params->out_bfloat16 = problem.out_dtype == FLASH3_BFLOAT16;
  params->capped = problem.softcap > 0.f;
  params->q_packed = problem.sequences_q.packed;
  params->q_scale = problem.q_scale;
  params->k_scale = problem.k_scale;
  params->v_scale = problem.v_scale;
}

void fill_latent(const TensorView& q, bool capped, const DecodePlan& plan, DecodeParams* params) {
  params->q_latent = q.data;
  params->q_latent_stride_batch = q.stride_batch;
  params->q_latent_stride_row = q.stride_seq;
  params->q_latent_stride_head = q.stride_head;
  params->q_by_pieces &= in_pieces(q);
  params->capped = capped;
  params->cluster = plan.cluster;
}

KernelLaunch kernel_launch(const DecodePlan& plan) {
  const DecodeConfig& config = plan.kernel->config;
  return {plan.kernel->function,
          plan.grid + plan.mergers,
          config.threads(),
          config.shared_bytes(),
          true,
          plan.cluster};
}

}  // namespace

Status prepare(const ForwardProblem& problem, const TensorView& given_q, const DecodePlan& plan,
               Launches* launches) {
  const DecodeConfig& config = plan.kernel->config;
  const int bytes = config.element_bytes();
  auto& params = launches->make<DecodeParams>();
  const bool latent = config.latent, capped = problem.softcap > 0.f;
  const TensorView q = latent ? latent_views(problem, given_q).q_rope : given_q;
  const KeyViews keys = key_views(problem, config);
  const TensorView k = tensor_rows(keys.k, problem.sequences_k),
                   v = tensor_rows(keys.v, problem.sequences_k);
  params.box_rows = plan.box_rows;
  if (plan.box_rows > 0) {
    RowMap rows;
    FLASH3_CHECK(
        encode_map(mappable(k, q.data), RowIndexing::kBySequence,
                   {plan.box_rows, box_columns(config.head_dim, bytes), 1, bytes, kL2Bytes},
                   &params.k, &rows));
    FLASH3_CHECK(
        encode_map(mappable(v, q.data), RowIndexing::kBySequence,
                   {plan.box_rows, box_columns(config.head_dim_v, bytes), 1, bytes, kL2Bytes},
                   &params.v, &rows));
  }
  params.k_rows = cache_view(k, bytes);
  params.v_rows = cache_view(v, bytes);

  params.q = q.data;
  params.q_stride_batch = q.stride_batch;
  params.q_stride_row = q.stride_seq;
  params.q_stride_head = q.stride_head;
  params.head_dim = config.latent ? config.head_dim : problem.head_dim;
  params.q_by_pieces = in_pieces(q);
  if (latent) fill_latent(latent_views(problem, given_q).q_latent, capped, plan, &params);
  params.out = problem.out.data;
  params.out_float32 = problem.out_dtype == FLASH3_FLOAT32;
  params.out_stride_batch = problem.out.stride_batch;
  params.out_stride_row = problem.out.stride_seq;
  params.out_stride_head = problem.out.stride_head;
  params.head_dim_v = problem.head_dim_v;
  params.rows = row_outputs(problem);
  params.sink = sink_row(problem.sink);

  params.scale_log2 = capped ? 1.f : problem.softmax_scale * float(kLog2E);
  if (capped)
    params.softcap = make_softcap(problem.softmax_scale, problem.softcap, problem.softcap * kLog2E);

  params.page_table = problem.cache.page_table;
  params.page_table_stride = problem.cache.stride_table;
  params.page_size = int(problem.cache.page_size);
  params.batch_idx = problem.cache.batch_idx;
  params.elements = int(k.batch);
  params.k_packed = problem.sequences_k.packed;
  params.heads = plan.heads;

  char* const workspace = static_cast<char*>(problem.workspace);
  params.schedule = schedule_at(schedule_data(problem, plan), plan);
  params.partials = workspace + plan.partials_offset;
  params.slots = plan.slots;
  params.ticket = new_ticket();
  params.blocks = plan.grid;
  if (problem.has_fp8_keys()) fill_fp8(problem, &params);
  static_assert(sizeof(*params.tree) == sizeof(*problem.tree.words));
  params.tree = reinterpret_cast<const unsigned long long*>(problem.tree.words);
  params.tree_stride_batch = problem.tree.stride_batch;

  if (!problem.schedule) prepare_schedule(problem, plan, schedule_data(problem, plan), launches);
  launches->add_kernel(kernel_launch(plan), &params, "launching the decode kernel");
  if (latent && plan.slots > 0) prepare_latent_merge(plan, &params, launches);
  return {};
}

ScheduleNeeds needs_of(const DecodePlan& plan) {
  return {plan.schedule_bytes, uint64_t(plan.grid)};
}

void prepare_schedule(const ForwardProblem& problem, const DecodePlan& plan, void* data,
                      Launches* launches) {
  auto& params = launches->make<DecodeScheduleParams>();
  params.rule = plan.rule;
  params.rule.q = lengths_of(problem.sequences_q);
  params.rule.k = lengths_of(problem.sequences_k);
  if (problem.append.given) params.rule.added = lengths_of(problem.append.sequences);
  params.rule.leftpad = problem.cache.leftpad;
  params.batch = int(problem.batch);
  params.heads = plan.heads;
  params.groups_per_kv = plan.groups_per_kv;
  params.blocks = plan.grid / plan.cluster;
  params.slots = plan.slots;
  params.lists_partials = plan.slots > 0 && !plan.kernel->config.latent;
  params.schedule = schedule_at(data, plan);
  launches->add_kernel({decode_schedule_function(), params.blocks, kDecodeScheduleThreads, 0, true},
                       &params, "launching the schedule of a decode call");
}

}  // namespace flash3::cuda::sm90
