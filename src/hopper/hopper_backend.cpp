// The Hopper backend: what core/backend.hpp asks, answered by forward/select.
#include <cuda_runtime_api.h>

#include "core/backend.hpp"
#include "core/message.hpp"
#include "hopper/backward/launch.hpp"
#include "hopper/device_info.hpp"
#include "hopper/forward/launch.hpp"
#include "hopper/forward/select.hpp"

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

  bool can_access(const void* address) const override {
    return address == nullptr || is_device_memory(address);
  }

  bool owns(const void* address) const override {
    return address != nullptr && is_device_only_memory(address);
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
                            c.band ? "the mask is a band: only tiles on its edges are masked"
                                   : "no pair is masked"));
    out->add("tile", message(c.tile_m(), " rows x ", c.tile_n, " keys"));
    explain_heads(problem, plan, out);
    out->add("warpgroups", message("1 producer, ", c.warpgroups, " consumers of 64 rows"));
    out->add("stages", message(c.stages, " of K, ", c.stages, " of V"));
    out->add(
        "grid",
        message(plan.grid, " blocks of ", c.threads(), " threads, persistent over ", plan.tiles,
                plan.dynamic ? " tiles, longest first, from a counter" : " tiles in turn"));
    out->add("shared memory", message(c.shared_bytes(), " bytes a block"));
    out->add("registers", message(c.producer_registers(), " a producer thread, ",
                                  c.consumer_registers(), " a consumer thread"));
    out->add("workspace", message(plan.workspace_bytes, " bytes"));
    const auto explain_copy = [&](const char* name, const PackedCopy& copy) {
      if (copy.needed) {
        out->add("copy",
                 message(name, " first goes to rows of ", copy.row,
                         " elements: TMA needs a 16-byte aligned base and strides of 16 bytes"));
      }
    };
    explain_copy("q", plan.q);
    explain_copy("k", plan.k);
    explain_copy("v", plan.v);
    out->add("store",
             plan.out_by_tma
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
    out->add("tile", message(c.tile_m, " queries x ", c.tile_n(), " keys"));
    out->add("warpgroups", message("1 producer, ", kConsumerWarpgroups, " consumers of 64 keys"));
    out->add("stages", message(c.q_stages, " of Q, ", c.dout_stages, " of dOut"));
    out->add("grid", message(plan.grid, " blocks of ", c.threads(), " threads"));
    out->add("dq", message("float32 sums, added to by one block for each tile of keys, ",
                           plan.deterministic ? "in a fixed order" : "in any order"));
    out->add("shared memory", message(c.shared_bytes(), " bytes a block"));
    out->add("workspace", message(plan.workspace_bytes, " bytes"));
  }

 private:
  // Rows, heads, and why: only where query heads share a KV head is there a choice.
  static void explain_heads(const ForwardProblem& problem, const ForwardPlan& plan,
                            Explanation* out) {
    const int heads = plan.pack.heads, queries = plan.kernel->config.warpgroups * plan.pack.queries;
    if (heads == 1) {
      out->add("rows", message("one query head a tile, ", queries, " queries"));
    } else {
      out->add("rows",
               message(heads, " of the ", problem.queries_per_kv_head(),
                       " query heads of a KV head share a tile, ", queries, " queries of each"));
    }
    if (!plan.rival.kernel) return;
    const auto estimated = [](const Estimate& e) {
      return message(e.tiles, " tiles, ", int64_t(e.us + 0.5), " us");
    };
    const std::string other = plan.rival.pack.heads == 1
                                  ? "one head a tile"
                                  : message(plan.rival.pack.heads, " heads packed in a tile");
    out->add("why rows", message("estimated at ", estimated(plan.estimate), "; ", other, " at ",
                                 estimated(plan.rival_estimate)));
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
};

}  // namespace

const Backend& hopper_backend() {
  static const HopperBackend backend;
  return backend;
}

}  // namespace flash3
