// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/interrupt.hpp"
#include "core/message.hpp"
#include "cpu/append.hpp"
#include "cpu/mask_reader.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cpu {
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
int tile_keys(const ForwardProblem& p, CpuTarget target, int64_t keys) {
  const int widest = std::max(p.score_dim(), p.head_dim_v);
  const bool pairs = p.kv_dtype == FLASH3_BFLOAT16 && target >= CpuTarget::kAvx3Zen4;
  int most = widest <= 128 ? 512 : widest <= kMaxHeadDim || pairs ? 256 : 128;
  if (p.mask_lists.given) most = kMaskBlock;  // a tile lies in one block of the mask
  return static_cast<int>(
      std::min<int64_t>(most, round_up(std::max<int64_t>(keys, 1), kKeyAlignment)));
}

// Multiply-adds of the whole call, or what reading K and V takes in their place.
double work_of(const ForwardProblem& p, CpuTarget target) {
  const double speed = target == CpuTarget::kAmx ? kAmxSpeed : 1;
  const double rows = static_cast<double>(p.heads_q) * static_cast<double>(most_queries(p)) / speed;
  const double bytes = static_cast<double>(p.batch * p.heads_k) * dtype_size(p.kv_dtype);
  const double per_key = static_cast<double>(p.seq_k) * (p.score_dim() + p.head_dim_v);
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

// q as the attention reads it lies after the parts.
void reserve_q(const ForwardProblem& p, AttentionPlan* plan) {
  const size_t bytes = transformed_q_bytes(p);
  if (bytes == 0) return;
  plan->q_offset = round_up(plan->workspace_size, kWorkspaceAlignment);
  plan->workspace_size = plan->q_offset + bytes;
}

// In a ragged batch the rows of a block follow from the sequence alone, so that its bits depend on
// neither its neighbours nor the threads. A long one has blocks enough to share out; half of the
// most costs a twentieth of the speed.
int tile_rows(const ForwardProblem& p, const AttentionPlan& plan, Index rows) {
  if (!p.is_ragged()) return plan.tile.rows;
  const int most = rows >= 8 * Index{kMaxTileRows} ? kMaxTileRows : kMaxTileRows / 2;
  return static_cast<int>(std::min<Index>(rows, most));
}

// Keys that these packed rows of a KV head see, more or less: of the first one, where a mask has
// its own for each.
double keys_seen_by(const ForwardProblem& p, const Sequence& s, Range rows) {
  const Index group = p.queries_per_kv_head();
  if (p.mask_lists.given)
    return kMaskBlock * MaskReader(p.mask_lists, s.batch).mean_blocks(rows, group, 0);
  return static_cast<double>(
      s.mask.keys({rows.begin / group, (rows.end - 1) / group + 1}, s.k.length).size());
}

// The blocks of rows of all sequences; lane l of one is part l % splits of KV head l / splits.
WorkList list_blocks(const ForwardProblem& p, const AttentionPlan& plan) {
  constexpr double kPackingRows = 16;  // whose products take as long as packing K and V
  WorkList list(p.heads_k * plan.splits);
  const Index group = p.queries_per_kv_head();
  for (Index b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    const Index rows = s.q.length * group;
    if (rows == 0) continue;
    const Index step = tile_rows(p, plan, rows);
    // Later rows see more keys under a causal mask.
    for (Index i = ceil_div(rows, step) - 1; i >= 0; --i) {
      const Range own{i * step, std::min((i + 1) * step, rows)};
      const double cost = (static_cast<double>(own.size()) + kPackingRows) *
                          (keys_seen_by(p, s, own) + 1) * (p.score_dim() + p.head_dim_v) /
                          static_cast<double>(plan.splits);
      list.add({b, i, cost, cost});
    }
  }
  return list;
}

// One unit of the list, and the tile that it is to be cut into.
AttentionTask task_of(const ForwardProblem& p, const AttentionPlan& plan, const WorkList& list,
                      int64_t unit, TileShape* tile) {
  const Block& block = list.block_of(unit);
  const int64_t lane = list.lane_of(unit), split = lane % plan.splits;
  AttentionTask task;
  task.problem = &p;
  task.sequence = sequence_of(p, block.sequence);
  task.kv_head = lane / plan.splits;
  const Index rows = task.sequence.q.length * p.queries_per_kv_head();
  *tile = {tile_rows(p, plan, rows), tile_keys(p, plan.target, task.sequence.k.length)};
  task.rows = {block.index * tile->rows, std::min<Index>((block.index + 1) * tile->rows, rows)};
  task.keys = {split * plan.split_keys,
               std::min<Index>((split + 1) * plan.split_keys, task.sequence.k.length)};
  if (plan.splits > 1) task.partial = split_space(p, plan).at(p.workspace, unit * plan.tile.rows);
  return task;
}

// Merges the parts of row i of a task: each is brought to the common max, then they add up.
void merge_row(const ForwardProblem& p, const AttentionPlan& plan, const AttentionTask& task,
               Index i) {
  const int64_t next = plan.tile.rows, next_out = next * p.head_dim_v;
  const float *part_max = task.partial.max + i, *part_sum = task.partial.sum + i,
              *part_out = task.partial.out + i * p.head_dim_v;
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < plan.splits; ++s) max = std::max(max, part_max[s * next]);
  const float origin = max == -std::numeric_limits<float>::infinity() ? 0.f : max;

  float out[kMaxValueDim] = {}, sum = 0;
  for (int64_t s = 0; s < plan.splits; ++s) {
    if (part_sum[s * next] == 0) continue;  // saw nothing
    const float scale = std::exp2(part_max[s * next] - origin);
    sum += part_sum[s * next] * scale;
    for (int d = 0; d < p.head_dim_v; ++d) out[d] += part_out[s * next_out + d] * scale;
  }
  const PackedRow at = packed_row(p.queries_per_kv_head(), task.kv_head, task.rows.begin + i);
  const RowEnd end = end_of_row(max, sum, p.sink, at.head);
  const Sequence& sequence = task.sequence;
  const int64_t offset = row_offset(p.out, sequence.batch, sequence.q, at.query, at.head);
  for (int d = 0; d < p.head_dim_v; ++d)
    store_float(p.out.data, p.out_dtype, offset + d,
                end.sum == 0 ? 0.f : out[d] * end.scale / end.sum);
  if (p.lse.data)
    p.lse.data[row_offset(p.lse, sequence, at.query, at.head)] = log_sum_exp(end.max, end.sum);
  if (p.max_logits.data)
    p.max_logits.data[row_offset(p.max_logits, sequence, at.query, at.head)] = max_logit(max);
}

