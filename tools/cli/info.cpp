// SPDX-License-Identifier: Apache-2.0
// flash3 info: devices, backends, kernels, versions.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cases/backward_tensors.hpp"
#include "cases/checked_call.hpp"
#include "cases/mask.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"
#include "cli/record_parts.hpp"
#include "device/monitor.hpp"

namespace flash3::cli {
namespace {

using Json = nlohmann::ordered_json;

// The head dims that a kernel takes: a range of those equal in q, k and v, and pairs.
struct HeadDims {
  int64_t first = 0, last = 0;
  std::vector<std::string> pairs;

  void add(int64_t dim, int64_t dim_v) {
    if (dim != dim_v) {
      const std::string pair = format("{}x{}", dim, dim_v);
      if (std::find(pairs.begin(), pairs.end(), pair) == pairs.end()) pairs.push_back(pair);
      return;
    }
    if (first == 0) first = dim;
    last = dim;
  }
  std::string text() const {
    std::vector<std::string> parts = pairs;
    if (first > 0)
      parts.insert(parts.begin(),
                   first == last ? format("{}", first) : format("{}-{}", first, last));
    return join(parts, ", ");
  }
};

// The kernel that this call would run; "" if none.
template <class Params>
std::string kernel_of(Params params, flash3_backend backend) {
  params.backend = backend;
  return cases::supported(params) == FLASH3_OK ? value_of(explanation(params), "kernel") : "";
}

// Kernels and the head dims that each takes, found by asking which one would run.
Json kernels_of(flash3_backend backend) {
  std::vector<std::pair<std::string, HeadDims>> kernels;
  cases::Case c;
  const auto ask = [&](flash3_dtype dtype, int64_t head_dim, int64_t head_dim_v, bool causal) {
    c.dtype = dtype, c.batch = 4, c.seq_q = c.seq_k = 4096, c.heads_q = c.heads_k = 16;
    c.head_dim = head_dim, c.head_dim_v = head_dim_v, c.causal = causal;
    const std::string kernel = c.backward ? kernel_of(cases::make_backward_question(c), backend)
                                          : kernel_of(cases::make_question(c), backend);
    if (kernel.empty()) return;
    auto known = std::find_if(kernels.begin(), kernels.end(),
                              [&](const auto& entry) { return entry.first == kernel; });
    if (known == kernels.end()) known = kernels.insert(kernels.end(), {kernel, {}});
    // The same dims come twice where one kernel takes every mask.
    if (head_dim > known->second.last || head_dim != head_dim_v)
      known->second.add(head_dim, head_dim_v);
  };
  for (const bool backward : {false, true}) {
    c.backward = backward;
    for (const flash3_dtype dtype : cases::dtypes_of(backend))
      for (const bool causal : {false, true}) {
        for (int64_t dim = 1; dim <= std::min(kMaxScoreDim, kMaxValueDim); ++dim)
          ask(dtype, dim, dim, causal);
        ask(dtype, 192, 128, causal);
        ask(dtype, kMaxScoreDim, kMaxValueDim, causal);
      }
  }
  Json list = Json::array();
  for (const auto& [kernel, dims] : kernels)
    list.push_back({{"kernel", kernel}, {"head_dim", dims.text()}});
  return list;
}

Json collect() {
  Json result;
  result["flash3"] = flash3_version();
  result["commit"] = build_commit();
  const auto cuda = device::cuda_versions();
  std::string no_gpu;
  const auto gpus = device::gpus(&no_gpu);
  result["cuda_runtime"] = cuda.runtime;
  result["cuda_driver"] = cuda.driver;
  result["devices"] = Json::array();
  for (const auto& gpu : gpus)
    result["devices"].push_back(
        {{"name", gpu.name},
         {"compute_capability", format("{}.{}", gpu.compute_major, gpu.compute_minor)},
         {"sms", gpu.sms},
         {"max_clock_mhz", gpu.max_clock_hz * 1e-6},
         {"memory_gib", static_cast<double>(gpu.memory_bytes) / (1 << 30)},
         {"pci_bus_id", gpu.pci_bus_id},
         {"driver", device::Monitor(gpu.pci_bus_id).driver_version()}});
  if (gpus.empty()) result["no_device"] = no_gpu;
  for (const flash3_backend backend : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    const std::string reason = unavailable(backend);
    Json entry{{"name", flash3_backend_name(backend)}, {"available", reason.empty()}};
    if (reason.empty()) {
      entry["device"] = describe(backend);
      entry["kernels"] = kernels_of(backend);
    } else {
      entry["reason"] = reason;
    }
    result["backends"].push_back(entry);
  }
  return result;
}

std::string text_of(const Json& value) { return value.get<std::string>(); }

// What gate.kernels_verified compares with the record of the last verification.
int print_machine_code(bool as_json) {
  const std::vector<KernelCode> kernels = own_machine_code();
  if (!as_json) {
    for (const KernelCode& k : kernels) print("{}  {}\n", k.hash, k.name);
    print("{} kernels, nvcc {}\n", kernels.size(), kernel_compiler());
    return 0;
  }
  Json list = Json::array();
  for (const KernelCode& k : kernels)
    list.push_back(
        {{"name", k.name}, {"hash", k.hash}, {"function", k.function}, {"source", k.source}});
  print("{}\n", json_text(Json{{"compiler", kernel_compiler()}, {"kernels", list}}, 2));
  return 0;
}

}  // namespace

int info(const InfoOptions& options) {
  if (options.machine_code) return print_machine_code(options.json);
  const Json all = collect();
  if (options.json) {
    print("{}\n", json_text(all, 2));
    return 0;
  }
  print("flash3 {} ({})\n", text_of(all["flash3"]), text_of(all["commit"]));
  if (!text_of(all["cuda_runtime"]).empty())
    print("CUDA runtime {}, driver supports {}\n", text_of(all["cuda_runtime"]),
          text_of(all["cuda_driver"]).empty() ? "none" : text_of(all["cuda_driver"]));

  print("\ndevices\n");
  for (const Json& gpu : all["devices"])
    print("  {}, compute capability {}, {} SMs up to {:.0f} MHz, {:.0f} GiB, driver {}\n",
          text_of(gpu["name"]), text_of(gpu["compute_capability"]), gpu["sms"].get<int>(),
          gpu["max_clock_mhz"].get<double>(), gpu["memory_gib"].get<double>(),
          text_of(gpu["driver"]));
  if (all["devices"].empty()) print("  no GPU: {}\n", text_of(all["no_device"]));

  print("\nbackends\n");
  for (const Json& backend : all["backends"]) {
    const bool available = backend["available"];
    print("  {:<8} {}\n", text_of(backend["name"]),
          available ? text_of(backend["device"]) : "not available: " + text_of(backend["reason"]));
    if (!available) continue;
    for (const Json& kernel : backend["kernels"])
      print("           {:<28} head_dim {}\n", text_of(kernel["kernel"]),
            text_of(kernel["head_dim"]));
  }
  return 0;
}

namespace {

// flash3 explain: which kernel a case runs, and why.

std::string explanation_of(const cases::Case& c, flash3_backend backend) {
  const auto ask = [&](auto params) {
    params.backend = backend;
    return explanation(params);
  };
  if (c.quantize) return ask(cases::make_quantize_question(c));
  return c.backward ? ask(cases::make_backward_question(c)) : ask(cases::make_question(c));
}

// What the case's mask holds: a line, or nothing.
std::string mask_line(const cases::Case& c) {
  const cases::MaskFacts* const facts = mask_facts(c);
  if (!facts) return "";
  const int64_t blocks = facts->full + facts->quarters + facts->ranges + facts->bits;
  return format(
      "mask blocks: {} of {} are listed: {} full, {} by quarters, {} by ranges, {} by bits; {:.2f} "
      "% "
      "of all pairs are seen\n",
      blocks, facts->all_blocks, facts->full, facts->quarters, facts->ranges, facts->bits,
      100 * seen_share(c));
}

}  // namespace

int explain(const ExplainOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const std::string& id : options.cases) {
    cases::Case c = parse_case(id);
    c.backward |= options.backward;
    const std::string text = explanation_of(c, backend) + mask_line(c);
    if (!options.json) {
      print("{}case: {}\n{}", &id == &options.cases.front() ? "" : "\n", to_id(c), text);
      continue;
    }
    nlohmann::ordered_json entry{{"case", to_id(c)}};
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (const size_t colon = line.find(": "); colon != std::string::npos)
        entry[line.substr(0, colon)] = line.substr(colon + 2);
    all.push_back(entry);
  }
  if (options.json) print("{}\n", json_text(all, 2));
  return 0;
}

}  // namespace flash3::cli
