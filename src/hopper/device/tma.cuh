// Bulk tensor copies between global and shared memory by the copy engine. One thread issues;
// coordinates are (dim, seq, head, batch), and what lies outside the tensor is read as zero and
// never written.
#pragma once

#include <cuda/ptx>

#include "hopper/device/element.cuh"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

struct TileCoordinates {
  int32_t dim, seq, head, batch;
};

__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, TileCoordinates at,
                                         uint64_t* barrier) {
  using namespace cuda::ptx;
  const int32_t coordinates[4] = {at.dim, at.seq, at.head, at.batch};
  cp_async_bulk_tensor(space_cluster, space_global, shared, map, coordinates, barrier);
}

__device__ __forceinline__ void tma_store(const TensorMap* map, TileCoordinates at,
                                          const void* shared) {
  using namespace cuda::ptx;
  const int32_t coordinates[4] = {at.dim, at.seq, at.head, at.batch};
  cp_async_bulk_tensor(space_global, space_shared, map, coordinates, shared);
}

// Ends this thread's batch of stores and waits until their shared memory may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
  using namespace cuda::ptx;
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group_read(n32_t<0>{});
}

// Makes ordinary writes to shared memory visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_shared_for_async_proxy() {
  using namespace cuda::ptx;
  fence_proxy_async(space_shared);
}

// PTX ISA 9.7.9.15, prefetch.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flash3::hopper
