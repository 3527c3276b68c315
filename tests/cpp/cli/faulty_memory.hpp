// SPDX-License-Identifier: Apache-2.0
// Host memory that a test can make fail.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cases/memory.hpp"
#include "cases/tensors.hpp"
#include "core/convert.hpp"

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

// The oracle's values as a right result: rounded to the tensor's dtype, and nothing else.

inline void fill_with(const std::vector<double>& values, GuardedTensor* to) {
  size_t next = 0;
  for_each_row(to->view, [&](int64_t row) {
    for (int64_t d = 0; d < to->view.shape[to->view.ndim - 1]; ++d)
      store_float(to->view.data, to->view.dtype, row + d, static_cast<float>(values[next++]));
  });
  to->fill_forbidden();
}

}  // namespace flash3::cases
