#include "cases/memory.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace flash3::cases {

std::shared_ptr<void> HostMemory::allocate(size_t bytes) {
  constexpr size_t kAlignment = 256;
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

double HostMemory::time(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace flash3::cases
