// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "core/arithmetic.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/host/launches.hpp"
#include "cuda/host/views.hpp"
#include "cuda/sm90/backward/auxiliary_kernels.hpp"
#include "cuda/sm90/backward/kernel_params.h"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/host/bias_params.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

// All rows of a packed tensor must be aligned, also where no sequence has more than one.
ElementView element_view(const TensorView& view, const Sequences& sequences, flash3_dtype dtype) {
  return {
      view.data, view.stride_batch, view.stride_seq, view.stride_head,
      tma_can_address(tensor_rows(view, sequences), RowIndexing::kBySequence, dtype_size(dtype))};
}

RowView row_view(const LseView& view) { return {view.data, view.stride_batch, view.stride_head}; }

BackwardWorkspace backward_workspace(const BackwardProblem& problem, const BackwardPlan& plan) {
  char* const workspace = static_cast<char*>(problem.workspace);
  const auto at = [&](size_t offset) { return reinterpret_cast<float*>(workspace + offset); };
  return {plan.query_tiles,
          problem.sequences_q,
          int(problem.batch),
          at(plan.lse_offset),
          at(plan.delta_offset),
          at(plan.dq_offset),
          plan.kernel->config.dq_columns(),
          plan.counted ? reinterpret_cast<int*>(workspace + plan.semaphores_offset) : nullptr,
          plan.zeroed};
}

int* ticket(const BackwardProblem& problem, const BackwardPlan& plan) {
  if (!plan.has_ticket()) return nullptr;
  return reinterpret_cast<int*>(static_cast<char*>(problem.workspace) + plan.ticket_offset);
}

// The input as the main kernel loads it.
TensorView load_view(const BackwardProblem& problem, const TensorView& tensor,
                     const Sequences& sequences, const PackedCopy& copy) {
  return input_view(problem, tensor_rows(tensor, sequences), copy);
}

Status store_map(const BackwardPlan& plan, const TensorView& tensor, const Sequences& sequences,
                 int head_dim, TensorMap* map, RowMap* rows) {
  return encode_map(tensor_rows(tensor, sequences), plan.rows, {64, box_columns(head_dim)}, map,
                    rows);
}

Status make_params(const BackwardProblem& problem, const BackwardPlan& plan,
                   const BackwardWorkspace& workspace, const SequenceList& list,
                   BackwardKernelParams* params) {
  const BackwardConfig& c = plan.kernel->config;
  const Sequences &of_q = problem.sequences_q, &of_k = problem.sequences_k;
  const TensorView k = load_view(problem, problem.k, of_k, plan.k),
                   v = load_view(problem, problem.v, of_k, plan.v);
  // k has rows, or no block would run.
  const TensorView q = mappable(load_view(problem, problem.q, of_q, plan.q), k.data),
                   dout = mappable(load_view(problem, problem.dout, of_q, plan.dout), k.data);
  const auto load_map = [&](const TensorView& view, int box_rows, int head_dim, TensorMap* map,
                            RowMap* map_rows) {
    return encode_map(view, plan.rows, {box_rows, box_columns(head_dim)}, map, map_rows);
  };
  FLASH3_CHECK(load_map(k, c.tile_n, c.head_dim, &params->k, &params->k_rows));
  FLASH3_CHECK(load_map(v, c.tile_n, c.head_dim_v, &params->v, &params->v_rows));
  FLASH3_CHECK(load_map(q, c.tile_m, c.head_dim, &params->q, &params->q_rows));
  FLASH3_CHECK(load_map(dout, c.tile_m, c.head_dim_v, &params->dout, &params->dout_rows));
  params->dk_by_tma = plan.dk_by_tma;
  params->dv_by_tma = plan.dv_by_tma;
  if (plan.dk_by_tma)
    FLASH3_CHECK(store_map(plan, problem.dk, of_k, c.head_dim, &params->dk, &params->dk_rows));
  if (plan.dv_by_tma)
    FLASH3_CHECK(store_map(plan, problem.dv, of_k, c.head_dim_v, &params->dv, &params->dv_rows));
  params->dk_out = element_view(problem.dk, of_k, problem.gradient_dtype);
  params->dv_out = element_view(problem.dv, of_k, problem.gradient_dtype);
  params->float32_gradients = problem.gradient_dtype == FLASH3_FLOAT32;

  params->workspace = workspace;
  params->softmax_scale = problem.softmax_scale;
  const bool capped = problem.softcap > 0.f;
  params->scale_log2 = (capped ? problem.softcap : problem.softmax_scale) * float(kLog2E);
  if (capped) params->softcap = make_softcap(problem.softmax_scale, problem.softcap, 1);
  params->head_dim = problem.head_dim;
  params->head_dim_v = problem.head_dim_v;
  params->heads_per_kv_head = int(problem.queries_per_kv_head());
  params->schedule = key_schedule(problem, plan);
  params->schedule.sequences = list;
  if (c.terms != BiasTerms::kNone)
    params->biased = bias_params(problem, c.terms, params->scale_log2);
  if (c.bias_tiles())
    FLASH3_CHECK(encode_bias(problem.bias, c.tile_m, &params->biased, &params->bias_tiles));
  if (plan.stores_dbias) FLASH3_CHECK(encode_tiles(problem.dbias, c.tile_m, &params->gradient));
  if (c.lists) params->mask = problem.mask_lists.memory();
  // Without rows nobody sets the ticket, and nobody needs it.
  params->ticket = workspace.all_tiles() > 0 ? ticket(problem, plan) : nullptr;
  return {};
}

