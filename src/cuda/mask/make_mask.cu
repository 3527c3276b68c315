// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "cuda/host/cuda_status.hpp"
#include "cuda/host/programmatic_launch.hpp"
#include "cuda/mask/by_bits.cuh"
#include "cuda/mask/by_blocks.cuh"
#include "cuda/mask/by_dense.cuh"
#include "cuda/mask/by_documents.cuh"
#include "cuda/mask/by_ranges.cuh"
#include "cuda/mask/make_lists.cuh"
#include "cuda/mask/make_mask.hpp"
#include "cuda/mask/transpose_lists.cuh"

namespace flash3::cuda {

// ---- where documents begin, in order, as the sequences of a packed batch have it ----
// One thread block counts the runs of all blocks of keys, which the kernel before it has noted.

constexpr int kPackThreads = 1024;

// Writes where the runs of a block begin, of which `place` come before, as far as there is room.
__device__ __forceinline__ void write_starts(const MaskStarts& starts, const uint4& begins,
                                             long long block, int place) {
  const unsigned words[kBeginWords] = {begins.x, begins.y, begins.z, begins.w};
#pragma unroll
  for (int w = 0; w < kBeginWords; ++w)
    for (unsigned left = words[w]; left != 0 && place < starts.documents; left &= left - 1) {
      const int key = int(block * kMaskBlock) + 32 * w + __ffs(int(left)) - 1;
      starts.q[place] = starts.k[place] = key;
      ++place;
    }
}

// Where there are more documents than there is room for, the last kernel writes all starts anew.
__global__ void __launch_bounds__(kPackThreads)
    pack_documents_kernel(const __grid_constant__ MaskParams p) {
  using Scan = cub::BlockScan<int, kPackThreads>;
  __shared__ Scan::TempStorage scan;
  wait_for_previous_kernel();
  launch_dependents();
  const MaskStarts& starts = p.starts;
  const MaskShape& shape = p.memory.shape;
  const int thread = threadIdx.x;
  int before = 0;
  for (long long first = 0; first < shape.k_blocks(); first += kPackThreads) {
    const long long block = first + thread;
    uint4 begins{0, 0, 0, 0};
    if (block < shape.k_blocks())
      begins = *reinterpret_cast<const uint4*>(begins_of_block(p, block));
    int all, place = __popc(begins.x) + __popc(begins.y) + __popc(begins.z) + __popc(begins.w);
    Scan(scan).ExclusiveSum(place, place, all);
    write_starts(starts, begins, block, before + place);
    before += all;
    __syncthreads();  // the next sum takes the same memory
  }
  for (long long i = min((long long)before, starts.documents) + thread; i < starts.count();
       i += kPackThreads)
    starts.q[i] = starts.k[i] = int(shape.seq_k);
  if (thread != 0) return;
  p.memory.counts->documents = before;
  if (before > starts.documents) p.memory.counts->overflow = kNoRoom;
}

// ---- the kernels of a mask, one after the other ----

namespace {

static_assert(kAllPairsSeen == kAllSeen);

constexpr int kBeginThreads = 256;

// Clears the counts and, of documents, notes where runs begin: a warp a block of keys.
__global__ void __launch_bounds__(kBeginThreads)
    begin_kernel(const __grid_constant__ MaskParams p, bool documents) {
  wait_for_previous_kernel();
  launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.memory.counts = {};
  if (!documents) return;
  constexpr int kWarps = kBeginThreads / 32;
  const long long k_blocks = p.memory.shape.k_blocks();
  for (long long i = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
       i < p.memory.shape.key_lists(); i += (long long)gridDim.x * kWarps)
    note_runs(p, int(i / k_blocks), i % k_blocks);
}

// A block a list of queries: as many as a grid has would take terabytes. Lists of keys and what
// else takes less is done in turns.
constexpr long long kMostInTurns = 1 << 20;

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), long long blocks, int threads, void* stream,
              const char* what, const Arguments&... arguments) {
  if (blocks == 0) return {};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(blocks));
  launch.blockDim = dim3(unsigned(threads));
  launch.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute overlap = programmatic_launch();
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&launch, kernel, arguments...), what);
}

