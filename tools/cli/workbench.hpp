// SPDX-License-Identifier: Apache-2.0
// What flash3 bench measures on: the backend's memory, its GPU with the monitor, the input data.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/memory.hpp"
#include "cases/tensors.hpp"
#include "device/device.hpp"
#include "device/monitor.hpp"
#include "flash3/flash3.h"

namespace flash3::cli {

// A case with its tensors and workspace in place, to be called as often as wanted. A call on a KV
// cache goes over its calls in rounds: one on each of the buffers that k and v lie in, so that no
// call finds them in the chip's caches. `forward` is the first of them.
struct PreparedCase {
  cases::Case c;
  std::string kernel;
  size_t workspace_bytes = 0;
  flash3_forward_params forward{};
  flash3_backward_params backward{};            // of a backward case: on what the forward has left
  std::vector<std::shared_ptr<void>> buffers;   // what these point into
  std::shared_ptr<const cases::HostMask> mask;  // of a case that has one
  int calls = 1;                                // that enqueue() enqueues
  std::function<void()> round;                  // of a call on a KV cache: what enqueues them

  void enqueue() const;  // throws the library's reason
};

class Workbench {
 public:
  // threads: of the CPU backend; 0: all cores.
  Workbench(flash3_backend backend, int threads);

  // N(0, 1) inputs, the same for the same case; a backward case's forward has run. Throws the
  // library's reason if it takes no such call, and what the memory throws.
  PreparedCase prepare(const cases::Case& c);

  // Bytes read and written a second by a copy of N(0, 1) values within the memory, of kCopyBytes.
  static constexpr size_t kCopyBytes = size_t{256} << 20;
  double measure_copy(int samples, double sample_seconds);

  cases::Memory& memory() { return *memory_; }
  const std::optional<device::Gpu>& gpu() const { return gpu_; }  // nothing for the CPU
  device::Monitor* monitor() { return monitor_.get(); }           // null for the CPU

 private:
  // The forward without memory, and the kernel that runs it.
  void ask(PreparedCase* p) const;
  void prepare_forward(PreparedCase* p);
  void prepare_backward(PreparedCase* p);
  void prepare_cache(PreparedCase* p);
  const void* normal_values(flash3_dtype dtype, uint64_t seed, int64_t count);
  // Memory for t, with N(0, 1) values in it.
  void add_normal(uint64_t seed, flash3_tensor* t, std::vector<std::shared_ptr<void>>* buffers);
  // The same from a block of them, copied on: for tensors too large for the host.
  void add_repeated(uint64_t seed, flash3_tensor* t, std::vector<std::shared_ptr<void>>* buffers);
  // Memory for what is not k or v of a call on a cache, with its values in it.
  void add_cache_inputs(PreparedCase* p);
  // The buffers of k and v, with the same values in each.
  std::vector<flash3_forward_params> add_cache_buffers(PreparedCase* p);
  // Memory for the case's sink and lengths, with their values in it.
  cases::ExtraViews add_extra(const cases::ExtraTensors& host,
                              std::vector<std::shared_ptr<void>>* buffers);
  // Memory for a workspace of so many bytes; null for none.
  void* add_workspace(size_t bytes, std::vector<std::shared_ptr<void>>* buffers);
  void* add_buffer(const flash3_tensor& t, std::vector<std::shared_ptr<void>>* buffers);

  // Host copies by dtype and seed, made again when a case needs more.
  struct Values {
    flash3_dtype dtype;
    uint64_t seed;
    int64_t count;
    std::vector<std::byte> bytes;
  };
  flash3_backend backend_;
  int threads_;
  std::unique_ptr<cases::Memory> memory_;
  std::optional<device::Gpu> gpu_;
  std::unique_ptr<device::Monitor> monitor_;
  std::vector<Values> values_;
};

}  // namespace flash3::cli
