// SPDX-License-Identifier: Apache-2.0
// Two kernels make a mask (core/mask_lists.hpp). In the first a thread block has a block of
// queries: it finds what these see (sources.cuh), tells of each block of keys how, takes room for
// that, and writes the list and the bits. In the second it has a block of keys, and looks it up in
// the lists.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/message.hpp"
#include "cuda/host/cuda_status.hpp"
#include "cuda/mask/make_mask.hpp"
#include "cuda/mask/sources.cuh"

namespace flash3::cuda {
namespace {

constexpr int kWarps = kMaskThreads / 32;
constexpr int kRowsOfLane = kMaskBlock / 32;

// How a block of keys is told, in a byte: kHidden, 1 + MaskKind, or kFirstRange + range.
enum : uint8_t { kHidden = 0, kFull = 1 + kMaskFull, kBits = 1 + kMaskBits, kFirstRange = 8 };

struct SharedLists {
  SharedRanges ranges;
  int blocks, partial;             // of the list
  int first_block, first_partial;  // where their room begins
  bool has_room;
};

// The lane's rows of a block of keys: lane, lane + 32, …
struct LaneRows {
  KeySet rows[kRowsOfLane];
};

template <class Source>
struct ListMaker {
  const MakeMaskParams& p;
  const QueryBlock& of;
  const Source& source;
  SharedLists& shared;
  uint8_t* kinds;  // of the blocks of keys from first_block() on
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  __device__ int ranges() const { return int(p.memory.shape.ranges); }
  __device__ int first_block() const { return shared.ranges.first_key / kMaskBlock; }
  __device__ int end_block() const { return ceil_div(shared.ranges.last_key, kMaskBlock); }

  __device__ void make_ranges() const {
    if (threadIdx.x == 0) {
      shared.ranges.first_key = int(p.memory.shape.seq_k);
      shared.ranges.last_key = 0;
      shared.blocks = shared.partial = 0;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row < kMaskBlock)
      for (int which = 0; which < ranges(); ++which) {
        MaskRange seen{0, 0};
        if (row < of.count)
          seen = intersection(in_band(p, of.first + row), source.range(which, row));
        if (seen.begin >= seen.end) {
          seen = {0, 0};
        } else {
          atomicMin(&shared.ranges.first_key, seen.begin);
          atomicMax(&shared.ranges.last_key, seen.end);
        }
        shared.ranges.rows[which][row] = seen;
        *p.memory.range(which, of.batch, of.head, of.first + row) = seen;
      }
    __syncthreads();
  }

  __device__ KeySet of_range(int which, int row, int block) const {
    const MaskRange& seen = shared.ranges.rows[which][row];
    const int first = block * kMaskBlock;
    return KeySet::of(seen.begin - first, seen.end - first);
  }
  __device__ LaneRows find(int block) const {
    LaneRows found;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = lane + 32 * i;
      for (int which = 0; which < ranges(); ++which) found.rows[i] |= of_range(which, row, block);
      if constexpr (Source::kHidesMore)
        if (found.rows[i].any()) found.rows[i] &= source.keys(row, block);
    }
    return found;
  }
  // By a whole warp.
  __device__ uint8_t kind_of(int block) const {
    const LaneRows found = find(block);
    bool any = false, full = true;
    unsigned equal = ~0u;  // a bit for each range
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = lane + 32 * i;
      if (row >= of.count) continue;
      any |= found.rows[i].any();
      full &= found.rows[i].all();
      for (int which = 0; which < ranges(); ++which)
        if (!(found.rows[i] == of_range(which, row, block))) equal &= ~(1u << which);
    }
    if (!__any_sync(~0u, any)) return kHidden;
    if (__all_sync(~0u, full)) return kFull;
    equal = __reduce_and_sync(~0u, equal) & ((1u << ranges()) - 1);
    return equal != 0 ? uint8_t(kFirstRange + __ffs(equal) - 1) : uint8_t(kBits);
  }

  __device__ void classify() const {
    const int first = first_block(), end = end_block();
    for (int block = first + warp; block < end; block += kWarps) {
      const uint8_t kind = kind_of(block);
      if (lane != 0) continue;
      kinds[block - first] = kind;
      if (kind != kHidden) atomicAdd(&shared.blocks, 1);
      if (kind == kBits) atomicAdd(&shared.partial, 1);
    }
    __syncthreads();
  }

  __device__ void take_room() const {
    if (threadIdx.x == 0) {
      const MaskShape& shape = p.memory.shape;
      MaskCounts& counts = *p.memory.counts;
      const long long blocks = atomicAdd(&counts.blocks, shared.blocks),
                      partial = atomicAdd(&counts.partial_blocks, shared.partial);
      shared.has_room = blocks + shared.blocks <= shape.blocks &&
                        partial + shared.partial <= shape.partial_blocks;
      shared.first_block = int(blocks), shared.first_partial = int(partial);
      if (!shared.has_room) counts.overflow = 1;
      *p.memory.list(of.batch, of.head, of.block) =
          shared.has_room ? MaskList{int(blocks), shared.blocks} : MaskList{0, 0};
    }
    __syncthreads();
  }

