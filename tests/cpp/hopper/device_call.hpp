// SPDX-License-Identifier: Apache-2.0
// What the tests of the Hopper backend share: they skip, with the reason, where it cannot run;
// after each the device must be well.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "../parsed.hpp"
#include "cases/backward_tensors.hpp"
#include "cases/cache_tensors.hpp"
#include "cases/checked_call.hpp"
#include "cases/runner.hpp"
#include "core/convert.hpp"
#include "device/device.hpp"

namespace flash3 {

class HopperTest : public testing::Test {
 protected:
  void SetUp() override {
    if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK)
      GTEST_SKIP() << flash3_last_error();
    memory_ = device::make_device_memory();
  }
  void TearDown() override {
    if (!memory_) return;  // skipped
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  // Against the oracle; `repeat` calls must give the same bits.
  void verify(const cases::Case& c, int repeat = 1) {
    cases::RunOptions options;
    options.backend = FLASH3_BACKEND_HOPPER;
    options.oracle_threads = 0;
    options.repeat = repeat;
    const cases::CheckResult v = run_case(c, *memory_, options);
    EXPECT_TRUE(v.passed()) << to_id(c) << ": " << v.failure;
  }

  // Calls from eight threads, each on a stream of its own and with inputs of its own.
  static void verify_from_many_threads(const cases::Case& c) {
    constexpr int kThreads = 8;
    std::atomic<int> passed{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&, i] {
          const auto memory = device::make_device_memory();
          cases::RunOptions options;
          options.backend = FLASH3_BACKEND_HOPPER;
          options.repeat = 20;
          cases::Case mine = c;
          mine.seed = static_cast<uint64_t>(i) + 1;
          passed += run_case(mine, *memory, options).passed();
        });
    }
    EXPECT_EQ(passed, kThreads) << to_id(c);
  }

  static bool has_free_memory(size_t bytes) {
    size_t free = 0, total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess && free > bytes;
  }

  std::unique_ptr<cases::Memory> memory_;
};

// A call of any kind by the id of its case, in device memory: one test can then treat forward, FP8,
// backward, quantize and calls on a KV cache alike. Inputs are normal numbers in every row,
// whatever the lengths say (of a cache, in the rows of its keys); the backward's out and lse are
// not those of its forward, and nothing here is compared with the oracle.

using Bytes = std::vector<std::byte>;
inline constexpr std::byte kUnwritten = cases::kFillPattern;

// Ends the process, by SIGALRM, if a kernel never does.
class TimeLimit {
 public:
  explicit TimeLimit(unsigned seconds = 600) { alarm(seconds); }
  ~TimeLimit() { alarm(0); }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;
};

// A number from the environment, for tests that can run longer than a suite should.
inline int64_t setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

using AnyParams =
    std::variant<flash3_forward_params, flash3_backward_params, flash3_quantize_params>;

using cases::explain;
using cases::run;
using cases::supported;
using cases::workspace;
inline flash3_status run(const AnyParams& any) {
  return std::visit([](const auto& p) { return cases::run(p); }, any);
}
inline flash3_status supported(const AnyParams& any) {
  return std::visit([](const auto& p) { return cases::supported(p); }, any);
}
inline flash3_status workspace(const AnyParams& any, size_t* bytes) {
  return std::visit([&](const auto& p) { return cases::workspace(p, bytes); }, any);
}
// The text, or what went wrong.
inline std::string explain(const AnyParams& any) {
  char text[8192];
  size_t size = sizeof text;
  const auto ask = [&](const auto& p) { return cases::explain(p, text, &size); };
  return std::visit(ask, any) == FLASH3_OK ? text : flash3_last_error();
}

// A tensor that a call has.
struct Slot {
  const char* name;
  flash3_tensor* tensor;
  bool output;
};