SourceTensor source_tensor(const MaskTensor& t) {
  return {t.data, t.stride_batch, t.stride_head, t.stride_row, t.size};
}

// Whether 16 bytes at a time can be read of each row of bytes or bits.
bool in_vectors(const MaskProblem& p) {
  const auto fits = [](const void* data, auto... strides) {
    return (reinterpret_cast<uintptr_t>(data) | ... | uintptr_t(strides)) % 16 == 0;
  };
  const MaskTensor& t = p.tensor;
  if (p.source == MaskSource::kBitBlocks)
    return fits(p.block_bits.data, p.block_bits.stride_block, p.block_bits.stride_row);
  return fits(t.data, t.stride_batch, t.stride_head, t.stride_row);
}

template <class Source>
Status launch_lists(const MaskParams& params, void* stream) {
  return launch(lists_kernel<Source>, params.memory.shape.lists(), Source::kThreads, stream,
                "launching the kernel that makes a mask's lists", params);
}

Status launch_lists(MaskSource source, const MaskParams& params, void* stream) {
  switch (source) {
    case MaskSource::kBand: return launch_lists<ByBand>(params, stream);
    case MaskSource::kRanges:
      if (params.memory.shape.ranges == 1) return launch_lists<ByRanges<1>>(params, stream);
      return launch_lists<ByRanges<kMostMaskRanges>>(params, stream);
    case MaskSource::kDocuments: return launch_lists<ByDocuments>(params, stream);
    case MaskSource::kDense: return launch_lists<ByDense>(params, stream);
    case MaskSource::kBlocks: return launch_lists<ByBlocks>(params, stream);
    case MaskSource::kBits: return launch_lists<ByBits<false>>(params, stream);
    case MaskSource::kBitBlocks: return launch_lists<ByBits<true>>(params, stream);
  }
  return {};
}

}  // namespace

Status launch_make_mask(const MaskProblem& problem) {
  MaskParams params{};
  params.memory = MaskMemory::of(problem.shape, problem.data);
  params.starts = problem.starts();
  params.rule = problem.rule;
  params.q = problem.sequences_q, params.k = problem.sequences_k;
  params.source = source_tensor(problem.tensor);
  params.counts = source_tensor(problem.counts);
  params.block_rows = problem.block_rows, params.block_keys = problem.block_keys;
  const BlockBits& bits = problem.block_bits;
  params.block_bits = {bits.data, bits.blocks, bits.stride_block, bits.stride_row};
  params.in_vectors = in_vectors(problem);

  const bool documents = problem.source == MaskSource::kDocuments;
  const long long key_lists = problem.shape.key_lists();
  const long long blocks =
      documents ? std::clamp(ceil_div(key_lists, kBeginThreads / 32), 1ll, kMostInTurns) : 1;
  FLASH3_CHECK(launch(begin_kernel, blocks, kBeginThreads, problem.stream,
                      "launching the kernel that begins a mask", params, documents));
  if (problem.documents > 0)
    FLASH3_CHECK(launch(pack_documents_kernel, 1, kPackThreads, problem.stream,
                        "launching the kernel that notes where documents begin", params));
  FLASH3_CHECK(launch_lists(problem.source, params, problem.stream));
  return launch(transpose_kernel, std::min(key_lists, kMostInTurns), kTransposeThreads,
                problem.stream, "launching the kernel that transposes a mask's lists", params);
}

Status read_mask_counts(const MaskShape& shape, const void* data, void* stream,
                        MaskCounts* counts) {
  const MaskMemory memory = MaskMemory::of(shape, const_cast<void*>(data));
  const auto on = static_cast<cudaStream_t>(stream);
  FLASH3_CHECK(cuda_status(
      cudaMemcpyAsync(counts, memory.counts, sizeof *counts, cudaMemcpyDeviceToHost, on),
      "copying what a mask needs"));
  return cuda_status(cudaStreamSynchronize(on), "waiting for a mask");
}

}  // namespace flash3::cuda