bool lists_sequences(const BackwardProblem& problem, const BackwardPlan& plan) {
  return problem.is_ragged() && plan.grid > 0;
}

VarlenScheduleParams list_params(const BackwardProblem& problem, const BackwardPlan& plan) {
  char* const workspace = static_cast<char*>(problem.workspace);
  VarlenScheduleParams list = varlen_schedule_params(problem, plan);
  list.rows = reinterpret_cast<ListedSequence*>(workspace + plan.list_offset);
  list.first_tile = reinterpret_cast<int*>(workspace + plan.first_tile_offset);
  return list;
}

// Empty where none is made.
SequenceList sequence_list(const BackwardProblem& problem, const BackwardPlan& plan) {
  if (!lists_sequences(problem, plan)) return {};
  const VarlenScheduleParams list = list_params(problem, plan);
  return {list.rows, list.first_tile, list.batch};
}

void prepare_preprocess(const BackwardProblem& problem, const BackwardPlan& plan,
                        const BackwardWorkspace& workspace, Launches* launches) {
  const PreprocessParams params{workspace,
                                element_view(problem.dout, problem.sequences_q, problem.dtype),
                                element_view(problem.out, problem.sequences_q, problem.dtype),
                                row_view(problem.lse),
                                row_view(problem.dlse),
                                problem.head_dim_v,
                                ticket(problem, plan),
                                lists_sequences(problem, plan)};
  launches->add(runtime_launch<launch_preprocess>("launching the kernel before the backward kernel",
                                                  params, plan.kernel->element));
}

void prepare_sink(const BackwardProblem& problem, const BackwardWorkspace& workspace,
                  Launches* launches) {
  const SinkGradientParams params{workspace, sink_row(problem.sink), sink_row(problem.dsink)};
  launches->add(runtime_launch<launch_sink_gradient>("launching the sink's gradient", params));
}

Status prepare_main(const BackwardProblem& problem, const BackwardPlan& plan,
                    const BackwardWorkspace& workspace, Launches* launches) {
  const Sequences &of_q = problem.sequences_q, &of_k = problem.sequences_k;
  auto& params = launches->make<BackwardKernelParams>();
  FLASH3_CHECK(make_params(problem, plan, workspace, sequence_list(problem, plan), &params));
  prepare_copy(problem, tensor_rows(problem.k, of_k), plan.k, launches);
  prepare_copy(problem, tensor_rows(problem.v, of_k), plan.v, launches);
  prepare_copy(problem, tensor_rows(problem.q, of_q), plan.q, launches);
  prepare_copy(problem, tensor_rows(problem.dout, of_q), plan.dout, launches);
  const BackwardConfig& c = plan.kernel->config;
  launches->add_kernel(
      {plan.kernel->function, plan.grid, c.threads(), shared_memory_bytes(c), true}, &params,
      "launching the backward kernel");
  return {};
}

// What is added to scores has its gradient from what the main kernel read.
Status prepare_bias(const BackwardProblem& problem, const BackwardPlan& plan,
                    const BackwardWorkspace& workspace, Launches* launches) {
  const Sequences &of_q = problem.sequences_q, &of_k = problem.sequences_k;
  return prepare(
      problem, plan.bias,
      {plan.rows, load_view(problem, problem.q, of_q, plan.q),
       load_view(problem, problem.k, of_k, plan.k), load_view(problem, problem.v, of_k, plan.v),
       load_view(problem, problem.dout, of_q, plan.dout),
       plan.grid > 0 && workspace.all_tiles() > 0, workspace, sequence_list(problem, plan)},
      launches);
}

void prepare_convert(const BackwardProblem& problem, const BackwardWorkspace& workspace,
                     Launches* launches) {
  const ConvertParams params{workspace,
                             element_view(problem.dq, problem.sequences_q, problem.gradient_dtype),
                             problem.softmax_scale, problem.head_dim};
  launches->add(runtime_launch<launch_convert_dq>("launching dq's conversion", params,
                                                  float_type(problem.gradient_dtype)));
}

}  // namespace

Status prepare(const BackwardProblem& problem, const BackwardPlan& plan, Launches* launches) {
  const BackwardWorkspace workspace = backward_workspace(problem, plan);
  const bool has_rows = workspace.all_tiles() > 0;
  if (lists_sequences(problem, plan))
    launches->add([list = list_params(problem, plan)](void* stream) {
      return launch_varlen_schedule(list, stream);
    });
  // Blocks store the tiles that a mask leaves.
  if (plan.stores_dbias && may_hide(problem)) prepare_clear(problem.dbias, launches);
  if (has_rows) prepare_preprocess(problem, plan, workspace, launches);
  if (problem.dsink.given && problem.heads_q > 0) prepare_sink(problem, workspace, launches);
  if (plan.grid > 0) FLASH3_CHECK(prepare_main(problem, plan, workspace, launches));
  FLASH3_CHECK(prepare_bias(problem, plan, workspace, launches));
  if (has_rows) prepare_convert(problem, workspace, launches);
  return {};
}

}  // namespace flash3::cuda::sm90
