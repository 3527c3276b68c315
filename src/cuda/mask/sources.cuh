// SPDX-License-Identifier: Apache-2.0
// What the queries of a block see, by the source that a mask is made from (flash3/mask.h) and the
// band. A thread block looks at one block of queries.
#pragma once

#include "core/mask_problem.hpp"
#include "cuda/device/sequence.hpp"

namespace flash3::cuda {

inline constexpr int kMaskThreads = 256;

// Fields of MaskProblem that kernels read.
struct MakeMaskParams {
  MaskMemory memory;
  TileMask band;
  MaskTensor tensor, counts;
  int block_rows, block_keys;
  int shared_words;  // of the bit maps of the caller's blocks, for each row of them
};

// Keys of a block, a bit each.
struct KeySet {
  uint32_t words[4] = {};

  __device__ __forceinline__ bool any() const {
    return (words[0] | words[1] | words[2] | words[3]) != 0;
  }
  __device__ __forceinline__ bool all() const {
    return (words[0] & words[1] & words[2] & words[3]) == ~0u;
  }
  __device__ __forceinline__ bool operator==(const KeySet& o) const {
    return words[0] == o.words[0] && words[1] == o.words[1] && words[2] == o.words[2] &&
           words[3] == o.words[3];
  }
  __device__ __forceinline__ void operator|=(const KeySet& o) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] |= o.words[w];
  }
  __device__ __forceinline__ void operator&=(const KeySet& o) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] &= o.words[w];
  }
  // Keys [begin, end) counted from the block's first; they may lie outside of it.
  static __device__ __forceinline__ KeySet of(int begin, int end) {
    KeySet set;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int first = min(max(begin - 32 * w, 0), 32), last = min(max(end - 32 * w, 0), 32);
      if (first < last) set.words[w] = ~0u >> (32 - (last - first)) << first;
    }
    return set;
  }
};

// The list that a thread block makes: of a block of queries of a sequence and a head.
struct QueryBlock {
  int batch, head, block;
  int first, count;  // queries: at most kMaskBlock

  __device__ __forceinline__ QueryBlock(const MaskShape& shape, int list) {
    const int blocks = int(shape.q_blocks()), pair = list / blocks;
    block = list % blocks;
    batch = pair / int(shape.heads);
    head = pair % int(shape.heads);
    first = block * kMaskBlock;
    count = min(kMaskBlock, int(shape.seq_q) - first);
  }
  template <class T>
  __device__ __forceinline__ const T* data(const MaskTensor& t) const {
    return static_cast<const T*>(t.data) + batch * t.stride_batch + head * t.stride_head;
  }
};

// What all sources have: the ranges of the block's queries.
struct SharedRanges {
  MaskRange rows[kMostMaskRanges][kMaskBlock];
  int first_key, last_key;  // that any query may see, half-open
};

__device__ __forceinline__ MaskRange intersection(const MaskRange& a, const MaskRange& b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}
// What the band lets a query see.
__device__ __forceinline__ MaskRange in_band(const MakeMaskParams& p, int query) {
  return {max(p.band.first(query), 0), min(p.band.end(query), int(p.memory.shape.seq_k))};
}

// ---- sources ----
//
// begin(): by all threads, before anything is asked; may synchronise. range(which, row): of a query
// of the block, and which of its ranges; the band comes on top. keys(row, block): what else hides
// keys of a block of keys, by one thread.

template <MaskSource kSource>
struct SourceOf;

template <>
struct SourceOf<MaskSource::kBand> {
  static constexpr bool kHidesMore = false;
  struct Shared {};
  const MakeMaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  uint32_t* maps;
  __device__ void begin() const {}
  __device__ MaskRange range(int, int) const { return {0, int(p.memory.shape.seq_k)}; }
  __device__ KeySet keys(int, int) const { return {}; }
};

