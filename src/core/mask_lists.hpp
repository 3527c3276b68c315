// SPDX-License-Identifier: Apache-2.0
// A mask as data (flash3/mask.h): what lies where in its memory. For each block of queries it lists
// the blocks of keys that some of them see, in ascending order, and for each block of keys, for the
// backward, the blocks of queries that see some of them. Integers only, host and device, NVRTC too.
//
//   MaskCounts                               what the lists and the bits take
//   MaskList   [batch, heads, q_blocks]      where the list of a block of queries lies
//   MaskList   [batch, heads, k_blocks]      of a block of keys
//   MaskRange  [ranges, batch, heads, rows]  what each query sees; rows: q_blocks · kMaskBlock
//   MaskBlock  [blocks]                      the lists of blocks of queries
//   MaskBlock  [blocks]                      the lists of blocks of keys: `block` is one of queries
//   words      [partial_blocks, kMaskWords]  a bit for each pair of a block
//   MaskStarts                               where documents begin
//
// batch and heads are 1 where all share. Lists and bits lie in whichever order they were made; a
// list itself, and so every result, is the same each time.
#pragma once

#include "core/arithmetic.hpp"

namespace flash3 {

inline constexpr int kMaskBlock = 128;     // queries, and keys, of a block
inline constexpr int kMostMaskRanges = 8;  // of a query
inline constexpr int kMaskWords = kMaskBlock * kMaskBlock / 32;

// How the pairs of a block are told. Those outside of the sequences, where blocks reach past their
// ends, do not count: no range nor bit shows them.
enum MaskKind : int {
  kMaskFull = 0,   // all are seen, by the queries that exist; no key lies past the end
  kMaskRange = 1,  // query i sees the keys of its range `data`, in this block: the first that tells
  kMaskBits = 2,   // by the words of slot `data`
  kMaskQuarters = 3  // all of the quarters that are seen, as kMaskFull; it comes before the others
};

// The quarters of a block, 64 by 64 pairs each, as a bit each.
inline constexpr int kMaskQuarter = kMaskBlock / 2;
inline constexpr int kAllQuarters = 0xF;
FLASH3_HOST_DEVICE constexpr int quarter_bit(int row_half, int key_half) {
  return 1 << (2 * key_half + row_half);
}
FLASH3_HOST_DEVICE constexpr int quarters_of_keys(int key_half) { return 3 << (2 * key_half); }
FLASH3_HOST_DEVICE constexpr int quarters_of_rows(int row_half) { return 5 << row_half; }

struct alignas(8) MaskBlock {
  int bits;  // block · 64 + quarters · 4 + kind; quarters: those in which some pair is seen
  int data;

  FLASH3_HOST_DEVICE static constexpr MaskBlock make(int block, int quarters, MaskKind kind,
                                                     int data) {
    return {block << 6 | quarters << 2 | kind, data};
  }
  FLASH3_HOST_DEVICE constexpr int block() const { return bits >> 6; }
  FLASH3_HOST_DEVICE constexpr int quarters() const { return bits >> 2 & kAllQuarters; }
  FLASH3_HOST_DEVICE constexpr MaskKind kind() const { return MaskKind(bits & 3); }
  // The same as the list of the other direction has it.
  FLASH3_HOST_DEVICE constexpr MaskBlock as_seen_from(int block) const {
    return {block << 6 | (bits & 63), data};
  }
};

struct alignas(8) MaskList {
  int begin, count;  // in the blocks of its direction
};

// Keys [begin, end) of a query, inside its sequence; begin ≥ end: none. What the band and the
// source's range or document let it see; of a source that has no ranges the band alone, as range 0.
struct alignas(8) MaskRange {
  int begin, end;
};

// What making the lists needs, room or not. Above the room all lists are empty.
struct MaskCounts {
  int blocks, partial_blocks;  // of the lists of blocks of queries
  int key_blocks;              // of those of blocks of keys: the same in the end
  int overflow;                // 1: there was no room
  int documents;               // 0 without room for them
};

// The bit of a pair. A word has the bits of two queries, 8 apart, with 16 keys each, as a thread of
// a warpgroup holds them in a tile of scores (device/score/view.hpp); words of a quarter lie
// together, in the order of quarter_bit().
struct MaskBit {
  int word, bit;
};
FLASH3_HOST_DEVICE constexpr MaskBit mask_bit(int row, int key) {
  const int thread = row % 64 / 16 * 32 + row % 8 * 4 + key % 8 / 2;
  return {(key / 64 * 2 + row / 64) * 128 + thread, row % 16 / 8 * 16 + key % 64 / 8 * 2 + key % 2};
}

// The shape of a mask, from which the places follow.
struct MaskShape {
  long long batch = 0, heads = 0, seq_q = 0, seq_k = 0;
  long long ranges = 0;
  long long blocks = 0, partial_blocks = 0;  // room
  int granularity = kMaskBlock;  // or kMaskQuarter: quarters of a block are mostly seen apart

