// Bulk tensor copies between global and shared memory by the copy engine. One thread issues; what
// lies outside the tensor is read as zero and never written.
#pragma once

#include <cuda/ptx>

#include "hopper/device/element.cuh"
#include "hopper/device/tensor_map.h"

namespace flash3::hopper {

// Where a box begins, for the two kinds of map that the host makes (tensor_map.hpp): the keys of
// one head, and queries of the packed heads of a group.
struct KeyCoordinates {
  int32_t dim, seq, head, batch;
};
struct QueryCoordinates {
  int32_t dim, seq, head_group, batch;
};

__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, KeyCoordinates at,
                                         uint64_t* barrier) {
  using namespace cuda::ptx;
  const int32_t coordinates[4] = {at.dim, at.seq, at.head, at.batch};
  cp_async_bulk_tensor(space_cluster, space_global, shared, map, coordinates, barrier);
}

__device__ __forceinline__ void tma_load(void* shared, const TensorMap* map, QueryCoordinates at,
                                         uint64_t* barrier) {
  using namespace cuda::ptx;
  const int32_t coordinates[5] = {at.dim, 0, at.seq, at.head_group, at.batch};
  cp_async_bulk_tensor(space_cluster, space_global, shared, map, coordinates, barrier);
}

// `bytes` contiguous bytes, a multiple of 16, as are both addresses.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  using namespace cuda::ptx;
  cp_async_bulk(space_cluster, space_global, shared, global, bytes, barrier);
}

__device__ __forceinline__ void tma_store(const TensorMap* map, KeyCoordinates at,
                                          const void* shared) {
  using namespace cuda::ptx;
  const int32_t coordinates[4] = {at.dim, at.seq, at.head, at.batch};
  cp_async_bulk_tensor(space_global, space_shared, map, coordinates, shared);
}

__device__ __forceinline__ void tma_store(const TensorMap* map, QueryCoordinates at,
                                          const void* shared) {
  using namespace cuda::ptx;
  const int32_t coordinates[5] = {at.dim, 0, at.seq, at.head_group, at.batch};
  cp_async_bulk_tensor(space_global, space_shared, map, coordinates, shared);
}

// Adds `bytes` bytes of contiguous floats to those in global memory; both 16-byte aligned.
__device__ __forceinline__ void bulk_add(float* global, const void* shared, uint32_t bytes) {
  using namespace cuda::ptx;
  cp_reduce_async_bulk(space_global, space_shared, op_add, global,
                       static_cast<const float*>(shared), bytes);
}

// Ends this thread's batch of stores.
__device__ __forceinline__ void tma_store_commit() { cuda::ptx::cp_async_bulk_commit_group(); }

// Waits until the shared memory of this thread's stores may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
}

// Waits until this thread's stores and additions are done, and visible to it.
__device__ __forceinline__ void tma_store_wait() {
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>{});
}

// Orders what the copy engine wrote to global memory before ordinary accesses that follow.
__device__ __forceinline__ void fence_proxy_async_global() {
  using namespace cuda::ptx;
  fence_proxy_async(space_global);
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