template <>
struct SourceOf<MaskSource::kRanges> {
  static constexpr bool kHidesMore = false;
  struct Shared {};
  const MakeMaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  uint32_t* maps;
  __device__ void begin() const {}
  __device__ MaskRange range(int which, int row) const {
    const int* const bounds = of.data<int>(p.tensor) + of.first + row;
    return {bounds[2 * which * p.tensor.stride_row], bounds[(2 * which + 1) * p.tensor.stride_row]};
  }
  __device__ KeySet keys(int, int) const { return {}; }
};

// The runs of equal numbers that the block's tokens lie in: those inside by bits that tell where
// runs begin, the first one's beginning and the last one's end by a search outwards.
template <>
struct SourceOf<MaskSource::kDocuments> {
  static constexpr bool kHidesMore = false;
  struct Shared {
    int numbers[kMaskBlock];
    unsigned begins[kMaskBlock / 32];  // a bit for each token that begins a run
    int found;
    int run_begin, run_end;  // of the first and of the last token
  };
  const MakeMaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  uint32_t* maps;

  __device__ int seq_k() const { return int(p.memory.shape.seq_k); }
  __device__ int first_token() const { return of.first + seq_k() - int(p.memory.shape.seq_q); }
  // Rows whose tokens are keys: [first_row, end_row).
  __device__ int first_row() const { return max(-first_token(), 0); }
  __device__ int end_row() const { return min(of.count, seq_k() - first_token()); }

  __device__ void begin() const {
    const int* const documents = of.data<int>(p.tensor);
    const int thread = threadIdx.x, first = first_row(), end = end_row();
    const bool is_key = thread >= first && thread < end;
    if (thread < kMaskBlock)
      shared.numbers[thread] = is_key ? documents[first_token() + thread] : 0;
    __syncthreads();
    if (thread < kMaskBlock) {
      const bool begins =
          is_key && (thread == first || shared.numbers[thread] != shared.numbers[thread - 1]);
      const unsigned bits = __ballot_sync(~0u, begins);
      if (thread % 32 == 0) shared.begins[thread / 32] = bits;
    }
    if (first >= end) return;  // of all threads alike
    search<-1>(documents, first_token() + first, &shared.run_begin);
    search<+1>(documents, first_token() + end - 1, &shared.run_end);
    __syncthreads();
  }

  // Finds where the run of a token begins, or ends.
  template <int kStep>
  __device__ void search(const int* documents, int token, int* result) const {
    constexpr int kEach = 8, kAtOnce = kEach * kMaskThreads;
    constexpr int kNone = 0x7fffffff;
    const int number = shared.numbers[token - first_token()];
    const int left = kStep < 0 ? token : seq_k() - 1 - token;  // tokens on that side
    int distance = left + 1;                                   // of the first other one
    for (int before = 0; before < left; before += kAtOnce) {
      if (threadIdx.x == 0) shared.found = kNone;
      __syncthreads();
      int nearest = kNone;
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        const int at = before + i * kMaskThreads + int(threadIdx.x) + 1;
        if (at <= left && documents[token + kStep * at] != number) nearest = at;
      }
      nearest = __reduce_min_sync(~0u, nearest);
      if (threadIdx.x % 32 == 0 && nearest != kNone) atomicMin(&shared.found, nearest);
      __syncthreads();
      const int found = shared.found;
      __syncthreads();
      if (found != kNone) {
        distance = found;
        break;
      }
    }
    if (threadIdx.x == 0) *result = kStep < 0 ? token - distance + 1 : token + distance;
  }

  __device__ MaskRange range(int, int row) const {
    const int first = first_row(), end = end_row();
    if (row < first || row >= end) return {0, 0};
    int begin = row, next = row + 1;  // rows of the run, in the block
    while ((shared.begins[begin / 32] >> begin % 32 & 1) == 0) {
      const unsigned before = shared.begins[begin / 32] & ((1u << begin % 32) - 1);
      begin = before != 0 ? begin / 32 * 32 + 31 - __clz(before) : begin / 32 * 32 - 1;
    }
    while (next < end) {
      const unsigned after = shared.begins[next / 32] >> next % 32;
      if (after != 0) {
        next += __ffs(after) - 1;
        break;
      }
      next = (next / 32 + 1) * 32;
    }
    return {begin == first ? shared.run_begin : first_token() + begin,
            next >= end ? shared.run_end : first_token() + next};
  }
  __device__ KeySet keys(int, int) const { return {}; }
};

