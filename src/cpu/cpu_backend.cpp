// SPDX-License-Identifier: Apache-2.0
// The CPU backend: what core/backend.hpp asks, answered by plan_attention, plan_backward,
// plan_quantize and plan_merge.
#include <algorithm>
#include <cctype>
#include <limits>
#include <memory>
#include <utility>

#include "core/backend.hpp"
#include "core/explain.hpp"
#include "core/message.hpp"
#include "cpu/attention.hpp"
#include "cpu/backward.hpp"
#include "cpu/mask.hpp"
#include "cpu/parallel.hpp"
#include "cpu/rows.hpp"

namespace flash3 {
namespace {

using namespace cpu;

const char* short_dtype(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16: return "fp16";
    case FLASH3_BFLOAT16: return "bf16";
    case FLASH3_FLOAT8_E4M3: return "e4m3";
    default: return "fp32";
  }
}

std::string kernel_id(const char* direction, const Problem& p, CpuTarget cpu_target) {
  std::string target = target_name(cpu_target);
  std::transform(target.begin(), target.end(), target.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return message("cpu_", direction, "_", short_dtype(p.dtype),
                 p.kv_dtype == p.dtype ? "" : message("_", short_dtype(p.kv_dtype)), "_", target);
}

const char* arithmetic(const Problem& p, CpuTarget target) {
  const flash3_dtype dtype = p.dtype;
  if (p.kv_dtype != dtype) return "converted to float32, k and v from e4m3 times their scales";
  if (dtype == FLASH3_BFLOAT16 && target >= CpuTarget::kAvx3Zen4)
    return target == CpuTarget::kAmx ? "bfloat16 tiles, summed in float32"
                                     : "bfloat16 dot products, summed in float32";
  if (dtype == FLASH3_FLOAT8_E4M3)
    return "e4m3 values in float32 products; weights rounded to e4m3 times 256";
  return dtype == FLASH3_FLOAT32 ? "float32" : "converted to float32";
}

// A ragged batch has its lengths read when it runs: this is the most that there can be.
std::string tasks_on(const Problem& problem, int64_t tasks, int threads) {
  return message(problem.is_ragged() ? "at most " : "", tasks, " on ", threads,
                 threads == 1 ? " thread" : " threads");
}

// Nothing where no query heads share a KV head.
void add_packing(const Problem& problem, Explanation* out) {
  if (problem.queries_per_kv_head() > 1)
    out->add("rows", message("the ", problem.queries_per_kv_head(),
                             " query heads of a KV head side by side, so that they share K and V"));
}

std::string tile_name(TileShape tile) { return message(tile.rows, " rows x ", tile.keys, " keys"); }

void explain(const ForwardProblem& problem, const AttentionPlan& plan, Explanation* out) {
  out->add("kernel", kernel_id("fwd", problem, plan.target));
  out->add("why", plan.why);
  out->add("instructions", target_name(plan.target));
  out->add("arithmetic", arithmetic(problem, plan.target));
  out->add("tile", tile_name(plan.tile));
  add_packing(problem, out);
  const std::string keys = problem.append.given ? "the new keys and values go into the cache" : "",
                    q = describe_transformed_q(problem);
  if (!keys.empty() || !q.empty())
    out->add("first", message(keys, !keys.empty() && !q.empty() ? ", and " : "", q,
                              q.empty() ? "" : " into the workspace"));
  out->add("tasks", tasks_on(problem, plan.tasks, plan.threads));
  if (plan.splits > 1)
    out->add("split", message(plan.splits, " parts of ", plan.split_keys, " keys, then a merge"));
}

void explain(const BackwardProblem& problem, const BackwardPlan& plan, Explanation* out) {
  out->add("kernel", kernel_id("bwd", problem, plan.target));
  out->add("why", plan.why);
  out->add("instructions", target_name(plan.target));
  out->add("arithmetic", arithmetic(problem, plan.target));
  out->add("tile", tile_name(plan.tile));
  add_packing(problem, out);
  out->add("tasks", tasks_on(problem, plan.tasks, plan.threads));
  out->add("deterministic", "the same bits on any number of threads, asked for or not");
}

void explain(const QuantizeProblem& problem, const QuantizePlan& plan, Explanation* out) {
  out->add("kernel", message("cpu_quantize_", short_dtype(problem.dtype)));
  out->add("tasks",
           message(plan.blocks, plan.blocks == 1 ? " block" : " blocks", " of up to ", kScaleBlock,
                   " tokens of a head, ",
                   plan.has_wide_scales ? "read twice where a scale is of more than one, " : "",
                   "on ", plan.threads, plan.threads == 1 ? " thread" : " threads"));
}

void explain(const MergeProblem& problem, const MergePlan& plan, Explanation* out) {
  out->add("kernel", message("cpu_merge_", short_dtype(problem.out_dtype)));
  out->add("tasks", message(problem.rows * problem.heads, " rows of heads, on ", plan.threads,
                            plan.threads == 1 ? " thread" : " threads"));
}

// A call as the backend's functions know it: what they have decided, and how they run it.
template <AnyProblem P, class Decisions, Status (*kRun)(const P&, const Decisions&)>
class CpuPlan final : public Plan<P> {
 public:
  explicit CpuPlan(Decisions decisions) : decisions_(std::move(decisions)) {}

  size_t workspace_bytes() const override { return decisions_.workspace_size; }
  void explain(const P& problem, Explanation* out) const override {
    flash3::explain(problem, decisions_, out);
  }
  Status launch(const P& problem) const override { return kRun(problem, decisions_); }

 private:
  Decisions decisions_;
};

class CpuBackend final : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_CPU; }
  const char* name() const override { return "cpu"; }
  Status available() const override { return {}; }

