// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward/bias_gradient.hpp"

#include <algorithm>

#include "core/arithmetic.hpp"
#include "core/message.hpp"
#include "cuda/device/score/softcap.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/sm90/backward/bias_gradient_kernels.hpp"
#include "cuda/sm90/host/bias_params.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {

namespace {

BiasGradientKernel kernel_of(const BackwardProblem& problem, int dim, bool by_distance) {
  const Element element = element_type(problem.dtype);
  if (dim == 64) return bias_gradient_kernel_of<64>(element, by_distance);
  if (dim == 128) return bias_gradient_kernel_of<128>(element, by_distance);
  return bias_gradient_kernel_of<256>(element, by_distance);
}

PairGradient pair_gradient(const BiasView& view) {
  PairGradient to{};
  if (!view.given) return to;
  to.data = view.data;
  to.type = float_type(view.dtype);
  to.stride_batch = view.stride_batch, to.stride_head = view.stride_head;
  to.stride_row = view.stride_row, to.stride_key = view.stride_key;
  to.batch = int(view.batch), to.heads = int(view.heads);
  to.rows = int(view.rows), to.keys = int(view.keys);
  to.sums_batch = view.sums_batch, to.sums_heads = view.sums_heads;
  to.sums_rows = view.sums_rows;
  return to;
}

PairGradient pairs_of(const BackwardProblem& problem) {
  PairGradient to = pair_gradient(problem.dbias);
  to.by_sequence = problem.sequences_q.packed && to.rows != 1;
  return to;
}

Status encode_maps(const BackwardInputs& inputs, int dim, BiasGradientParams* params) {
  if (!inputs.has_pairs) return {};  // no tile is loaded
  const auto encode = [&](const TensorView& view, TensorMap* map, RowMap* rows) {
    return encode_map(view, inputs.rows, {64, box_columns(dim)}, map, rows);
  };
  FLASH3_CHECK(encode(inputs.q, &params->q, &params->q_rows));
  FLASH3_CHECK(encode(inputs.dout, &params->dout, &params->dout_rows));
  FLASH3_CHECK(encode(inputs.k, &params->k, &params->k_rows));
  return encode(inputs.v, &params->v, &params->v_rows);
}

void add_kernel(const BiasGradientKernel& kernel, int64_t blocks, BiasGradientParams* params,
                Launches* launches) {
  launches->add_kernel({kernel.function, int(blocks), kernel.threads, kernel.shared_bytes}, params,
                       "launching the gradients of biases");
}

// Whether the terms of a pair are those of the pair of any other sequence.
bool shares_terms(const BackwardProblem& problem) {
  const BiasView& bias = problem.bias;
  return !problem.is_ragged() && (bias.batch <= 1 || bias.stride_batch == 0) &&
         !problem.alibi_slopes.of_batch;
}

// The blocks of the kernel: tiles of keys, tiles of queries, and all of them.
struct PairBlocks {
  int x, y;
  int64_t all;
};
PairBlocks pair_blocks(const PairGradient& to, const BiasGradientKernel& kernel, int m_tiles,
                       int batch) {
  const int x = ceil_div(to.keys, kernel.tile_n);
  const int y = to.sums_rows ? 1 : to.by_sequence ? m_tiles : ceil_div(to.rows, kernel.tile_m);
  return {x, y, int64_t{x} * y * to.heads * (to.by_sequence ? batch : to.batch)};
}

// A sum over sequences by so few blocks that they leave multiprocessors idle is done in parts.
PairParts pair_parts(const BackwardProblem& problem, const Device& device,
                     const BiasGradientKernel& kernel, int m_tiles) {
  const PairGradient to = pairs_of(problem);
  const int64_t blocks = pair_blocks(to, kernel, m_tiles, int(problem.batch)).all;
  if (!to.sums_batch || to.by_sequence || blocks == 0) return {nullptr, 1, int(problem.batch)};
  const int64_t most = std::min<int64_t>(device.multiprocessors / blocks, problem.batch);
  const int each = int(ceil_div<int64_t>(problem.batch, std::max<int64_t>(most, 1)));
  return {nullptr, int(ceil_div<int64_t>(problem.batch, each)), each};
}

// Where a part is written.
PairGradient part_of(const PairGradient& whole, const PairParts& parts) {
  PairGradient to = whole;
  to.data = parts.data, to.type = FloatType::kFloat32, to.batch = parts.parts;
  to.stride_key = 1, to.stride_row = to.keys;
  to.stride_head = to.stride_row * to.rows, to.stride_batch = to.stride_head * to.heads;
  return to;
}

void prepare_pairs(const BackwardProblem& problem, const BiasGradientPlan& plan,
                   const BiasGradientParams& common, Launches* launches) {
  const BiasGradientKernel kernel = kernel_of(problem, plan.dim, false);
  auto& params = launches->make<BiasGradientParams>();
  params = common;
  const PairGradient to = pairs_of(problem);
  if (to.by_sequence) prepare_clear(problem.dbias, launches);
  params.pairs = to, params.parts = plan.parts;
  if (plan.parts.parts > 1) {
    params.parts.data =
        reinterpret_cast<float*>(static_cast<char*>(problem.workspace) + plan.parts_offset);
    params.pairs = part_of(to, params.parts);
  }
  params.same_terms = shares_terms(problem) && !to.sums_heads && !to.sums_rows;
  const PairBlocks blocks = pair_blocks(params.pairs, kernel, plan.m_tiles, common.batch);
  if (blocks.all == 0) return;
  params.blocks_x = blocks.x, params.blocks_y = blocks.y;
  add_kernel(kernel, blocks.all, &params, launches);
  if (plan.parts.parts > 1)
    launches->add(runtime_launch<launch_sum_parts>("summing the parts of dbias", params.parts, to));
}

void prepare_distances(const BackwardProblem& problem, const BiasGradientPlan& plan,
                       const BiasGradientParams& common, Launches* launches) {
  const BiasGradientKernel kernel = kernel_of(problem, plan.dim, true);
  auto& params = launches->make<BiasGradientParams>();
  params = common;
  params.same_terms = shares_terms(problem) && !problem.bias.given;
  params.diagonals = plan.diagonals;
  params.diagonals.data =
      reinterpret_cast<float*>(static_cast<char*>(problem.workspace) + plan.sums_offset);
  params.blocks_x = plan.diagonals.diagonals, params.blocks_y = int(problem.heads_q);
  const int64_t blocks = int64_t{params.blocks_x} * params.blocks_y * plan.diagonals.sequences;
  if (blocks > 0) add_kernel(kernel, blocks, &params, launches);
  DistanceGradients to{};
  to.sums = params.diagonals;
  if (common.batch == 0) to.sums.sequences = 0;
  to.rule = common.rule;
  to.one_length = common.one_length;
  to.sequences = common.sequences;
  to.heads_q = common.heads_q;
  to.keys_per_query_tile = kernel.tile_m / kernel.tile_n;
  const BiasTableView& table = problem.dbias_table;
  if (table.given) {
    to.table = table.data;
    to.table_head = table.stride_head;
    to.table_heads = int(table.heads);
    to.reach = int(table.distance);
  }
  const HeadsView& slopes = problem.dalibi_slopes;
  if (slopes.given) {
    to.slopes = slopes.data;
    to.slopes_batch = slopes.stride_batch, to.slopes_head = slopes.stride_head;
    to.slopes_batches = slopes.of_batch ? int(problem.batch) : 1;
  }
  launches->add(runtime_launch<launch_distance_gradients>("launching gradients by distance", to));
}

// Blocks, which are counted in 32 bits, and along the second axis of a grid in 16.
Status check_counts(const BackwardProblem& problem, const BiasGradientKernel& kernel) {
  constexpr Index kMostBlocks = kMostCounted, kMostBatches = 65535;
  const BiasView& pairs = problem.dbias;
  const Index tiles = ceil_div(pairs.keys, Index{kernel.tile_n}) *
                      (ceil_div(pairs.rows, Index{kernel.tile_m}) + problem.batch);
  if (pairs.given && tiles * std::max<Index>(pairs.heads * pairs.batch, 1) > kMostBlocks)
    return unsupported(
        message("dbias has ", pairs.batch, " * ", pairs.heads, " * ", pairs.rows, " * ", pairs.keys,
                " elements but the hopper backend counts tiles of it up to ", kMostBlocks));
  if (problem.dalibi_slopes.of_batch && problem.batch > kMostBatches)
    return unsupported(message("dalibi_slopes is of ", problem.batch,
                               " sequences but the hopper backend takes up to ", kMostBatches));
  return {};
}

}  // namespace

