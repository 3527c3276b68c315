// SPDX-License-Identifier: Apache-2.0
// The Hopper backend: what core/backend.hpp asks, answered by forward/select,
// backward/select and quantize/launch.
#include <cuda_runtime_api.h>

#include <cmath>

#include "core/backend.hpp"
#include "core/message.hpp"
#include "hopper/backward/launch.hpp"
#include "hopper/forward/launch.hpp"
#include "hopper/forward/select.hpp"
#include "hopper/host/device_info.hpp"
#include "hopper/host/kernel_kind.hpp"
#include "hopper/quantize/launch.hpp"

namespace flash3 {
namespace {

using namespace hopper;

class HopperBackend final : public Backend {
 public:
  flash3_backend id() const override { return FLASH3_BACKEND_HOPPER; }
  const char* name() const override { return "hopper"; }

  Status available() const override {
    Device device;
    return current_device(&device);
  }

  std::string describe() const override {
    Device device;
    const Status status = current_device(&device);
    return status.ok() ? device_name(device) : status.message();
  }

  Status can_access(const void* address, bool* accessible) const override {
    *accessible = address == nullptr;
    return address == nullptr ? Status() : is_device_memory(address, accessible);
  }

  Status owns(const void* address, bool* owned) const override {
    *owned = false;
    return address == nullptr ? Status() : is_device_only_memory(address, owned);
  }

  Status supports(const ForwardProblem& problem) const override {
    ForwardPlan plan;
    return make_plan(problem, &plan);
  }

  size_t workspace_size(const ForwardProblem& problem) const override {
    ForwardPlan plan;
    return make_plan(problem, &plan).ok() ? plan.workspace_bytes : 0;
  }

  Status forward(const ForwardProblem& problem) const override {
    ForwardPlan plan;
    FLASH3_CHECK(make_plan(problem, &plan));
    return launch_forward(problem, plan);
  }

  void explain(const ForwardProblem& problem, Explanation* out) const override {
    ForwardPlan plan;
    const Status status = make_plan(problem, &plan);
    if (!status.ok()) {
      out->add("unsupported", status.message());
      return;
    }
    const ForwardConfig& c = plan.kernel->config;
    out->add("kernel", plan.kernel->id);
    out->add("why", message("the smallest tile that holds head_dim ", problem.head_dim,
                            " and head_dim_v ", problem.head_dim_v, "; ",
                            plan.slot_rows > 0 ? "the sequences of a tile mask each other"
                                               : explain_mask(problem)));
    explain_scores(c.score, out);
    out->add("tile", message(c.tile_m(), " rows x ", c.tile_n, " keys"));
    explain_heads(problem, plan, out);
    out->add("warpgroups", message("1 producer, ", c.warpgroups, " consumers of 64 rows",
                                   c.fp8() ? "; two warps of the producer transpose V" : ""));
    out->add("stages", message(c.stages, " of K, ", c.stages, " of V",
                               c.fp8() ? message(", ", c.raw_v_stages, " of V as it comes") : ""));
    explain_sequences(problem, plan, out);
    out->add("grid",
             message(plan.grid, " blocks of ", c.threads(), " threads, persistent over ",
                     problem.is_ragged() && plan.slot_rows == 0 ? "at most " : "", plan.tiles,
                     plan.dynamic ? " tiles, longest first, from a counter" : " tiles in turn"));
    out->add("shared memory", message(c.shared_bytes(), " bytes a block"));
    out->add("registers", message(c.producer_registers(), " a producer thread, ",
                                  c.consumer_registers(), " a consumer thread"));
    out->add("workspace", message(plan.workspace_bytes, " bytes"));
    explain_copy("q", plan.q, out);
    explain_copy("k", plan.k, out);
    explain_copy("v", plan.v, out);
    out->add("store",
             c.fp8() ? "from registers"
             : plan.out_by_tma
                 ? "TMA"
                 : "element by element: out's base, strides or rows are not multiples of 16 bytes");
  }

  Status supports(const BackwardProblem& problem) const override {
    BackwardPlan plan;
    return make_plan(problem, &plan);
  }

  size_t workspace_size(const BackwardProblem& problem) const override {
    BackwardPlan plan;
    return make_plan(problem, &plan).ok() ? plan.workspace_bytes : 0;
  }

  Status backward(const BackwardProblem& problem) const override {
    BackwardPlan plan;
    FLASH3_CHECK(make_plan(problem, &plan));
    return launch_backward(problem, plan);
  }

