#include "hopper/backward/launch.hpp"

#include <algorithm>
#include <cstdint>
#include <numbers>

#include "hopper/backward/params.h"
#include "hopper/backward/rows.hpp"
#include "hopper/cuda_status.hpp"
#include "hopper/overlap.hpp"
#include "hopper/sink.hpp"
#include "hopper/tensor_map.hpp"

namespace flash3::hopper {
namespace {

ElementView element_view(const TensorView& view) {
  return {static_cast<unsigned short*>(view.data), view.stride_batch, view.stride_seq,
          view.stride_head, tma_can_address(view)};
}

RowView row_view(const LseView& view) { return {view.data, view.stride_batch, view.stride_head}; }

BackwardRows backward_rows(const BackwardProblem& problem, const BackwardPlan& plan) {
  char* const workspace = static_cast<char*>(problem.workspace);
  const auto at = [&](size_t offset) { return reinterpret_cast<float*>(workspace + offset); };
  const BackwardConfig& c = plan.kernel->config;
  return {int(problem.batch),
          int(problem.heads_q),
          int(problem.seq_q),
          plan.padded_q,
          at(plan.lse_offset),
          at(plan.delta_offset),
          at(plan.dq_offset),
          c.head_dim,
          plan.deterministic ? reinterpret_cast<int*>(workspace + plan.turns_offset) : nullptr,
          c.tile_m};
}

int* ticket(const BackwardProblem& problem, const BackwardPlan& plan) {
  if (!plan.deterministic) return nullptr;
  return reinterpret_cast<int*>(static_cast<char*>(problem.workspace) + plan.ticket_offset);
}

Status make_params(const BackwardProblem& problem, const BackwardPlan& plan,
                   const BackwardRows& rows, BackwardParams* params) {
  const BackwardConfig& c = plan.kernel->config;
  TensorView k, v;
  FLASH3_CHECK(input_view(problem, problem.k, plan.k, &k));
  FLASH3_CHECK(input_view(problem, problem.v, plan.v, &v));
  FLASH3_CHECK(encode_key_map(k, c.tile_n(), box_columns(c.head_dim), &params->k));
  FLASH3_CHECK(encode_key_map(v, c.tile_n(), box_columns(c.head_dim_v), &params->v));
  if (rows.padded_q > 0) {
    TensorView q, dout;
    FLASH3_CHECK(input_view(problem, problem.q, plan.q, &q));
    FLASH3_CHECK(input_view(problem, problem.dout, plan.dout, &dout));
    FLASH3_CHECK(encode_key_map(q, c.tile_m, box_columns(c.head_dim), &params->q));
    FLASH3_CHECK(encode_key_map(dout, c.tile_m, box_columns(c.head_dim_v), &params->dout));
  } else {
    params->q = params->dout = params->k;  // valid, and never loaded from
  }
  params->dk_by_tma = plan.dk_by_tma;
  params->dv_by_tma = plan.dv_by_tma;
  if (plan.dk_by_tma)
    FLASH3_CHECK(encode_key_map(problem.dk, 64, box_columns(c.head_dim), &params->dk));
  if (plan.dv_by_tma)
    FLASH3_CHECK(encode_key_map(problem.dv, 64, box_columns(c.head_dim_v), &params->dv));
  params->dk_out = element_view(problem.dk);
  params->dv_out = element_view(problem.dv);

  params->rows = rows;
  params->softmax_scale = problem.softmax_scale;
  params->scale_log2 = problem.softmax_scale * std::numbers::log2e_v<float>;
  params->head_dim = problem.head_dim;
  params->head_dim_v = problem.head_dim_v;
  params->seq_k = int(problem.seq_k);
  params->heads_k = int(problem.heads_k);
  params->heads_per_kv_head = int(problem.queries_per_kv_head());
  constexpr Index kLimit = Index{1} << 30;
  params->queries.lo = std::clamp<Index>(-problem.band().hi, -kLimit, kLimit);
  params->queries.hi = std::clamp<Index>(-problem.band().lo, -kLimit, kLimit);
  // Query + 0 ≥ key + 63 + lo, and query + 63 ≤ key + hi; cut so that no sum overflows.
  const Index lo = params->queries.lo, hi = params->queries.hi;
  params->first_whole = int(problem.seq_k + (64 - 1) + std::max<Index>(lo, -kLimit / 2));
  params->whole_steps = int(std::min<Index>(
      hi - std::max<Index>(lo, -kLimit / 2) - (64 - 1) - (c.step_queries() - 1), kLimit));
  params->n_tiles = plan.n_tiles;
  params->kv_heads = plan.kv_heads;
  params->kv_heads_at_a_time = plan.kv_heads_at_a_time;
  // Without rows nobody sets the ticket, and nobody needs it.
  params->ticket = rows.padded_q > 0 ? ticket(problem, plan) : nullptr;
  return {};
}

Status launch_main(const BackwardProblem& problem, const BackwardPlan& plan,
                   const BackwardRows& rows) {
  BackwardParams params{};
  FLASH3_CHECK(make_params(problem, plan, rows, &params));
  const BackwardConfig& c = plan.kernel->config;
  FLASH3_CHECK(cuda_status(
      cudaFuncSetAttribute(plan.kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           c.shared_bytes()),
      "reserving shared memory"));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(plan.grid));
  launch.blockDim = dim3(unsigned(c.threads()));
  launch.dynamicSmemBytes = size_t(c.shared_bytes());
  launch.stream = static_cast<cudaStream_t>(problem.stream);
  cudaLaunchAttribute overlap = overlap_with_previous_kernel();
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  void* arguments[] = {&params};
  return cuda_status(cudaLaunchKernelExC(&launch, plan.kernel->function, arguments),
                     "launching the backward kernel");
}

}  // namespace

Status launch_backward(const BackwardProblem& problem, const BackwardPlan& plan) {
  const BackwardRows rows = backward_rows(problem, plan);
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  const Element element = plan.kernel->element;
  const bool has_rows = rows.batch > 0 && rows.heads_q > 0 && rows.padded_q > 0;
  if (has_rows) {
    const PreprocessParams params{rows,
                                  element_view(problem.dout),
                                  element_view(problem.out),
                                  row_view(problem.lse),
                                  row_view(problem.dlse),
                                  problem.head_dim_v,
                                  ticket(problem, plan)};
    FLASH3_CHECK(cuda_status(launch_preprocess(params, element, stream),
                             "launching the kernel before the backward kernel"));
  }
  if (problem.dsink.given && problem.heads_q > 0) {
    const SinkGradientParams params{rows, sink_row(problem.sink), sink_row(problem.dsink)};
    FLASH3_CHECK(
        cuda_status(launch_sink_gradient(params, stream), "launching the sink's gradient"));
  }
  if (plan.grid > 0) FLASH3_CHECK(launch_main(problem, plan, rows));
  if (!has_rows) return {};
  const BackwardConfig& c = plan.kernel->config;
  const ConvertParams params{rows,
                             element_view(problem.dq),
                             problem.softmax_scale,
                             problem.head_dim,
                             c.tile_m,
                             c.dq_queries(),
                             c.tall()};
  return cuda_status(launch_convert_dq(params, element, stream), "launching dq's conversion");
}

}  // namespace flash3::hopper
