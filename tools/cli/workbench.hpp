// SPDX-License-Identifier: Apache-2.0
// What flash3 bench measures on, the backend's memory, its GPU with the monitor and the input data,
// and what it measures: suites of cases.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/case.hpp"
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

// The case lists of flash3 bench.

// A case to time, and the one whose speed its own is divided by, if there is one: their samples
// are interleaved.
struct BenchPoint {
  cases::Case c;
  std::optional<cases::Case> beside;
};

// "forward": the FlashAttention papers' sweep (a fixed number of tokens, hidden size 2048 on a GPU,
// head_dim 64, 128, 256, full and causal, sequence lengths 512 … 16k); "backward": the backward of
// the same; "quick": one length of it;
// "window": one long causal sequence (32k on a GPU) under windows of 128 keys, twice as many, …,
// half the sequence, and none;
// "ragged": the sweep with its equal lengths passed as ragged, each beside its dense call; 20 draws
// of long-tailed causal lengths (64k tokens on a GPU, head_dim 64 and 128), each beside the dense
// call of the length with the same cost per token; thousands of sequences of 16 and of 64 tokens;
// one long causal sequence with a sink, and with a softcap, each beside the plain call, and with a
// window of 128 keys.
// "fp8": the sweep with e4m3 tensors and scales for blocks, each beside the call on 16-bit tensors,
// and how long flash3_quantize takes to make the ones from the others.
// "masks": masks as data.
// "decode": calls on a KV cache.
// On the CPU tokens and hidden size are smaller. Throws UsageError for another name.
std::vector<BenchPoint> bench_suite(const std::string& name, flash3_backend backend,
                                    flash3_dtype dtype = FLASH3_BFLOAT16);

// Masks as data, each forward and backward, beside the call that has the same pairs or, where none
// has, the causal, windowed or full one: causal as a range of each query; documents of log-normal
// lengths; a window with sink tokens; a prefix; lists of 10, 25 and 50 % of the blocks of 128 and
// of 64; random bits. On a GPU 4k … 32k tokens with 16 heads, on the CPU 512 … 2k with 4.
std::vector<BenchPoint> mask_suite(bool gpu, flash3_dtype dtype);

// Calls on a KV cache with 32 query heads on 8 KV heads and head_dim 128: one query for batches of
// 1 … 256 sequences and contexts of 1k … 128k keys; some of them with pages of 64, 16 and 1 keys,
// each beside the call without pages; some with other heads and head dims; 2 to 16 queries, and
// trees of 2 to 32 drafts, each beside one query; some with 512
// queries, with one query in half of the sequences and 512 in the others, and with log-uniform
// lengths, beside equal lengths with as many bytes. On the CPU all of it is smaller.
std::vector<BenchPoint> decode_suite(bool gpu, flash3_dtype dtype);

}  // namespace flash3::cli