  void explain(const BackwardProblem& problem, Explanation* out) const override {
    BackwardPlan plan;
    const Status status = make_plan(problem, &plan);
    if (!status.ok()) {
      out->add("unsupported", status.message());
      return;
    }
    const BackwardConfig& c = plan.kernel->config;
    out->add("kernel", plan.kernel->id);
    out->add("why", message("the smallest tile that holds head_dim ", problem.head_dim,
                            " and head_dim_v ", problem.head_dim_v, "; ", explain_mask(problem)));
    explain_scores(c.score, out);
    out->add("tile", message(c.tile_m, " queries x ", c.tile_n, " keys"));
    out->add("warpgroups", message("1 producer, ", kConsumerWarpgroups, " consumers of 64 keys"));
    out->add("stages", message(kQueryStages, " of Q and dOut"));
    if (problem.is_ragged())
      out->add("sequences", message(problem.batch,
                                    ", longest first, listed by a kernel of their own: their "
                                    "lengths are read on the device"));
    out->add(
        "grid",
        message(plan.grid, " blocks of ", c.threads(), " threads",
                problem.is_ragged() ? "; those that the lengths leave no tile end at once" : ""));
    out->add("dq", message("float32 sums, added to by one block for each tile of keys, ",
                           plan.deterministic ? "in a fixed order" : "in any order"));
    out->add("shared memory", message(c.shared_bytes(), " bytes a block"));
    out->add("registers", message(c.producer_registers(), " a producer thread, ",
                                  c.consumer_registers(), " a consumer thread"));
    out->add("workspace", message(plan.workspace_bytes, " bytes"));
    explain_copy("q", plan.q, out);
    explain_copy("k", plan.k, out);
    explain_copy("v", plan.v, out);
    explain_copy("dout", plan.dout, out);
    const auto explain_store = [&](const char* name, bool by_tma) {
      out->add("store", message(name, by_tma ? " by TMA"
                                             : " element by element: its base, strides or rows are "
                                               "not multiples of 16 bytes"));
    };
    explain_store("dk", plan.dk_by_tma);
    explain_store("dv", plan.dv_by_tma);
  }

  Status supports(const QuantizeProblem& problem) const override {
    QuantizePlan plan;
    return make_plan(problem, &plan);
  }

  // Scales of more than a block are found in the scale tensors themselves.
  size_t workspace_size(const QuantizeProblem&) const override { return 0; }

  Status quantize(const QuantizeProblem& problem) const override {
    QuantizePlan plan;
    FLASH3_CHECK(make_plan(problem, &plan));
    return launch_quantize(problem, plan);
  }

  void explain(const QuantizeProblem& problem, Explanation* out) const override {
    QuantizePlan plan;
    const Status status = make_plan(problem, &plan);
    if (!status.ok()) {
      out->add("unsupported", status.message());
      return;
    }
    explain_quantize(problem, plan, out);
  }

 private:
  static std::string explain_mask(const Problem& problem) {
    if (!may_hide(problem)) return "no pair is masked";
    return "the mask is a band: only tiles on its edges are masked";
  }

  static void explain_scores(ScoreKind score, Explanation* out) {
    if (score == ScoreKind::kSoftcap)
      out->add("scores", "capped by a polynomial; those above half the cap are moved first");
  }

  static void explain_copy(const char* name, const PackedCopy& copy, Explanation* out) {
    if (!copy.needed) return;
    out->add("copy",
             message(name, " first goes to rows of ", copy.row,
                     " elements: TMA needs a 16-byte aligned base and strides of 16 bytes"));
  }

  // Rows, heads, and why: only where query heads share a KV head is there a choice.
  static void explain_heads(const ForwardProblem& problem, const ForwardPlan& plan,
                            Explanation* out) {
    const int heads = plan.pack.heads, queries = plan.kernel->config.warpgroups * plan.pack.queries;
    if (plan.slot_rows > 0) {
      out->add("rows", message("one query head and ", queries / plan.slot_rows,
                               " sequences a tile, ", plan.slot_rows, " rows each"));
    } else if (heads == 1) {
      out->add("rows", message("one query head a tile, ", queries, " queries"));
    } else {
      out->add("rows",
               message(heads, " of the ", problem.queries_per_kv_head(),
                       " query heads of a KV head share a tile, ", queries, " queries of each"));
    }
    if (!plan.rival.kernel) return;
    const auto describe = [](const ForwardChoice& choice) {
      if (choice.slot_rows > 0) return message("slots of ", choice.slot_rows, " rows");
      return choice.pack.heads == 1 ? std::string("one head a tile")
                                    : message(choice.pack.heads, " heads packed in a tile");
    };
    const auto estimated = [](const Estimate& e) {
      return message(e.tiles, " tiles, ", std::llround(e.us), " us");
    };
    out->add("why rows", message("estimated at ", estimated(plan.estimate), "; ",
                                 describe(plan.rival), " at ", estimated(plan.rival_estimate)));
  }

  static void explain_sequences(const ForwardProblem& problem, const ForwardPlan& plan,
                                Explanation* out) {
    if (!problem.is_ragged()) return;
    out->add("sequences",
             message(problem.batch, plan.slot_rows > 0 ? " in order" : ", longest first",
                     ", listed by a kernel of their own: their lengths are read on "
                     "the device"));
  }

  static Status make_plan(const ForwardProblem& problem, ForwardPlan* plan) {
    Device device;
    FLASH3_CHECK(current_device(&device));
    return plan_forward(problem, device, plan);
  }

  static Status make_plan(const BackwardProblem& problem, BackwardPlan* plan) {
    Device device;
    FLASH3_CHECK(current_device(&device));
    return plan_backward(problem, device, plan);
  }

  static Status make_plan(const QuantizeProblem& problem, QuantizePlan* plan) {
    Device device;
    FLASH3_CHECK(current_device(&device));
    return plan_quantize(problem, plan);
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const HopperBackend backend;
  return backend;
}

}  // namespace flash3