void prepare_clear(const BiasView& dbias, Launches* launches) {
  launches->add(runtime_launch<launch_clear_pairs>("clearing dbias", pair_gradient(dbias)));
}

Status plan(const BackwardProblem& problem, const Device& device, bool stored, size_t* workspace,
            BiasGradientPlan* plan) {
  plan->pairs = problem.dbias.given && !stored;
  plan->by_distance = problem.dbias_table.given || problem.dalibi_slopes.given;
  const int widest = std::max(problem.head_dim, problem.head_dim_v);
  plan->dim = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  const BiasGradientKernel kernel = kernel_of(problem, plan->dim, plan->by_distance);
  plan->m_tiles = int(ceil_div(problem.seq_q, Index{kernel.tile_m}));
  FLASH3_CHECK(check_counts(problem, kernel));
  if (plan->pairs) {
    const BiasView& to = problem.dbias;
    plan->parts = pair_parts(problem, device, kernel_of(problem, plan->dim, false), plan->m_tiles);
    if (plan->parts.parts > 1)
      plan->parts_offset = reserve_workspace(
          size_t(plan->parts.parts) * size_t(to.heads * to.rows * to.keys) * sizeof(float),
          workspace);
  }
  if (!plan->by_distance) return {};
  const int n_tiles = int(ceil_div(problem.seq_k, Index{kernel.tile_n})),
            ratio = kernel.tile_m / kernel.tile_n;
  DiagonalSums& sums = plan->diagonals;
  const bool apart = problem.is_ragged() || problem.dalibi_slopes.of_batch;
  sums.sequences = apart ? int(problem.batch) : 1;
  sums.first = -ratio * std::max(plan->m_tiles - 1, 0);
  sums.diagonals = plan->m_tiles == 0 ? 0 : n_tiles - sums.first;
  plan->sums_offset =
      reserve_workspace(size_t(sums.sequences) * size_t(problem.heads_q) * size_t(sums.diagonals) *
                            DiagonalSums::kWindow * sizeof(float),
                        workspace);
  return {};
}

