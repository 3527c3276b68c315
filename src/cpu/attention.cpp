#include "cpu/attention.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "core/convert.hpp"
#include "cpu/parallel.hpp"

namespace flash3 {
namespace {

// A task's rows amortise the packing of K and V; more than this and its sums leave the second-level
// cache. A multiple of the strips of 6 and of 32 rows.
constexpr int kMaxTileRows = 768;
constexpr int kMinTileRows = 48;

constexpr double kAmxSpeed = 4;  // multiply-adds in the time of one, softmax included
constexpr int kAmxRows = 32;     // of a strip

// Keys that pay for one more part of a split row.
constexpr int64_t kMinSplitKeys = 1024;

constexpr size_t kCacheLine = 64;

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

const AttentionKernel* kernel_of(CpuTarget target) {
  switch (target) {
#if defined(__x86_64__)
    case CpuTarget::kAvx2: return &kAvx2Kernel;
    case CpuTarget::kAvx3: return &kAvx3Kernel;
    case CpuTarget::kAvx3Zen4: return &kAvx3Zen4Kernel;
    case CpuTarget::kAmx: return &kAmxKernel;
#endif
    default: return &kBaselineKernel;
  }
}

// Packed K and V of a tile stay within half a megabyte or so of second-level cache; the scores and
// weights of a strip within the first level. AMX takes the same size; it has been tried there
// only once, without interleaving.
int tile_keys(const ForwardProblem& p) {
  const int dims = std::max(p.head_dim, p.head_dim_v);
  const int keys = dims <= 128 ? 512 : 256;
  return static_cast<int>(
      std::min<int64_t>(keys, round_up(std::max<int64_t>(p.seq_k, 1), kKeyAlignment)));
}

// Multiply-adds of the whole call, or what reading K and V takes in their place.
double work_of(const ForwardProblem& p, CpuTarget target) {
  const double speed = target == CpuTarget::kAmx ? kAmxSpeed : 1;
  const double rows =
      static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seq_q) / speed;
  const double bytes = static_cast<double>(p.batch * p.heads_k) * dtype_size(p.dtype);
  const double per_key = static_cast<double>(p.seq_k) * (p.head_dim + p.head_dim_v);
  return std::max(rows, 4 * bytes) * per_key;
}

// The workspace: out, max and sum of every row of every part.
struct SplitSpace {
  int64_t rows, dim;
  size_t floats() const { return static_cast<size_t>(rows * (dim + 2)); }
  Partial at(void* workspace, int64_t row) const {
    float* base = static_cast<float*>(workspace);
    return {base + row * dim, base + rows * dim + row, base + rows * (dim + 1) + row};
  }
};

SplitSpace split_space(const ForwardProblem& p, const AttentionPlan& plan) {
  return {plan.splits > 1 ? plan.tasks * plan.tile.rows : 0, p.head_dim_v};
}

struct TaskPosition {
  int64_t batch, kv_head, row_block, split;
};

// Later rows see more keys under a causal mask: long tasks come first, so that no thread is left
// with one at the end.
TaskPosition position(const ForwardProblem& p, const AttentionPlan& plan, int64_t task) {
  const int64_t split = task % plan.splits;
  task /= plan.splits;
  const int64_t heads = p.batch * p.heads_k, head = task % heads;
  return {head / p.heads_k, head % p.heads_k, plan.row_blocks - 1 - task / heads, split};
}

Range rows_of(const ForwardProblem& p, const AttentionPlan& plan, int64_t row_block) {
  const Index begin = row_block * plan.tile.rows;
  return {begin, std::min<Index>(begin + plan.tile.rows, p.seq_q * p.queries_per_kv_head())};
}

void run_one(const ForwardProblem& p, const AttentionPlan& plan, int64_t index, void* scratch) {
  const TaskPosition at = position(p, plan, index);
  AttentionTask task;
  task.problem = &p;
  task.batch = at.batch;
  task.kv_head = at.kv_head;
  task.rows = rows_of(p, plan, at.row_block);
  task.keys = {at.split * plan.split_keys,
               std::min<Index>((at.split + 1) * plan.split_keys, p.seq_k)};
  if (plan.splits > 1) task.partial = split_space(p, plan).at(p.workspace, index * plan.tile.rows);
  plan.kernel->run(task, plan.tile, scratch);
}

// Merges the parts of one row: each is brought to the common max, then they add up.
void merge_row(const ForwardProblem& p, const AttentionPlan& plan, const TaskPosition& at,
               Index row, const Partial& first) {
  const int64_t next_out = plan.tile.rows * p.head_dim_v, next = plan.tile.rows;
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < plan.splits; ++s) max = std::max(max, first.max[s * next]);
  const float origin = max == -std::numeric_limits<float>::infinity() ? 0.f : max;