inline std::vector<Slot> slots_of(AnyParams* any) {
  std::vector<Slot> slots;
  const auto add = [&](bool output,
                       std::initializer_list<std::pair<const char*, flash3_tensor*>> t) {
    for (const auto& [name, tensor] : t)
      if (tensor->dtype != FLASH3_DTYPE_NONE) slots.push_back({name, tensor, output});
  };
  if (auto* f = std::get_if<flash3_forward_params>(any)) {
    add(false, {{"q", &f->q}, {"k", &f->k}, {"v", &f->v}, {"sink", &f->sink}});
    add(false, {{"q_scale", &f->q_scale}, {"k_scale", &f->k_scale}, {"v_scale", &f->v_scale}});
    for (const cases::CacheField& field : cases::kCacheFields)
      if (std::string_view(field.name) != "seqused_k")
        add(false, {{field.name, &(f->*field.member)}});
    add(false, {{"tree_mask", &f->tree_mask}});
    add(true, {{"out", &f->out}, {"lse", &f->lse}});
  } else if (auto* b = std::get_if<flash3_backward_params>(any)) {
    add(false, {{"dout", &b->dout}, {"dlse", &b->dlse}, {"q", &b->q}, {"k", &b->k}, {"v", &b->v}});
    add(false, {{"out", &b->out}, {"lse", &b->lse}, {"sink", &b->sink}});
    add(true, {{"dq", &b->dq}, {"dk", &b->dk}, {"dv", &b->dv}, {"dsink", &b->dsink}});
  } else if (auto* z = std::get_if<flash3_quantize_params>(any)) {
    add(false, {{"q", &z->q}, {"k", &z->k}, {"v", &z->v}});
    add(false, {{"rotary_cos", &z->rotary_cos}, {"rotary_sin", &z->rotary_sin}});
    add(true, {{"q_out", &z->q_out}, {"k_out", &z->k_out}, {"v_out", &z->v_out}});
    add(true, {{"q_scale", &z->q_scale}, {"k_scale", &z->k_scale}, {"v_scale", &z->v_scale}});
  }
  std::visit(
      [&](auto& p) {
        add(false, {{"cu_seqlens_q", &p.cu_seqlens_q}, {"cu_seqlens_k", &p.cu_seqlens_k}});
        add(false, {{"seqused_q", &p.seqused_q}, {"seqused_k", &p.seqused_k}});
      },
      *any);
  return slots;
}

inline Slot slot_of(AnyParams* any, std::string_view name) {
  for (const Slot& slot : slots_of(any))
    if (name == slot.name) return slot;
  return {nullptr, nullptr, false};
}

inline size_t bytes_of(const flash3_tensor& t) {
  return size_t(cases::span_of(t) * cases::element_size(t.dtype));
}

class DeviceCall {
 public:
  // Device memory for so many bytes.
  using Place = std::function<std::byte*(const char* name, size_t bytes)>;

  struct Part {
    const char* name;
    bool output;
    Bytes host;  // what reset() writes; of an output kUnwritten
    std::byte* device;
  };

