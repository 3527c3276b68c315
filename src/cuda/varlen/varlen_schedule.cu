// SPDX-License-Identifier: Apache-2.0
// One block sorts the sequences by the length of the side that a tile walks over, so that a long
// one never runs last, and counts their tiles.
#include <cub/block/block_scan.cuh>

#include "core/arithmetic.hpp"
#include "cuda/device/key_splits.hpp"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/programmatic_launch.hpp"
#include "cuda/varlen/varlen_schedule.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = 1024;
using Scan = cub::BlockScan<int, kThreads>;

// Lengths in classes an eighth of a power of two wide, the longest first.
constexpr int kClasses = 256;
__device__ int length_class(int length) {
  if (length < 8) return kClasses - 1 - length;
  const int exponent = 31 - __clz(length);
  return kClasses - 1 - ((exponent - 2) * 8 + (length >> (exponent - 3)) % 8);
}

__device__ ListedSequence make_rows(const VarlenScheduleParams& params, int b) {
  const SeqInfo info = seq_info(params.q, params.k, b);
  ListedSequence s{};
  s.batch = b;
  s.q_first = int(info.q.first), s.q_length = int(info.q.length);
  const CacheKeys keys = cache_keys(params.cache, params.k, rows_of(params.added, b).length, b);
  s.k_first = int(info.k.first + keys.first), s.k_length = int(keys.length());
  s.k_capacity = int(info.k.capacity);
  if (params.in_order) return s;

  const int tiled = params.tiles_of_keys ? s.k_capacity : s.q_length,
            walked = params.tiles_of_keys ? s.q_length : s.k_length;
  s.tiles = s.q_length < params.least_queries ? 0 : ceil_div(tiled, params.tile_rows);
  long long groups = 1;
  if (params.bytes_per_row > 0)
    groups = max(1ll, params.bytes_at_a_time / max(1ll, walked * params.bytes_per_row)) *
             params.group_step;
  if (params.tiles_at_a_time > 0) groups = max(1, params.tiles_at_a_time / max(s.tiles, 1));
  s.groups_at_a_time = int(min(groups, (long long)(params.groups)));
  return s;
}

__global__ void __launch_bounds__(kThreads) list_kernel(VarlenScheduleParams params) {
  __shared__ int places[kClasses];
  __shared__ Scan::TempStorage scan;
  wait_for_previous_kernel();
  launch_dependents();
  const int thread = threadIdx.x;
  for (int i = thread; i < params.counter_count; i += kThreads) params.counters[i] = 0;
  const auto sort_key = [&](const ListedSequence& s) {
    return length_class(params.tiles_of_keys ? s.q_length : s.k_length);
  };

  if (!params.in_order) {
    if (thread < kClasses) places[thread] = 0;
    __syncthreads();
    for (int b = thread; b < params.batch; b += kThreads)
      atomicAdd(&places[sort_key(make_rows(params, b))], 1);
    __syncthreads();
    int place = thread < kClasses ? places[thread] : 0;
    Scan(scan).ExclusiveSum(place, place);
    if (thread < kClasses) places[thread] = place;
    __syncthreads();
  }
  for (int b = thread; b < params.batch; b += kThreads) {
    const ListedSequence s = make_rows(params, b);
    const int place = params.in_order ? b : atomicAdd(&places[sort_key(s)], 1);
    params.rows[place] = s;
  }
  if (params.in_order) return;

  __syncthreads();
  int before = 0;
  for (int first = 0; first <= params.batch; first += kThreads) {
    const int i = first + thread;
    int tiles = 0, all;
    if (i < params.batch)
      tiles = params.rows[i].tiles * params.groups *
              key_splits(params.rows[i].k_length, params.most_splits);
    Scan(scan).ExclusiveSum(tiles, tiles, all);
    if (i <= params.batch) params.first_tile[i] = before + tiles;
    before += all;
    __syncthreads();
  }
}

}  // namespace

Status launch_varlen_schedule(const VarlenScheduleParams& params, void* stream) {
  return cuda_status(launch_overlapping(list_kernel, dim3(1), kThreads, stream, params),
                     "launching the kernel that lists the sequences");
}

}  // namespace flash3::cuda