  std::string describe() const override {
    return message(target_name(supported_targets().back()), ", ", available_threads(),
                   available_threads() == 1 ? " thread" : " threads");
  }

  // Only the hopper backend can tell device memory (Backend::owns); dispatch asks it.
  Status can_access(const void*, bool* accessible) const override {
    *accessible = true;
    return {};
  }

  Status plan(const ForwardProblem& problem, PlanPointer<ForwardProblem>* plan) const override {
    *plan = std::make_unique<CpuPlan<ForwardProblem, AttentionPlan, run_attention>>(
        plan_attention(problem));
    return {};
  }
  Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const override {
    *plan = std::make_unique<CpuPlan<BackwardProblem, BackwardPlan, run_backward>>(
        plan_backward(problem));
    return {};
  }
  Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const override {
    *plan = std::make_unique<CpuPlan<QuantizeProblem, QuantizePlan, run_quantize>>(
        plan_quantize(problem));
    return {};
  }
  Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const override {
    *plan = std::make_unique<CpuPlan<MergeProblem, MergePlan, run_merge>>(plan_merge(problem));
    return {};
  }

  Status make_mask(const MaskProblem& problem) const override { return cpu::make_mask(problem); }
  Status make_dropout_mask(const DropoutMaskProblem& problem) const override {
    return cpu::make_dropout_mask(problem);
  }
  Status read_mask_counts(const MaskShape&, const void* data, void*,
                          MaskCounts* counts) const override {
    *counts = *static_cast<const MaskCounts*>(data);
    return {};
  }

  Status max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                     void*) const override {
    for (int64_t head = 0; head < heads; ++head) {
      float largest = -std::numeric_limits<float>::infinity();
      for (int64_t row = 0; row < count; ++row)
        largest = std::max(largest, rows.data[head * rows.stride_head + row]);
      out.data[head * out.stride_head] = largest;
    }
    return {};
  }
  Status fill_padding(const Padding& padding, void*) const override {
    cpu::fill_padding(padding);
    return {};
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace flash3
