// SPDX-License-Identifier: Apache-2.0
// Waiting: mbarriers in shared memory (producers and consumers) and the hardware's named barriers
// (among consumers). In a build with FLASH3_DEBUG_BARRIERS a wait that lasts seconds prints the
// barrier's name and traps.
#pragma once

#include <cuda/ptx>

#include "hopper/device/element.cuh"
#include "hopper/device/ptx/memory.cuh"

#if defined(FLASH3_DEBUG_BARRIERS)
#include <cstdio>
#endif

namespace flash3::hopper {

// A block's mbarriers, named by what has happened when they complete.
enum class BarrierName {
  kQFull,
  kQEmpty,
  kKFull,
  kKEmpty,
  kVFull,
  kVEmpty,
  kRawVFull,
  kRawVEmpty,
  kDoutFull,
  kDoutEmpty,
  kDqFull,
  kDqEmpty,
  kPFull,
  kPEmpty,
  kDsFull,
  kDsEmpty,
  kDqTurn,
  kTileRead,
  kTileLoaded,
  kTileFull,
  kTileEmpty,
  kTileWanted
};

#if defined(FLASH3_DEBUG_BARRIERS)
__device__ inline const char* to_string(BarrierName name) {
  switch (name) {
    case BarrierName::kQFull: return "q_full";
    case BarrierName::kQEmpty: return "q_empty";
    case BarrierName::kKFull: return "k_full";
    case BarrierName::kKEmpty: return "k_empty";
    case BarrierName::kVFull: return "v_full";
    case BarrierName::kVEmpty: return "v_empty";
    case BarrierName::kRawVFull: return "raw_v_full";
    case BarrierName::kRawVEmpty: return "raw_v_empty";
    case BarrierName::kDoutFull: return "dout_full";
    case BarrierName::kDoutEmpty: return "dout_empty";
    case BarrierName::kDqFull: return "dq_full";
    case BarrierName::kDqEmpty: return "dq_empty";
    case BarrierName::kPFull: return "p_full";
    case BarrierName::kPEmpty: return "p_empty";
    case BarrierName::kDsFull: return "ds_full";
    case BarrierName::kDsEmpty: return "ds_empty";
    case BarrierName::kDqTurn: return "dq_turn";
    case BarrierName::kTileRead: return "tile_read";
    case BarrierName::kTileLoaded: return "tile_loaded";
    case BarrierName::kTileFull: return "tile_full";
    case BarrierName::kTileEmpty: return "tile_empty";
    case BarrierName::kTileWanted: return "tile_wanted";
  }
  return "?";
}
#endif

// Calls done() until it is true.
template <class Done>
__device__ __forceinline__ void wait_until(const Done& done, [[maybe_unused]] BarrierName name,
                                           [[maybe_unused]] int value) {
#if defined(FLASH3_DEBUG_BARRIERS)
  constexpr long long kTimeoutClocks = 4'000'000'000;  // about two seconds
  const long long start = clock64();
  while (!done()) {
    if (clock64() - start > kTimeoutClocks) {
      printf("flash3: stuck on barrier %s: block %d, warp %d, lane %d, parity %d\n",
             to_string(name), int(blockIdx.x), int(threadIdx.x / 32), int(threadIdx.x % 32), value);
      __trap();
    }
  }
#else
  while (!done()) {
  }
#endif
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity, BarrierName name) {
  wait_until([&] { return cuda::ptx::mbarrier_try_wait_parity(barrier, parity); }, name,
             int(parity));
}

// Waits until a counter in global memory, to which others add, has come to this value, or past it.
__device__ __forceinline__ void wait_for_turn(const int* counter, int value, BarrierName name) {
  wait_until([&] { return load_acquire(counter) >= value; }, name, value);
}

__device__ __forceinline__ void arrive(uint64_t* barrier) { cuda::ptx::mbarrier_arrive(barrier); }

// A warp's arrival that it has read a stage.
__device__ __forceinline__ void release(uint64_t* empty, int thread) {
  if (thread % 32 == 0) arrive(empty);
}

// One arrival, and the bytes that TMA will write before the phase completes.
__device__ __forceinline__ void arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  using namespace cuda::ptx;
  mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, barrier, bytes);
}

// Hardware barriers, one id each; id 0 is __syncthreads'. Those with a warpgroup own
// kMaxConsumerWarpgroups ids in a row.
enum class NamedBarrier : int {
  kGemmTurn = 1,       // this warpgroup may issue its GEMMs (ping-pong)
  kOutputStaged = 5,   // this warpgroup's output tile is in shared memory, or its readers are done
                       // with what was there
  kScoreGradient = 9,  // dS of all warpgroups is in shared memory
  kOwnKeysRead = 13,   // no consumer reads K and V of the block any more; 10 to 12 are free
};
inline constexpr int kMaxConsumerWarpgroups = 4;

// PTX ISA 9.7.13.1, bar. Among `threads` threads in all, syncing and arriving.
__device__ __forceinline__ void sync(NamedBarrier barrier, int warpgroup, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive(NamedBarrier barrier, int warpgroup, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier) + warpgroup), "r"(threads) : "memory");
}

}  // namespace flash3::hopper