  // In ascending order; each warp finds the places of all, and writes the bits of its own.
  __device__ void write() const {
    const int first = first_block(), end = end_block();
    int at = shared.first_block, slot = shared.first_partial;
    for (int base = first; base < end; base += 32) {
      const uint8_t kind = base + lane < end ? kinds[base + lane - first] : uint8_t(kHidden);
      const unsigned listed = __ballot_sync(~0u, kind != kHidden),
                     partial = __ballot_sync(~0u, kind == kBits), before = (1u << lane) - 1;
      if (warp == 0 && kind != kHidden) {
        const MaskKind how = kind == kFull ? kMaskFull : kind == kBits ? kMaskBits : kMaskRange;
        const int data = kind == kBits   ? slot + __popc(partial & before)
                         : kind == kFull ? 0
                                         : kind - kFirstRange;
        p.memory.blocks[at + __popc(listed & before)] = MaskBlock::make(base + lane, how, data);
        atomicAdd(&p.memory.key_list(of.batch, of.head, base + lane)->count, 1);
      }
      at += __popc(listed);
      for (unsigned left = partial; left != 0; left &= left - 1, ++slot)
        if (slot % kWarps == warp) write_bits(base + __ffs(left) - 1, slot);
    }
  }

  // The 16 bits of a row's keys that one thread of a kernel has, of 64: keys 8g + 2c and the next.
  static __device__ __forceinline__ unsigned thread_bits(unsigned low, unsigned high, int c) {
    unsigned bits = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) bits |= ((g < 4 ? low : high) >> (g % 4 * 8 + 2 * c) & 3) << 2 * g;
    return bits;
  }
  // By a whole warp. A word has bits of rows 8 apart, which lie in lanes 8 apart: the lower lane
  // writes the words of the first 64 keys, the other one those of the rest.
  __device__ void write_bits(int block, int slot) const {
    const LaneRows found = find(block);
    unsigned* const words = p.memory.words_of(slot);
    const bool upper = lane % 16 < 8;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = lane + 32 * i;
      unsigned out[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const unsigned first = thread_bits(found.rows[i].words[0], found.rows[i].words[1], c),
                       second = thread_bits(found.rows[i].words[2], found.rows[i].words[3], c);
        const unsigned other = __shfl_xor_sync(~0u, upper ? second : first, 8);
        out[c] = upper ? first | other << 16 : other | second << 16;
      }
      const MaskBit at = mask_bit(row, upper ? 0 : 64);
      *reinterpret_cast<uint4*>(words + at.word) = {out[0], out[1], out[2], out[3]};
    }
  }
};

template <MaskSource kSource>
__global__ void __launch_bounds__(kMaskThreads) list_kernel(const MakeMaskParams p) {
  using Source = SourceOf<kSource>;
  __shared__ SharedLists shared;
  __shared__ typename Source::Shared of_source;
  extern __shared__ uint32_t maps[];  // the caller's blocks, and after them the kinds
  const QueryBlock of(p.memory.shape, int(blockIdx.x));
  const Source source{p, of, of_source, maps};
  auto* const kinds = reinterpret_cast<uint8_t*>(
      maps + (kSource == MaskSource::kBlocks
                  ? ceil_div(kMaskBlock, p.block_rows) * p.shared_words + p.shared_words
                  : 0));
  const ListMaker<Source> maker{p, of, source, shared, kinds};
  source.begin();
  maker.make_ranges();
  maker.classify();
  maker.take_room();
  if (shared.has_room) maker.write();
}

// ---- the lists of blocks of keys ----

// Where a list of blocks of queries has this block of keys; −1: nowhere.
__device__ __forceinline__ int find_block(const MaskMemory& memory, const MaskList& list,
                                          int block) {
  int first = 0, last = list.count;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (memory.blocks[list.begin + middle].block() < block)
      first = middle + 1;
    else
      last = middle;
  }
  const int at = list.begin + first;
  return first < list.count && memory.blocks[at].block() == block ? at : -1;
}

