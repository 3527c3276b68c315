// SPDX-License-Identifier: Apache-2.0
// What no thread waits for beside copies of boxes (copies.cuh): copies of a few bytes a thread,
// boxes that are read once, additions to global memory. PTX ISA 9.7.9.25.3.1 cp.async, 9.7.13.15.17
// cp.async.mbarrier.arrive, 9.7.9.25.5 cp.async.bulk.tensor, 9.7.13.8 red.
#pragma once

#include "cuda/device/ptx/sync.cuh"

namespace flash3::cuda {

// 16 bytes, of which those after the first `bytes` are not read, and become 0.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// Until this thread's copies are there.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Arrives when this thread's copies so far have; one of the arrivals that the barrier counts.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// A box that is read once: it is the first to leave the L2 cache.
__device__ __forceinline__ void copy_box_in_once(void* shared, const void* map,
                                                 const int32_t (&c)[4], uint64_t* barrier) {
  constexpr unsigned long long kEvictFirst = 0x12F0000000000000;  // a policy of createpolicy
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(barrier)),
      "l"(kEvictFirst)
      : "memory");
}

// x[0…3] to four consecutive floats at a 16-byte aligned address. The order of concurrent additions
// is not defined.
__device__ __forceinline__ void add_to_global(float* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace flash3::cuda
