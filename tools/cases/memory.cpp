// SPDX-License-Identifier: Apache-2.0
#include "cases/memory.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace flash3::cases {

std::shared_ptr<void> HostMemory::allocate(size_t bytes) {
  constexpr size_t kAlignment = FLASH3_WORKSPACE_ALIGNMENT;
  const size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;  // never 0
  void* p = std::aligned_alloc(kAlignment, rounded);
  if (p == nullptr) throw std::bad_alloc();
  return {p, std::free};
}

void HostMemory::copy_in(void* to, const void* from_host, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from_host, bytes);
}

void HostMemory::copy_out(void* to_host, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to_host, from, bytes);
}

void HostMemory::fill(void* to, std::byte value, size_t bytes) {
  if (bytes > 0) std::memset(to, static_cast<int>(value), bytes);
}

bool HostMemory::equal(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

double HostMemory::time(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::shared_ptr<void> PooledMemory::allocate(size_t bytes) {
  constexpr size_t kSmallest = 4096;
  if (bytes > kLargest) return memory_->allocate(bytes);
  const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
  std::vector<std::shared_ptr<void>>& blocks = free_[size];
  if (blocks.empty()) blocks.push_back(memory_->allocate(size));
  std::shared_ptr<void> block = std::move(blocks.back());
  blocks.pop_back();
  memory_->fill(static_cast<std::byte*>(block.get()) + bytes, kFillPattern, size - bytes);
  void* const p = block.get();
  return {p, [&blocks, block = std::move(block)](void*) mutable {
            blocks.push_back(std::move(block));
          }};
}

}  // namespace flash3::cases