  // Outputs lie side by side, at results(), unless there is a place for each tensor.
  DeviceCall(const std::string& id, cases::Memory& memory, const Place& place = {})
      : memory_(memory), case_(cases::parsed(id)) {
    if (case_.backward) {
      params = make_backward_question(case_);
    } else if (case_.quantize) {
      params = make_quantize_question(case_);
    } else {
      params = make_question(case_);
    }
    if (case_.has_cache()) cache_ = cases::make_cache_tensors(case_);
    const auto slots = slots_of(&params);
    for (const Slot& slot : slots)
      parts_.push_back({slot.name, slot.output, contents(slot, parts_.size()), nullptr});
    if (!place) allocate_results();
    size_t at = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      Part& part = parts_[i];
      const size_t bytes = part.host.size() + offset(*slots[i].tensor);
      if (place) {
        part.device = place(part.name, bytes);
      } else if (part.output) {
        part.device = results_ + at;
        at += padded(bytes);
      } else {
        part.device = allocate(bytes);
      }
      part.device += offset(*slots[i].tensor);
      slots[i].tensor->data = part.device;
    }
    std::visit(
        [&](auto& p) {
          p.backend = FLASH3_BACKEND_HOPPER;
          p.stream = memory.stream();
          EXPECT_EQ(cases::workspace(p, &p.workspace_size), FLASH3_OK) << flash3_last_error();
          if (p.workspace_size == 0) return;
          p.workspace = place ? place("workspace", p.workspace_size) : allocate(p.workspace_size);
          workspace_ = {static_cast<std::byte*>(p.workspace), p.workspace_size};
        },
        params);
    reset();
  }

  AnyParams params;

  const cases::Case& the_case() const { return case_; }
  std::vector<Part>& parts() { return parts_; }
  const std::vector<Part>& parts() const { return parts_; }
  Part& part(std::string_view name) {
    return *std::find_if(parts_.begin(), parts_.end(),
                         [&](const Part& part) { return name == part.name; });
  }
  std::byte* results() const { return results_; }
  size_t results_bytes() const { return results_bytes_; }
  size_t workspace_bytes() const { return workspace_.second; }

  // Whether the call writes this input: a cache that grows.
  bool grows(const Part& part) const {
    const std::string_view name = part.name;
    return case_.append > 0 && (name == "k" || name == "v");
  }

  // Everything as it was at first; outputs and workspace unwritten.
  void reset() {
    for (const Part& part : parts_) upload(part);
    if (workspace_.second == 0) return;
    const Bytes host(workspace_.second, kUnwritten);
    memory_.copy_in(workspace_.first, host.data(), host.size());
  }
  void upload(const Part& part) {
    memory_.copy_in(part.device, part.host.data(), part.host.size());
  }
  void set(std::string_view name, const std::vector<int>& values) {
    Part& to = part(name);
    ASSERT_EQ(to.host.size(), values.size() * sizeof(int)) << name;
    std::memcpy(to.host.data(), values.data(), to.host.size());
    upload(to);
  }
  void run() {
    ASSERT_EQ(flash3::run(params), FLASH3_OK) << flash3_last_error();
    memory_.finish();
  }
  Bytes download(const Part& part) const {
    Bytes host(part.host.size());
    memory_.copy_out(host.data(), part.device, host.size());
    return host;
  }
  std::vector<Bytes> outputs() const {
    std::vector<Bytes> all;
    for (const Part& part : parts_)
      if (part.output) all.push_back(download(part));
    return all;
  }

  // The same call with outputs, laid out as at results(), workspace and stream elsewhere.
  AnyParams moved(std::byte* results, std::byte* workspace, void* stream) const {
    AnyParams copy = params;
    for (const Slot& slot : slots_of(&copy))
      if (slot.output)
        slot.tensor->data = results + (static_cast<std::byte*>(slot.tensor->data) - results_);
    std::visit([&](auto& p) { p.workspace = workspace, p.stream = stream; }, copy);
    return copy;
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + 511) / 256 * 256; }  // a gap after each
  // The odd layout aligns a tensor to one element only.
  size_t offset(const flash3_tensor& t) const {
    const bool is_vector = t.ndim == 1;
    return case_.layout == cases::Layout::kOdd && !is_vector ? size_t(cases::element_size(t.dtype))
                                                             : 0;
  }
  std::byte* allocate(size_t bytes) {
    return static_cast<std::byte*>(
        buffers_.emplace_back(memory_.allocate(std::max<size_t>(bytes, 256))).get());
  }
  void allocate_results() {
    for (const Slot& slot : slots_of(&params))
      if (slot.output) results_bytes_ += padded(bytes_of(*slot.tensor) + offset(*slot.tensor));
    results_ = allocate(results_bytes_);
    const Bytes host(results_bytes_, kUnwritten);  // the gaps too
    memory_.copy_in(results_, host.data(), host.size());
  }

  Bytes contents(const Slot& slot, size_t number) const {
    const flash3_tensor& t = *slot.tensor;
    const std::string_view name = slot.name;
    Bytes host(bytes_of(t), kUnwritten);
    if (slot.output || host.empty()) return host;
    if (cache_) {
      AnyParams on_host = make_cache_params(case_, *cache_);
      std::memcpy(host.data(), slot_of(&on_host, name).tensor->data, host.size());
      return host;
    }
    if (t.dtype == FLASH3_INT32) {
      const cases::CaseSequences s = make_sequences(case_);
      const auto& values = name == "cu_seqlens_q"   ? s.q.cu
                           : name == "cu_seqlens_k" ? s.k.cu
                           : name == "seqused_q"    ? s.q.used
                                                    : s.k.used;
      std::memcpy(host.data(), values.data(), host.size());
      return host;
    }
    const int64_t count = cases::span_of(t);
    cases::fill_normal(host.data(), t.dtype, count, 16 * case_.seed + number);
    for (int64_t i = 0; i < count && t.dtype == FLASH3_FLOAT32; ++i) {
      if (name == "lse") store_float(host.data(), t.dtype, i, 5);  // keeps exp(S − lse) in bounds
      if (name.ends_with("_scale"))
        store_float(host.data(), t.dtype, i, std::exp2(load_float(host.data(), t.dtype, i) / 2));
    }
    return host;
  }

  cases::Memory& memory_;
  cases::Case case_;
  std::optional<cases::CacheTensors> cache_;
  std::vector<Part> parts_;
  std::vector<std::shared_ptr<void>> buffers_;
  std::byte* results_ = nullptr;
  size_t results_bytes_ = 0;
  std::pair<std::byte*, size_t> workspace_{};
};

}  // namespace flash3