void merge(const ForwardProblem& p, const AttentionPlan& plan, const WorkList& list) {
  for (int64_t unit = 0; unit < list.units(); unit += plan.splits) {
    TileShape tile;
    const AttentionTask task = task_of(p, plan, list, unit, &tile);
    for (Index i = 0; i < task.rows.size(); ++i) merge_row(p, plan, task, i);
  }
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// The tasks of a call and the memory that they take: all that can fail is in make().
class Tasks {
 public:
  explicit Tasks(const ForwardProblem& p) : list_(p.heads_k) {}

  Status make(const ForwardProblem& p, const AttentionPlan& plan) {
    list_ = list_blocks(p, plan);
    threads_ = plan.threads;
    if (p.is_ragged()) threads_ = std::min(threads_, threads_for(list_.work(), p.num_threads));
    list_.close(threads_);
    threads_ = static_cast<int>(std::min<int64_t>(threads_, list_.tasks()));
    if (threads_ == 0) return {};
    scratch_size_ =
        round_up(static_cast<int64_t>(plan.kernel->scratch_bytes(p, plan.tile)), kCacheLine);
    scratch_.reset(std::aligned_alloc(kCacheLine, scratch_size_ * static_cast<size_t>(threads_)));
    if (scratch_) return {};
    return {FLASH3_OUT_OF_MEMORY,
            message("no host memory for ", threads_, " × ", scratch_size_, " bytes of scratch")};
  }

  Status run(const ForwardProblem& p, const AttentionPlan& plan) const {
    if (threads_ == 0) return {};
    std::atomic<int64_t> next{0};
    Interrupt interrupt;
    run_workers(threads_, [&](int worker) {
      void* own = static_cast<char*>(scratch_.get()) + worker * scratch_size_;
      for (int64_t index; !interrupt.ends(worker) && (index = next.fetch_add(1)) < list_.tasks();)
        list_.for_each_unit(index, [&](int64_t unit) {
          TileShape tile;
          const AttentionTask task = task_of(p, plan, list_, unit, &tile);
          plan.kernel->run(task, tile, own);
        });
    });
    FLASH3_CHECK(interrupt.status());
    if (plan.splits > 1) merge(p, plan, list_);
    return {};
  }

 private:
  WorkList list_;
  int threads_ = 0;
  size_t scratch_size_ = 0;  // of one thread
  std::unique_ptr<void, Free> scratch_;
};

}  // namespace

