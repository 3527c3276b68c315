// SPDX-License-Identifier: Apache-2.0
// What a call enqueues.
#pragma once

#include <array>
#include <cstddef>
#include <new>
#include <type_traits>

#include "core/status.hpp"

namespace flash3::cuda {

// What a launch takes besides the kernel's params.
struct KernelLaunch {
  const void* function;
  int blocks, threads;
  int shared_bytes = 0;  // dynamic shared memory of a block
  bool after_kernel =
      false;         // it waits itself for the kernel before, and may begin while that ends
  int cluster = 1;   // blocks of a cluster
  int blocks_y = 1;  // rows of so many blocks
};

// Launches in the order in which they are enqueued. A call makes all of them before it enqueues the
// first: whatever can fail, but for a launch, comes before the first write.
class Launches {
 public:
  Launches() = default;
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  // Zeroed, for as long as this object lives: the params of a kernel.
  template <class T>
  T& make() {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kAlignment);
    return *new (take(sizeof(T))) T{};
  }

  // A kernel whose only argument are these params, which live as long as this object. `what`: as in
  // "launching the forward kernel", for the message.
  void add_kernel(const KernelLaunch& kernel, void* params, const char* what) {
    next() = {kernel, params, what, nullptr};
  }

  // What enqueue(stream) launches, which returns a Status.
  template <class Enqueue>
  void add(const Enqueue& enqueue) {
    static_assert(std::is_trivially_copyable_v<Enqueue> && alignof(Enqueue) <= kAlignment);
    next() = {
        {}, new (take(sizeof(Enqueue))) Enqueue(enqueue), nullptr, [](void* own, void* stream) {
          return (*static_cast<const Enqueue*>(own))(stream);
        }};
  }

  // Loads the kernels and then enqueues everything. device: the current one.
  Status enqueue(int device, void* stream) const;

 private:
  struct Launch {
    KernelLaunch kernel;
    void* params;
    const char* what;
    Status (*enqueue)(void* own, void* stream);  // null: a kernel
  };

  // Room for the largest call; what needs more throws std::length_error.
  static constexpr size_t kAlignment = 64, kBytes = 12288, kMost = 16;
  std::byte* take(size_t bytes);
  Launch& next();

  alignas(kAlignment) std::byte memory_[kBytes];  // NOLINT: only what is taken is ever looked at
  std::array<Launch, kMost> launches_;            // NOLINT: likewise
  size_t used_ = 0, count_ = 0;
};

}  // namespace flash3::cuda
