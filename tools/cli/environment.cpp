// SPDX-License-Identifier: Apache-2.0
#include "cli/environment.hpp"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "build_commit.hpp"
#include "cases/checked_call.hpp"
#include "cases/internals.hpp"
#include "cases/mask.hpp"
#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/format.hpp"
#include "cpu/parallel.hpp"
#include "device/monitor.hpp"

namespace flash3::cli {
namespace {

constexpr int64_t kMostUnused = 8;  // rows after a packed sequence, or padding of a cached one

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string host_name() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name") && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "";
}

template <class Params>
std::string explanation_of(const Params& params) {
  size_t size = 0;
  check(cases::explain(params, nullptr, &size));
  std::string text(size, '\0');
  check(cases::explain(params, text.data(), &size));
  text.resize(text.find('\0'));
  return text;
}

// Why no call has these sizes. The library says it too, but only of tensors that int64 describes,
// and of sequences that are drawn by then.
std::string size_objection(const cases::Case& c) {
  constexpr int64_t kMaxSequences = 1 << 24;
  constexpr double kMaxElements = 0x1p50;
  for (const auto& [name, size] : {std::pair("the batch", c.batch),
                                   {"the query length", c.seq_q},
                                   {"the key length", c.seq_k},
                                   {"the query heads", c.heads_q},
                                   {"the KV heads", c.heads_k},
                                   {"the head dim", c.head_dim},
                                   {"the head dim of v", c.head_dim_v},
                                   {"the tokens", c.tokens},
                                   {"the draw", c.draw},
                                   {"the page size", c.page_size},
                                   {"the appended keys", c.append}})
    if (size > kMaxSize) return format("{} = {}, and {} is the most", name, size, kMaxSize);
  const auto product = [&](auto... sizes) {
    return (static_cast<double>(c.batch) * ... * static_cast<double>(sizes));
  };
  const int64_t seq = std::max(c.seq_q, c.seq_k + c.append);
  const double elements =
      product(seq, std::max(c.heads_q, c.heads_k), std::max(c.head_dim, c.head_dim_v));
  if (elements > kMaxElements)
    return format("its tensors have {:.3g} elements, and {:.3g} is the most", elements,
                  kMaxElements);
  if (c.is_ragged() && c.batch > kMaxSequences)
    return format("it has {} sequences, and of a ragged batch {} is the most", c.batch,
                  kMaxSequences);
  if ((c.packed_q || c.packed_k) && product(seq + kMostUnused) > static_cast<double>(kMaxSize))
    return format("{} sequences of up to {} tokens take more than {} packed rows", c.batch, seq,
                  kMaxSize);
  if (c.has_cache() && seq + kMostUnused > kMaxSize)
    return format("sequences of up to {} keys may take more than {} rows of a cache", seq,
                  kMaxSize);
  if (c.append_packed && product(c.append) > static_cast<double>(kMaxSize))
    return format("{} sequences of up to {} appended keys take more than {} packed rows", c.batch,
                  c.append, kMaxSize);
  return "";
}

}  // namespace

flash3_backend backend_named(const std::string& name) {
  if (name == "auto")
    return unavailable(FLASH3_BACKEND_HOPPER).empty() ? FLASH3_BACKEND_HOPPER : FLASH3_BACKEND_CPU;
  if (name == "hopper") return FLASH3_BACKEND_HOPPER;
  if (name == "cpu") return FLASH3_BACKEND_CPU;
  throw UsageError("backend " + cases::in_quotes(name) + " is not one of auto, hopper, cpu");
}

flash3_backend resolve_backend(const std::string& name) {
  const flash3_backend backend = backend_named(name);
  if (const std::string reason = unavailable(backend); !reason.empty())
    throw std::runtime_error("the " + name + " backend cannot run here: " + reason);
  return backend;
}

std::string unavailable(flash3_backend backend) {
  return flash3_backend_available(backend) == FLASH3_OK ? "" : flash3_last_error();
}

std::string describe(flash3_backend backend) {
  size_t size = 0;
  if (flash3_backend_describe(backend, nullptr, &size) != FLASH3_OK) return flash3_last_error();
  std::string text(size, '\0');
  if (flash3_backend_describe(backend, text.data(), &size) != FLASH3_OK) return flash3_last_error();
  text.resize(text.find('\0'));
  return text;
}

std::unique_ptr<cases::Memory> make_memory(flash3_backend backend) {
  if (backend == FLASH3_BACKEND_HOPPER) return device::make_device_memory();
  return std::make_unique<cases::HostMemory>();
}

int available_cores() { return cpu::available_threads(); }

std::optional<device::Gpu> gpu_of(flash3_backend backend) {
  if (backend != FLASH3_BACKEND_HOPPER) return std::nullopt;
  std::string reason;
  const auto gpus = device::gpus(&reason);
  if (gpus.empty()) throw std::runtime_error(reason);
  return gpus.front();
}

void check(flash3_status status) {
  if (status == FLASH3_INVALID_ARGUMENT) throw UsageError(flash3_last_error());
  if (status != FLASH3_OK) throw std::runtime_error(flash3_last_error());
}

std::string sentence_of(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr)
    return format("there is not enough memory; this machine has {:.1f} GB",
                  1e-9 * memory_of_machine());
  return e.what();
}

cases::Case parse_case(const std::string& text) {
  std::string error;
  const auto c = cases::parse_id(text, &error);
  if (!c) throw UsageError(error);
  for (const auto& objection : {size_objection, cases::mask_objection})
    if (error = objection(*c); !error.empty())
      throw UsageError("case " + cases::in_quotes(text, 200) + ": " + error);
  return *c;
}

bool matches(const std::vector<std::string>& filters, const cases::Case& c) {
  const std::string id = format("/{}/", to_id(c));
  return std::all_of(filters.begin(), filters.end(),
                     [&](const std::string& f) { return id.find(f) != std::string::npos; });
}

void keep_matching(const std::vector<std::string>& filters, std::vector<cases::Case>* list) {
  std::erase_if(*list, [&](const cases::Case& c) { return !matches(filters, c); });
  if (list->empty()) throw UsageError("no case matches the filter");
}

std::string explanation(const flash3_forward_params& params) { return explanation_of(params); }
std::string explanation(const flash3_backward_params& params) { return explanation_of(params); }
std::string explanation(const flash3_quantize_params& params) { return explanation_of(params); }

std::string value_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + ": ")) return line.substr(name.size() + 2);
  return "";
}

nlohmann::ordered_json metadata(flash3_backend backend) {
  nlohmann::ordered_json m;
  m["flash3"] = flash3_version();
  m["commit"] = build_commit();
  m["date"] = now_utc();
  m["host"] = host_name();
  m["cpu"] = cpu_model();
  m["backend"] = flash3_backend_name(backend);
  m["device"] = describe(backend);
  if (const auto gpu = gpu_of(backend)) {
    m["gpu"] = {{"name", gpu->name},
                {"sms", gpu->sms},
                {"max_clock_mhz", gpu->max_clock_hz * 1e-6},
                {"memory_gib", static_cast<double>(gpu->memory_bytes) / (1 << 30)}};
    m["cuda_runtime"] = device::cuda_versions().runtime;
    m["driver"] = device::Monitor(gpu->pci_bus_id).driver_version();
  }
  return m;
}

const char* build_commit() { return kBuildCommit; }

}  // namespace flash3::cli
