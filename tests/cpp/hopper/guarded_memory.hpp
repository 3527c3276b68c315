// SPDX-License-Identifier: Apache-2.0
// Device memory between pages that are not there: whatever reads or writes outside of it faults.
// Pages are large (2 MiB), so a tensor lies at the start of its pages or at their end, and what is
// left of them holds a pattern.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/arithmetic.hpp"
#include "cuda/host/driver.hpp"

namespace flash3 {

enum class Place { kStart, kEnd };

class GuardedMemory {
 public:
  // bytes at the start of pages, or so that they end where the pages end.
  GuardedMemory(std::string name, size_t bytes, Place place) : name_(std::move(name)) {
    int device = 0;
    check(cudaGetDevice(&device) == cudaSuccess, "cudaGetDevice");
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    size_t page = 0;
    check(api().granularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS,
          "cuMemGetAllocationGranularity");
    mapped_ = std::max<size_t>(round_up(bytes, page), page);
    reserved_ = mapped_ + 2 * page;
    check(api().reserve(&base_, reserved_, page, 0, 0) == CUDA_SUCCESS, "cuMemAddressReserve");
    check(api().create(&handle_, mapped_, &properties, 0) == CUDA_SUCCESS, "cuMemCreate");
    pages_ = base_ + page;
    check(api().map(pages_, mapped_, 0, handle_, 0) == CUDA_SUCCESS, "cuMemMap");
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(api().set_access(pages_, mapped_, &access, 1) == CUDA_SUCCESS, "cuMemSetAccess");
    first_ = place == Place::kStart ? 0 : mapped_ - bytes;
    last_ = first_ + bytes;
    fill();
  }
  ~GuardedMemory() {
    api().unmap(pages_, mapped_);
    api().release(handle_);
    api().free(base_, reserved_);
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() const { return pages() + first_; }
  const std::string& name() const { return name_; }

  // Whether the pattern is as it was, all around the bytes. scratch: pinned host memory, at least
  // mapped() bytes.
  bool is_intact(std::byte* scratch) const {
    check(cudaMemcpy(scratch, pages(), mapped_, cudaMemcpyDeviceToHost) == cudaSuccess,
          "cudaMemcpy");
    return all_pattern(scratch, scratch + first_) &&
           all_pattern(scratch + last_, scratch + mapped_);
  }
  size_t mapped() const { return mapped_; }

 private:
  static constexpr std::byte kPattern{0xA5};

  struct Api {
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) free;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) release;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
  };
  template <class Function>
  static void find(const char* name, Function* function) {
    *function = cuda::driver_function<Function>(name, 10020);
    check(*function != nullptr, name);
  }
  static const Api& api() {
    static const Api found = [] {
      Api a{};
      find("cuMemGetAllocationGranularity", &a.granularity);
      find("cuMemAddressReserve", &a.reserve);
      find("cuMemAddressFree", &a.free);
      find("cuMemCreate", &a.create);
      find("cuMemRelease", &a.release);
      find("cuMemMap", &a.map);
      find("cuMemUnmap", &a.unmap);
      find("cuMemSetAccess", &a.set_access);
      return a;
    }();
    return found;
  }
  static void check(bool good, const char* what) {
    if (!good) throw std::runtime_error(std::string(what) + " failed");
  }
  static bool all_pattern(const std::byte* begin, const std::byte* end) {
    if (begin == end) return true;
    return *begin == kPattern && std::memcmp(begin, begin + 1, size_t(end - begin) - 1) == 0;
  }
  std::byte* pages() const { return reinterpret_cast<std::byte*>(pages_); }
  void fill() const {
    check(cudaMemset(pages(), int(kPattern), mapped_) == cudaSuccess, "cudaMemset");
    check(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
  }

  std::string name_;
  CUdeviceptr base_ = 0, pages_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  size_t mapped_ = 0, reserved_ = 0, first_ = 0, last_ = 0;
};

}  // namespace flash3
