// SPDX-License-Identifier: Apache-2.0
// Host memory that a test can make fail.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "cases/memory.hpp"

namespace flash3::cases {

// A memory in which something goes wrong between a call and a look at what it left: a download, or
// a comparison, which the fault's number counts.
class FaultyMemory final : public Memory {
 public:
  explicit FaultyMemory(std::function<void(void* to, size_t bytes, int look)> fault)
      : fault_(std::move(fault)) {}
  std::shared_ptr<void> allocate(size_t bytes) override { return host_.allocate(bytes); }
  void copy_in(void* to, const void* from, size_t n) override { host_.copy_in(to, from, n); }
  void copy_out(void* to, const void* from, size_t n) override {
    fault_(const_cast<void*>(from), n, looks_++);
    host_.copy_out(to, from, n);
  }
  void fill(void* to, std::byte value, size_t n) override { host_.fill(to, value, n); }
  void copy(void* to, const void* from, size_t n) override { host_.copy(to, from, n); }
  bool equal(const void* a, const void* b, size_t n) override {
    fault_(const_cast<void*>(a), n, looks_++);
    return host_.equal(a, b, n);
  }
  void finish() override {}
  double time(const std::function<void()>& work) override { return host_.time(work); }
  std::function<void()> record(const std::function<void()>& work) override {
    return host_.record(work);
  }
  void* stream() const override { return nullptr; }

 private:
  HostMemory host_;
  std::function<void(void*, size_t, int)> fault_;
  int looks_ = 0;
};

}  // namespace flash3::cases