__global__ void __launch_bounds__(kMaskThreads) transpose_kernel(const MaskMemory memory) {
  __shared__ int begin;
  __shared__ int of_warp[kWarps];
  const MaskShape& shape = memory.shape;
  const int k_blocks = int(shape.k_blocks()), q_blocks = int(shape.q_blocks());
  const int pair = int(blockIdx.x) / k_blocks, block = int(blockIdx.x) % k_blocks;
  const int batch = pair / int(shape.heads), head = pair % int(shape.heads);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  MaskList& own = *memory.key_list(batch, head, block);
  if (memory.counts->overflow != 0) {
    // Nothing has room then: every list is empty.
    if (thread == 0) own = {0, 0};
    for (int q = block + thread * k_blocks; q < q_blocks; q += kMaskThreads * k_blocks)
      *memory.list(batch, head, q) = {0, 0};
    return;
  }
  if (thread == 0) own.begin = begin = atomicAdd(&memory.counts->key_blocks, own.count);
  __syncthreads();
  int at = begin;
  for (int base = 0; base < q_blocks; base += kMaskThreads) {
    const int q = base + thread;
    const int found = q < q_blocks ? find_block(memory, *memory.list(batch, head, q), block) : -1;
    const unsigned listed = __ballot_sync(~0u, found >= 0);
    if (lane == 0) of_warp[warp] = __popc(listed);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? of_warp[w] : 0;
      all += of_warp[w];
    }
    if (found >= 0) {
      const MaskBlock& x = memory.blocks[found];
      memory.key_blocks[at + before + __popc(listed & ((1u << lane) - 1))] =
          MaskBlock::make(q, x.kind(), x.data);
    }
    at += all;
    __syncthreads();
  }
}

// ---- launching ----

template <MaskSource kSource>
Status launch_lists(const MakeMaskParams& params, int lists, size_t shared, cudaStream_t stream) {
  auto* const kernel = list_kernel<kSource>;
  if (shared > 16 * 1024)
    FLASH3_CHECK(cuda_status(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
        "setting the shared memory of the kernel that makes a mask"));
  kernel<<<dim3(unsigned(lists)), kMaskThreads, shared, stream>>>(params);
  return cuda_status(cudaGetLastError(), "launching the kernel that makes a mask");
}

}  // namespace

Status launch_make_mask(const MaskProblem& problem) {
  const MaskShape& s = problem.shape;
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  const MaskPlaces at = MaskPlaces::of(s);
  // Kernels count in 32 bits, and a block's keys in shared memory.
  constexpr size_t kMostShared = 200 * 1024;
  const bool has_maps = problem.source == MaskSource::kBlocks;
  const long long words =
      has_maps ? ceil_div(ceil_div(s.seq_k, (long long)problem.block_keys), 32ll) : 0;
  const long long maps =
      has_maps ? (ceil_div((long long)kMaskBlock, (long long)problem.block_rows) + 1) * words : 0;
  const auto shared = size_t(maps * 4 + s.k_blocks());
  const long long most = std::max({s.seq_q, s.seq_k, s.lists(), s.key_lists(), s.all_blocks()});
  if (most > kMostCounted || shared > kMostShared)
    return unsupported(
        message("a mask of seq_q = ", s.seq_q, " and seq_k = ", s.seq_k, " with ", s.all_blocks(),
                " blocks in all takes ", shared,
                " bytes of shared memory to make, but the hopper backend counts up to ",
                kMostCounted, " and has ", kMostShared));
  FLASH3_CHECK(cuda_status(cudaMemsetAsync(problem.data, 0, size_t(at.ranges), stream),
                           "clearing the lists of a mask"));
  MakeMaskParams params{
      MaskMemory::of(s, problem.data),
      TileMask::make(int(s.seq_q), int(s.seq_k), problem.rule.narrowed(kMaxLength)),
      problem.tensor,
      problem.counts,
      int(std::max<int64_t>(problem.block_rows, 1)),
      int(std::max<int64_t>(problem.block_keys, 1)),
      int(words)};
  const int lists = int(s.lists()), key_lists = int(s.key_lists());
  if (lists > 0) {
    const auto launch = [&]<MaskSource kSource>() {
      return launch_lists<kSource>(params, lists, shared, stream);
    };
    switch (problem.source) {
      case MaskSource::kBand: FLASH3_CHECK(launch.template operator()<MaskSource::kBand>()); break;
      case MaskSource::kRanges:
        FLASH3_CHECK(launch.template operator()<MaskSource::kRanges>());
        break;
      case MaskSource::kDocuments:
        FLASH3_CHECK(launch.template operator()<MaskSource::kDocuments>());
        break;
      case MaskSource::kDense:
        FLASH3_CHECK(launch.template operator()<MaskSource::kDense>());
        break;
      case MaskSource::kBlocks:
        FLASH3_CHECK(launch.template operator()<MaskSource::kBlocks>());
        break;
    }
  }
  if (lists > 0 && key_lists > 0) {
    transpose_kernel<<<dim3(unsigned(key_lists)), kMaskThreads, 0, stream>>>(params.memory);
    FLASH3_CHECK(cuda_status(cudaGetLastError(), "launching the kernel that transposes a mask"));
  }
  return {};
}

Status read_mask_counts(const MaskShape&, const void* data, void* stream, MaskCounts* counts) {
  const auto on = static_cast<cudaStream_t>(stream);
  FLASH3_CHECK(
      cuda_status(cudaMemcpyAsync(counts, data, sizeof(MaskCounts), cudaMemcpyDeviceToHost, on),
                  "reading the counts of a mask"));
  return cuda_status(cudaStreamSynchronize(on), "waiting for a mask");
}

}  // namespace flash3::cuda
