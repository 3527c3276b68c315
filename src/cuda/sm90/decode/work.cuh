// SPDX-License-Identifier: Apache-2.0
// The runs of a block, which the schedule lists (schedule.cuh), and the ring through which one warp
// hands them to the roles of a decode kernel.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/device/pipeline.cuh"

namespace flash3::cuda::sm90 {

// Eight elements of a row from col on, a multiple of 8. Elements outside of the row are 0.
__device__ __forceinline__ uint4 load_piece(const unsigned short* row, int col, int dim) {
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = col + 2 * i;
    packed[i] = pack2(at < dim ? row[at] : uint16_t(0), at + 1 < dim ? row[at + 1] : uint16_t(0));
  }
  return {packed[0], packed[1], packed[2], packed[3]};
}

// The same of 16 elements of one byte.
__device__ __forceinline__ uint4 load_piece(const unsigned char* row, int col, int dim) {
  uint32_t packed[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (col + i < dim) packed[i / 4] |= uint32_t(row[col + i]) << (8 * (i % 4));
  return {packed[0], packed[1], packed[2], packed[3]};
}

// The runs that the block is at.
struct RunRing {
  DecodeRun runs[2];
  RingBarriers<2> barriers;
};

// Which runs a block has: those of a block of the schedule. Of a cluster all blocks have the same
// runs, each with a group of heads of its own.
struct RunSource {
  int block, ranks, rank;
};

// Brings the block's runs into the ring. A whole warp calls it, and every lane arrives.
__device__ __forceinline__ void load_runs(const DecodeParams& params, RunRing& ring,
                                          const RunSource& source) {
  const int lane = threadIdx.x % 32;
  PipelineState<2> state;
  int next = source.block;
  for (bool exists = true; exists; state.advance()) {
    int word = __ldcg(reinterpret_cast<const int*>(params.schedule.runs + next) + lane);
    if (source.ranks > 1 && lane == kHeadGroupWord) word = word * source.ranks + source.rank;
    wait(&ring.barriers.empty[state.stage], state.phase ^ 1, "run_empty");
    DecodeRun& run = ring.runs[state.stage];
    reinterpret_cast<int*>(&run)[lane] = word;
    arrive(&ring.barriers.full[state.stage]);
    __syncwarp();
    exists = run.exists;
    next = run.next;
  }
}

// Any other role's view of the ring. One thread uses it, or whole warps.
class RunReader {
 public:
  __device__ __forceinline__ explicit RunReader(RunRing& ring) : ring_(ring) {}

  // Waits for the next run. False if there is no more work.
  __device__ __forceinline__ bool next() const {
    wait(&ring_.barriers.full[state_.stage], state_.phase, "run_full");
    return run().exists;
  }
  __device__ __forceinline__ const DecodeRun& run() const { return ring_.runs[state_.stage]; }
  // Gives the run's place back. All threads of each warp call it.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&ring_.barriers.empty[state_.stage]);
    state_.advance();
  }

 private:
  RunRing& ring_;
  PipelineState<2> state_;
};

}  // namespace flash3::cuda::sm90