AttentionPlan plan_attention(const ForwardProblem& p, std::optional<CpuTarget> target) {
  AttentionPlan plan;
  plan.target = target.value_or(best_target(p.kv_dtype));
  plan.kernel = kernel_of(plan.target);
  plan.tile.keys = tile_keys(p, plan.target, p.seq_k);
  plan.split_keys = std::max<int64_t>(p.seq_k, 1);
  if (!p.has_output()) {
    plan.why = "no output element: nothing to compute";
    return plan;
  }

  plan.threads = threads_for(work_of(p, plan.target), p.num_threads);
  const auto count = [](int64_t n, const char* what) {
    return message(n, " ", what, n == 1 ? "" : "s");
  };

  const int64_t heads = p.batch * p.heads_k, rows = p.seq_q * p.queries_per_kv_head();
  if (p.is_ragged()) {
    plan.tile.rows = tile_rows(p, plan, rows);
    plan.row_blocks = ceil_div(rows, plan.tile.rows);
    const int64_t most = most_queries(p) * p.queries_per_kv_head() / (kMaxTileRows / 2) + p.batch;
    plan.tasks = p.heads_k * std::min(p.batch * plan.row_blocks, most);
    plan.threads = static_cast<int>(std::min<int64_t>(plan.threads, plan.tasks));
    plan.why =
        message("blocks of the sequences' rows, the longest first, short ones together, for ",
                count(plan.threads, "thread"));
    reserve_q(p, &plan);
    return plan;
  }

  // Row blocks: large ones reuse the packed K and V more, several per thread balance the load.
  const int64_t threads = plan.threads;
  int64_t tile_rows = kMaxTileRows;
  while (tile_rows > kMinTileRows && heads * ceil_div(rows, tile_rows) < 4 * threads)
    tile_rows /= 2;
  plan.row_blocks = ceil_div(rows, tile_rows);
  plan.tile.rows = static_cast<int>(ceil_div(rows, plan.row_blocks));
  if (plan.target == CpuTarget::kAmx && plan.row_blocks > 1)
    plan.tile.rows = round_up(plan.tile.rows, kAmxRows);
  plan.row_blocks = ceil_div(rows, plan.tile.rows);
  plan.tasks = heads * plan.row_blocks;
  plan.why = message(plan.tasks, " blocks of rows for ", count(plan.threads, "thread"));

  // Too few blocks for the threads, or a few that they cannot share evenly: split the keys.
  const bool too_few = plan.tasks < threads;
  const bool uneven = plan.row_blocks == 1 && plan.tasks < 4 * threads && plan.tasks % threads != 0;
  if (too_few || uneven) {
    const int64_t wanted = ceil_div((too_few ? 2 : 4) * threads, plan.tasks);
    const int64_t keys = std::max(kMinSplitKeys, ceil_div(p.seq_k, wanted));
    plan.split_keys = round_up(keys, plan.tile.keys);
    plan.splits = std::max<int64_t>(1, ceil_div(p.seq_k, plan.split_keys));
    plan.tasks *= plan.splits;
    if (plan.splits > 1)
      plan.why += too_few ? ": too few, so that the keys are split too"
                          : ": uneven, so that the keys are split too";
  }
  plan.threads = static_cast<int>(std::min<int64_t>(plan.threads, plan.tasks));
  plan.workspace_size = split_space(p, plan).floats() * sizeof(float);
  reserve_q(p, &plan);
  return plan;
}

Status run_attention(const ForwardProblem& p, const AttentionPlan& plan) {
  if (p.is_empty()) return {};
  if (p.is_ragged()) FLASH3_CHECK(check_lengths(p));
  // All that can fail comes before the cache is written.
  const Preparation first(p);
  Tasks tasks(p);
  if (p.has_output()) FLASH3_CHECK(tasks.make(p, plan));

  first.append_keys();
  if (!p.has_output()) return {};
  ForwardProblem transformed = p;
  if (p.transforms_q())
    transformed.q = first.transform_q(static_cast<char*>(p.workspace) + plan.q_offset);
  return tasks.run(transformed, plan);
}

}  // namespace flash3::cpu
