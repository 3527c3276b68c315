// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of tensors between global and shared memory, by the copy engine (TMA). PTX ISA
// 9.7.9.25.5 cp.async.bulk.tensor, 9.7.9.25.4.3 commit_group and wait_group, 9.7.9.15 prefetch,
// 9.7.13.4 fence.proxy.
#pragma once

#include "cuda/device/ptx/sync.cuh"

namespace flash3::cuda {

// ---- boxes of a tensor map, by their coordinates ----
// The map is untyped: nvcc keeps the address of a typed one in registers across the epilogue.

// Brings a tensor map into the cache of the copy engine.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Each of its bytes counts at the barrier, also where the box lies outside of the tensor.
__device__ __forceinline__ void copy_box_in(void* shared, const void* map, const int32_t (&c)[4],
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void copy_box_in(void* shared, const void* map, const int32_t (&c)[5],
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
      "l"(map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void copy_box_out(const void* map, const int32_t (&c)[4],
                                             const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
      "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(shared))
      : "memory");
}
__device__ __forceinline__ void copy_box_out(const void* map, const int32_t (&c)[5],
                                             const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
      "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(shared_address(shared))
      : "memory");
}

// ---- this thread's copies to global memory ----

// Ends a batch of them.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }
// Waits until the shared memory of all batches may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ---- order between the copy engine's accesses and ordinary ones ----

// Ordinary writes to shared memory, visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_shared_for_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash3::cuda