  FLASH3_HOST_DEVICE constexpr long long q_blocks() const {
    return ceil_div(seq_q, (long long)kMaskBlock);
  }
  FLASH3_HOST_DEVICE constexpr long long k_blocks() const {
    return ceil_div(seq_k, (long long)kMaskBlock);
  }
  FLASH3_HOST_DEVICE constexpr long long rows() const { return q_blocks() * kMaskBlock; }
  FLASH3_HOST_DEVICE constexpr long long lists() const { return batch * heads * q_blocks(); }
  FLASH3_HOST_DEVICE constexpr long long key_lists() const { return batch * heads * k_blocks(); }
  FLASH3_HOST_DEVICE constexpr long long all_blocks() const { return lists() * k_blocks(); }
};

// Where documents begin as the sequences of a packed batch, at the end of the memory of a mask that
// has room for so many: those of queries, and those of keys. With the one after the last document
// there are documents + 1 sequences. Kernels that compute with masks do not read it.
struct MaskStarts {
  long long documents;  // room; 0: nothing is there
  int *q, *k;           // [count()]

  FLASH3_HOST_DEVICE constexpr long long count() const { return documents > 0 ? documents + 2 : 0; }
  // In a mask that had no room: queries that see no key, and keys that no query sees, so that all
  // results are written.
  FLASH3_HOST_DEVICE constexpr void set_empty(const MaskShape& shape, long long i) const {
    q[i] = i == 0 ? 0 : int(shape.seq_q);
    k[i] = i <= documents ? 0 : int(shape.seq_k);
  }

  // Bytes that it takes, and where it lies after so many others.
  FLASH3_HOST_DEVICE static constexpr long long bytes_of(long long documents) {
    return documents > 0 ? ((documents + 2) * 8 + 255) / 256 * 256 : 0;
  }
  FLASH3_HOST_DEVICE static MaskStarts at(void* data, long long bytes, long long documents) {
    int* const q = reinterpret_cast<int*>(static_cast<char*>(data) + bytes);
    return {documents, q, q + (documents > 0 ? documents + 2 : 0)};
  }
};

// Bytes from the beginning of the memory; each part begins at a multiple of 256.
struct MaskPlaces {
  long long lists, key_lists, ranges, blocks, key_blocks, words, bytes;

  FLASH3_HOST_DEVICE static constexpr MaskPlaces of(const MaskShape& s) {
    const auto next = [](long long at, long long bytes) { return at + (bytes + 255) / 256 * 256; };
    MaskPlaces at{};
    at.lists = next(0, sizeof(MaskCounts));
    at.key_lists = next(at.lists, s.lists() * (long long)sizeof(MaskList));
    at.ranges = next(at.key_lists, s.key_lists() * (long long)sizeof(MaskList));
    at.blocks =
        next(at.ranges, s.ranges * s.batch * s.heads * s.rows() * (long long)sizeof(MaskRange));
    at.key_blocks = next(at.blocks, s.blocks * (long long)sizeof(MaskBlock));
    at.words = next(at.key_blocks, s.blocks * (long long)sizeof(MaskBlock));
    at.bytes = next(at.words, s.partial_blocks * kMaskWords * 4ll);
    return at;
  }
};

// A mask's memory, typed.
struct MaskMemory {
  MaskShape shape;
  MaskCounts* counts;
  MaskList *lists, *key_lists;
  MaskRange* ranges;
  MaskBlock *blocks, *key_blocks;
  unsigned* words;

  FLASH3_HOST_DEVICE static MaskMemory of(const MaskShape& shape, void* data) {
    const MaskPlaces at = MaskPlaces::of(shape);
    char* const base = static_cast<char*>(data);
    return {shape,
            reinterpret_cast<MaskCounts*>(base),
            reinterpret_cast<MaskList*>(base + at.lists),
            reinterpret_cast<MaskList*>(base + at.key_lists),
            reinterpret_cast<MaskRange*>(base + at.ranges),
            reinterpret_cast<MaskBlock*>(base + at.blocks),
            reinterpret_cast<MaskBlock*>(base + at.key_blocks),
            reinterpret_cast<unsigned*>(base + at.words)};
  }

  // The list of a block of queries, and of a block of keys.
  FLASH3_HOST_DEVICE MaskList* list(long long b, long long h, long long q_block) const {
    return lists + pair(b, h) * shape.q_blocks() + q_block;
  }
  FLASH3_HOST_DEVICE MaskList* key_list(long long b, long long h, long long k_block) const {
    return key_lists + pair(b, h) * shape.k_blocks() + k_block;
  }
  FLASH3_HOST_DEVICE MaskRange* range(int which, long long b, long long h, long long query) const {
    return ranges + (which * shape.batch * shape.heads + pair(b, h)) * shape.rows() + query;
  }
  FLASH3_HOST_DEVICE unsigned* words_of(int slot) const {
    return words + (long long)slot * kMaskWords;
  }

  // Where what all share stands for each.
  FLASH3_HOST_DEVICE long long pair(long long b, long long h) const {
    return (shape.batch == 1 ? 0 : b) * shape.heads + (shape.heads == 1 ? 0 : h);
  }
};

}  // namespace flash3
