// Where the tensors of a call live. The same code verifies and times the CPU and the GPU through
// this interface; the device's implementation is in tools/device.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "flash3/flash3.h"

namespace flash3::cases {

class Memory {
 public:
  virtual ~Memory() = default;

  // 256-byte aligned, uninitialised; freed with the last reference. Throws std::bad_alloc or
  // std::runtime_error when there is not enough.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  // Copies between host memory and this memory, after the work enqueued so far, and waits.
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  // Waits for the calls enqueued on stream() and throws if one failed.
  virtual void finish() = 0;
  // Seconds that the calls which work() enqueues take, back to back. Waits for them.
  virtual double time(const std::function<void()>& work) = 0;
  // What goes into params.stream.
  virtual void* stream() const = 0;
};

class HostMemory final : public Memory {
 public:
  std::shared_ptr<void> allocate(size_t bytes) override;
  void copy_in(void* to, const void* from_host, size_t bytes) override;
  void copy_out(void* to_host, const void* from, size_t bytes) override;
  void finish() override {}
  double time(const std::function<void()>& work) override;
  void* stream() const override { return nullptr; }
};

}  // namespace flash3::cases
