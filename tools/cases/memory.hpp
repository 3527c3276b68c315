// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a call live. The same code verifies and times the CPU and the GPU through
// this interface; the device's implementation is in tools/device.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "flash3/flash3.h"

namespace flash3::cases {

inline constexpr std::byte kFillPattern{0xFF};  // cases/tensors.hpp says what for

class Memory {
 public:
  virtual ~Memory() = default;

  // 256-byte aligned, uninitialised; freed with the last reference. Throws std::bad_alloc or
  // std::runtime_error when there is not enough.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  // Copies between host memory and this memory, after the work enqueued so far, and waits.
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  // After the work enqueued so far; may return before it is done.
  virtual void fill(void* to, std::byte value, size_t bytes) = 0;
  // Within this memory; as fill.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  // Whether two places in this memory hold the same, after the work enqueued so far; waits.
  virtual bool equal(const void* a, const void* b, size_t bytes) = 0;
  // Waits for the calls enqueued on stream() and throws if one failed.
  virtual void finish() = 0;
  // Seconds that the calls which work() enqueues take, back to back. Waits for them.
  virtual double time(const std::function<void()>& work) = 0;
  // What enqueues the calls again that work() enqueues: on a device one CUDA graph, which is made
  // now, without running them; on a host work itself. It must not outlive this memory.
  virtual std::function<void()> record(const std::function<void()>& work) = 0;
  // What goes into params.stream.
  virtual void* stream() const = 0;
};

class HostMemory final : public Memory {
 public:
  std::shared_ptr<void> allocate(size_t bytes) override;
  void copy_in(void* to, const void* from_host, size_t bytes) override;
  void copy_out(void* to_host, const void* from, size_t bytes) override;
  void fill(void* to, std::byte value, size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) override { copy_in(to, from, bytes); }
  bool equal(const void* a, const void* b, size_t bytes) override;
  void finish() override {}
  double time(const std::function<void()>& work) override;
  std::function<void()> record(const std::function<void()>& work) override { return work; }
  void* stream() const override { return nullptr; }
};

// Another memory, but for what it allocates, which its children do in their own way.
class MemoryOver : public Memory {
 public:
  explicit MemoryOver(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}

  void copy_in(void* to, const void* from_host, size_t bytes) override {
    memory_->copy_in(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    memory_->copy_out(to_host, from, bytes);
  }
  void fill(void* to, std::byte value, size_t bytes) override { memory_->fill(to, value, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { memory_->copy(to, from, bytes); }
  bool equal(const void* a, const void* b, size_t bytes) override {
    return memory_->equal(a, b, bytes);
  }
  void finish() override { memory_->finish(); }
  double time(const std::function<void()>& work) override { return memory_->time(work); }
  std::function<void()> record(const std::function<void()>& work) override {
    return memory_->record(work);
  }
  void* stream() const override { return memory_->stream(); }

 protected:
  const std::unique_ptr<Memory> memory_;
};

// Another memory whose blocks are used again instead of freed: a device synchronises for both an
// allocation and a free, and thousands of small problems would do little else. For one thread. A
// block's last reference must not outlive it.
class PooledMemory final : public MemoryOver {
 public:
  using MemoryOver::MemoryOver;

  // Blocks of more bytes are freed all the same: the pools of many threads would fill a device.
  static constexpr size_t kLargest = size_t{64} << 20;

  // What lies after `bytes` in a pooled block holds the fill pattern, so that nothing of an
  // earlier problem is read.
  std::shared_ptr<void> allocate(size_t bytes) override;

 private:
  std::map<size_t, std::vector<std::shared_ptr<void>>> free_;  // by size
};

}  // namespace flash3::cases