Status prepare(const BackwardProblem& problem, const BiasGradientPlan& plan,
               const BackwardInputs& inputs, Launches* launches) {
  if (!plan.pairs && !plan.by_distance) return {};
  BiasGradientParams common{};
  FLASH3_CHECK(encode_maps(inputs, plan.dim, &common));
  const bool capped = problem.softcap > 0.f;
  const float scale = (capped ? problem.softcap : problem.softmax_scale) * float(kLog2E);
  common.biased = bias_params(problem, BiasTerms::kAny, scale);
  if (capped) common.softcap = make_softcap(problem.softmax_scale, problem.softcap, 1);
  common.rule = tile_mask_rule(problem.mask_rule);
  common.lists = problem.mask_lists.given;
  if (common.lists) common.mask = problem.mask_lists.memory();
  common.query_tiles = inputs.workspace.tiles;
  common.lse_log2 = inputs.workspace.lse_log2;
  common.delta = inputs.workspace.delta;
  common.one_length.q_length = int(problem.seq_q);
  common.one_length.k_length = common.one_length.k_capacity = int(problem.seq_k);
  common.sequences = inputs.sequences;
  common.batch = inputs.has_pairs ? int(problem.batch) : 0;
  common.heads_q = int(problem.heads_q);
  common.heads_per_kv_head = int(problem.queries_per_kv_head());
  common.m_tiles = plan.m_tiles;
  if (plan.pairs) prepare_pairs(problem, plan, common, launches);
  if (plan.by_distance) prepare_distances(problem, plan, common, launches);
  return {};
}

}  // namespace flash3::cuda::sm90