template <>
struct SourceOf<MaskSource::kDense> {
  static constexpr bool kHidesMore = true;
  struct Shared {};
  const MakeMaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  uint32_t* maps;
  __device__ void begin() const {}
  __device__ MaskRange range(int, int) const { return {0, int(p.memory.shape.seq_k)}; }

  // A bit for each byte that is not 0.
  static __device__ __forceinline__ unsigned bits_of(unsigned bytes) {
    const unsigned set = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu | bytes) >> 7 & 0x01010101u;
    return set * 0x01020408u >> 24;
  }
  __device__ KeySet keys(int row, int block) const {
    const int first = block * kMaskBlock, left = int(p.memory.shape.seq_k) - first;
    const uint8_t* const bytes =
        of.data<uint8_t>(p.tensor) + (of.first + row) * p.tensor.stride_row + first;
    KeySet set;
    if (left >= kMaskBlock && reinterpret_cast<uintptr_t>(bytes) % 16 == 0) {
      uint4 x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __ldg(reinterpret_cast<const uint4*>(bytes) + i);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        set.words[i / 2] |=
            (bits_of(x[i].x) | bits_of(x[i].y) << 4 | bits_of(x[i].z) << 8 | bits_of(x[i].w) << 12)
            << i % 2 * 16;
      return set;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w)
      for (int i = 0; i < 32 && 32 * w + i < left; ++i)
        set.words[w] |= unsigned(bytes[32 * w + i] != 0) << i;
    return set;
  }
};

// The caller's blocks: a bit map for each row of them that the block of queries reaches into.
template <>
struct SourceOf<MaskSource::kBlocks> {
  static constexpr bool kHidesMore = true;
  struct Shared {};
  const MakeMaskParams& p;
  const QueryBlock& of;
  Shared& shared;
  uint32_t* maps;  // [rows of blocks][shared_words]

  __device__ int rows() const { return (of.first + of.count - 1) / p.block_rows - first_row() + 1; }
  __device__ int first_row() const { return of.first / p.block_rows; }

  __device__ void begin() const {
    for (int i = threadIdx.x; i < rows() * p.shared_words; i += kMaskThreads) maps[i] = 0;
    __syncthreads();
    const int blocks = ceil_div(int(p.memory.shape.seq_k), p.block_keys);
    for (int r = 0; r < rows(); ++r) {
      const long long row = first_row() + r;
      const long long count = min((long long)of.data<int>(p.counts)[row], (long long)p.tensor.size);
      const int* const indices = of.data<int>(p.tensor) + row * p.tensor.stride_row;
      for (long long n = threadIdx.x; n < count; n += kMaskThreads) {
        const int block = indices[n];
        if (block >= 0 && block < blocks)
          atomicOr(&maps[r * p.shared_words + block / 32], 1u << block % 32);
      }
    }
    __syncthreads();
  }
  __device__ MaskRange range(int, int) const { return {0, int(p.memory.shape.seq_k)}; }
  __device__ KeySet keys(int row, int block) const {
    const uint32_t* const map =
        maps + ((of.first + row) / p.block_rows - first_row()) * p.shared_words;
    const int first = block * kMaskBlock,
              last = min(first + kMaskBlock, int(p.memory.shape.seq_k)) - 1;
    KeySet set;
    for (int own = first / p.block_keys; own <= last / p.block_keys; ++own)
      if (map[own / 32] >> own % 32 & 1)
        set |= KeySet::of(own * p.block_keys - first, (own + 1) * p.block_keys - first);
    return set;
  }
};

}  // namespace flash3::cuda