  float out[kMaxHeadDim] = {}, sum = 0;
  for (int64_t s = 0; s < plan.splits; ++s) {
    const float part_sum = first.sum[s * next];
    if (part_sum == 0) continue;  // saw nothing
    const float scale = std::exp2(first.max[s * next] - origin);
    sum += part_sum * scale;
    for (int d = 0; d < p.head_dim_v; ++d) out[d] += first.out[s * next_out + d] * scale;
  }
  const int64_t group = p.queries_per_kv_head();
  const int64_t query = row / group, head = at.kv_head * group + row % group;
  const int64_t offset =
      at.batch * p.out.stride_batch + query * p.out.stride_seq + head * p.out.stride_head;
  for (int d = 0; d < p.head_dim_v; ++d)
    store_float(p.out.data, p.dtype, offset + d, sum == 0 ? 0.f : out[d] / sum);
  if (p.lse.data)
    p.lse.data[at.batch * p.lse.stride_batch + head * p.lse.stride_head + query] =
        log_sum_exp(max, sum);
}

void merge(const ForwardProblem& p, const AttentionPlan& plan) {
  const SplitSpace space = split_space(p, plan);
  for (int64_t task = 0; task < plan.tasks; task += plan.splits) {
    const TaskPosition at = position(p, plan, task);
    const Range rows = rows_of(p, plan, at.row_block);
    for (Index row = rows.begin; row < rows.end; ++row)
      merge_row(p, plan, at, row,
                space.at(p.workspace, task * plan.tile.rows + (row - rows.begin)));
  }
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

}  // namespace

AttentionPlan plan_attention(const ForwardProblem& p, std::optional<CpuTarget> target) {
  AttentionPlan plan;
  plan.target = target.value_or(best_target(p.dtype));
  plan.kernel = kernel_of(plan.target);
  plan.tile.keys = tile_keys(p);
  plan.split_keys = std::max<int64_t>(p.seq_k, 1);
  if (p.is_empty()) {
    plan.why = "no output element: nothing to run";
    return plan;
  }

  plan.threads = threads_for(work_of(p, plan.target), p.num_threads);

  // Row blocks: large ones reuse the packed K and V more, several per thread balance the load.
  const int64_t heads = p.batch * p.heads_k, rows = p.seq_q * p.queries_per_kv_head();
  int64_t tile_rows = kMaxTileRows;
  while (tile_rows > kMinTileRows && heads * div_up(rows, tile_rows) < 4 * plan.threads)
    tile_rows /= 2;
  plan.row_blocks = div_up(rows, tile_rows);
  plan.tile.rows = static_cast<int>(div_up(rows, plan.row_blocks));
  if (plan.target == CpuTarget::kAmx && plan.row_blocks > 1)
    plan.tile.rows = static_cast<int>(round_up(plan.tile.rows, kAmxRows));
  plan.row_blocks = div_up(rows, plan.tile.rows);
  plan.tasks = heads * plan.row_blocks;
  plan.why = std::to_string(plan.tasks) + " blocks of rows for " + std::to_string(plan.threads) +
             (plan.threads > 1 ? " threads" : " thread");

  // Too few blocks for the threads, or a few that they cannot share evenly: split the keys.
  const bool too_few = plan.tasks < plan.threads;
  const bool uneven =
      plan.row_blocks == 1 && plan.tasks < 4 * plan.threads && plan.tasks % plan.threads != 0;
  if (too_few || uneven) {
    const int64_t wanted = div_up((too_few ? 2 : 4) * plan.threads, plan.tasks);
    const int64_t keys = std::max(kMinSplitKeys, div_up(p.seq_k, wanted));
    plan.split_keys = round_up(keys, plan.tile.keys);
    plan.splits = std::max<int64_t>(1, div_up(p.seq_k, plan.split_keys));
    plan.tasks *= plan.splits;
    if (plan.splits > 1)
      plan.why += too_few ? ": too few, so that the keys are split too"
                          : ": uneven, so that the keys are split too";
  }
  plan.threads = static_cast<int>(std::min<int64_t>(plan.threads, plan.tasks));
  plan.workspace_size = split_space(p, plan).floats() * sizeof(float);
  return plan;
}

Status run_attention(const ForwardProblem& p, const AttentionPlan& plan) {
  if (plan.tasks == 0) return {};
  const size_t scratch_size =
      round_up(static_cast<int64_t>(plan.kernel->scratch_bytes(p, plan.tile)), kCacheLine);
  const std::unique_ptr<void, Free> scratch(
      std::aligned_alloc(kCacheLine, scratch_size * plan.threads));
  if (!scratch)
    return {FLASH3_OUT_OF_MEMORY, "no host memory for " + std::to_string(plan.threads) + " × " +
                                      std::to_string(scratch_size) + " bytes of scratch"};

  std::atomic<int64_t> next{0};
  run_workers(plan.threads, [&](int worker) {
    void* own = static_cast<char*>(scratch.get()) + worker * scratch_size;
    for (int64_t task; (task = next.fetch_add(1)) < plan.tasks;) run_one(p, plan, task, own);
  });
  if (plan.splits > 1) merge(p, plan);
  return {};
}

}  // namespace flash3
