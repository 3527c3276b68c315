// SPDX-License-Identifier: Apache-2.0
// What a mask is made from, drawn at random, and which query sees which key by the definition, pair
// by pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/mask_problem.hpp"

namespace flash3 {

struct MaskCase {
  MaskSource source = MaskSource::kBand;
  int64_t batch = 1, heads = 1;  // of the source
  int64_t seq_q = 0, seq_k = 0;
  MaskRule rule{};
  int64_t ranges = 1;
  int64_t block_rows = 128, block_keys = 128;
  int64_t pad = 0;  // elements between rows of the source, and before the first
  bool garbage = false;
  int seen_of_16 = 8;  // pairs of a dense mask, and blocks

  std::string text() const {
    const char* const names[] = {"band",   "ranges", "documents", "dense",
                                 "blocks", "bits",   "bit blocks"};
    std::string s = names[int(source)];
    for (const auto& [name, value] : {std::pair{" b", batch},
                                      {" h", heads},
                                      {" q", seq_q},
                                      {" k", seq_k},
                                      {" left ", rule.window_left},
                                      {" right ", rule.window_right},
                                      {" chunk ", rule.chunk},
                                      {" ranges ", ranges},
                                      {" rows ", block_rows},
                                      {" keys ", block_keys},
                                      {" pad ", pad}})
      s += name + std::to_string(value);
    return s + (rule.top_left ? " top-left" : "") + (garbage ? " garbage" : "");
  }

  MaskShape shape() const {
    MaskShape s{batch, heads, seq_q, seq_k, source == MaskSource::kRanges ? ranges : 1};
    s.blocks = s.partial_blocks = s.all_blocks();
    return s;
  }
};

// The source's numbers, with the rows that hold them.
struct MaskInput {
  MaskCase c;
  std::vector<int> ints;       // ranges, documents, the caller's blocks, or blocks of bits
  std::vector<uint8_t> bytes;  // dense or bits
  std::vector<int> counts;     // of the caller's blocks
  int64_t row = 0, rows = 0, most = 0;

  explicit MaskInput(const MaskCase& the_case, unsigned seed) : c(the_case) {
    std::mt19937 random(seed);
    switch (c.source) {
      case MaskSource::kBand: break;
      case MaskSource::kRanges: draw_ranges(random); break;
      case MaskSource::kDocuments: draw_documents(random); break;
      case MaskSource::kDense: draw_dense(random); break;
      case MaskSource::kBlocks: draw_blocks(random); break;
      case MaskSource::kBits: draw_bits(random); break;
      case MaskSource::kBitBlocks: draw_bit_blocks(random); break;
    }
  }

  int64_t place(int64_t b, int64_t h, int64_t which) const {
    return c.pad + ((b * c.heads + h) * rows + which) * row;
  }
  int64_t count_place(int64_t b, int64_t h, int64_t which) const {
    return c.pad + (b * c.heads + h) * rows + which;
  }

  // Of blocks of bits: how many there are, and the bytes from row to row.
  static constexpr int64_t kBlocksOfBits = 7;
  int64_t bit_row() const { return kMaskBlock / 8 + c.pad; }

  // Rows of queries by keys that see each other: a byte each.
  std::vector<uint8_t> seen(int64_t b, int64_t h) const {
    std::vector<uint8_t> seen(size_t(c.seq_q * c.seq_k));
    const Mask band = Mask::make(c.seq_q, c.seq_k, c.rule);
    for (int64_t i = 0; i < c.seq_q; ++i) {
      uint8_t* const own = seen.data() + i * c.seq_k;
      add_source(b, h, i, own);
      for (int64_t j = 0; j < c.seq_k; ++j)
        if (own[j] && !band.sees(i, j)) own[j] = 0;
    }
    return seen;
  }

  // Range r of a query, by the source alone.
  Range source_range(int64_t b, int64_t h, int64_t r, int64_t i) const {
    if (c.source == MaskSource::kRanges)
      return {ints[size_t(place(b, h, 2 * r) + i)], ints[size_t(place(b, h, 2 * r + 1) + i)]};
    if (c.source != MaskSource::kDocuments) return {0, c.seq_k};
    const int64_t key = i + c.seq_k - c.seq_q;
    if (key < 0 || key >= c.seq_k) return {0, 0};
    const int* const numbers = ints.data() + place(b, 0, 0);
    Range run{key, key + 1};
    while (run.begin > 0 && numbers[run.begin - 1] == numbers[key]) --run.begin;
    while (run.end < c.seq_k && numbers[run.end] == numbers[key]) ++run.end;
    return run;
  }

 private:
  void add_source(int64_t b, int64_t h, int64_t i, uint8_t* own) const {
    const auto add = [&](int64_t begin, int64_t end) {
      for (int64_t j = std::max<int64_t>(begin, 0); j < std::min(end, c.seq_k); ++j) own[j] = 1;
    };
    if (c.source == MaskSource::kDense) {
      for (int64_t j = 0; j < c.seq_k; ++j) own[j] = bytes[size_t(place(b, h, i) + j)] != 0;
    } else if (c.source == MaskSource::kBits) {
      for (int64_t j = 0; j < c.seq_k; ++j)
        own[j] = bytes[size_t(place(b, h, i) + j / 8)] >> (j % 8) & 1;
    } else if (c.source == MaskSource::kBitBlocks) {
      for (int64_t j = 0; j < c.seq_k; ++j) {
        const int which = ints[size_t(place(b, h, i / kMaskBlock) + j / kMaskBlock)];
        const int64_t at = c.pad + (int64_t{which} * kMaskBlock + i % kMaskBlock) * bit_row();
        own[j] =
            which == kAllSeen || (which >= 0 && which < kBlocksOfBits &&
                                  (bytes[size_t(at + j % kMaskBlock / 8)] >> (j % 8) & 1) != 0);
      }
    } else if (c.source == MaskSource::kBlocks) {
      const int64_t of = i / c.block_rows;
      const int64_t count = std::min<int64_t>(counts[size_t(count_place(b, h, of))], most);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t block = ints[size_t(place(b, h, of) + n)];
        if (block >= 0) add(block * c.block_keys, (block + 1) * c.block_keys);
      }
    } else {
      for (int64_t r = 0; r < c.shape().ranges; ++r) {
        const Range range = source_range(b, h, r, i);
        add(range.begin, range.end);
      }
    }
  }

  static int below(std::mt19937& random, int64_t n) {
    return int(random() % uint64_t(std::max<int64_t>(n, 1)));
  }
  // What stands where only numbers in bounds should.
  static int garbage_of(std::mt19937& random) {
    constexpr int kOdd[] = {
        -1,     std::numeric_limits<int>::min(), std::numeric_limits<int>::max(), 1 << 24, -1 << 30,
        1 << 30};
    return kOdd[random() % std::size(kOdd)];
  }
  void set_rows(int64_t count, int64_t size) { rows = count, row = size + c.pad; }

  void draw_ranges(std::mt19937& random) {
    set_rows(2 * c.ranges, c.seq_q);
    ints.resize(size_t(place(c.batch, 0, 0)));
    for (int64_t pair = 0; pair < c.batch * c.heads; ++pair)
      for (int64_t r = 0; r < c.ranges; ++r) {
        int begin = 0, end = 0;
        for (int64_t i = 0; i < c.seq_q; ++i) {
          // Rows that go together, as in documents, and rows of their own.
          if (i % 200 == 0 || random() % 64 == 0)
            begin = below(random, c.seq_k + 1), end = begin + below(random, c.seq_k / 2 + 2);
          if (c.garbage && random() % 16 == 0) begin = garbage_of(random), end = garbage_of(random);
          ints[size_t(place(0, pair, 2 * r) + i)] = begin;
          ints[size_t(place(0, pair, 2 * r + 1) + i)] = end;
        }
      }
  }
  void draw_documents(std::mt19937& random) {
    set_rows(1, c.seq_k);
    ints.resize(size_t(place(c.batch, 0, 0)));
    for (int64_t b = 0; b < c.batch; ++b) {
      int number = 0;
      // Lengths of one key to several blocks.
      int64_t left = 0;
      for (int64_t j = 0; j < c.seq_k; ++j, --left) {
        if (left <= 0) {
          left = 1 + below(random, int64_t{1} << below(random, 12));
          number = c.garbage ? garbage_of(random) : (number + 1) % 3;
        }
        ints[size_t(place(b, 0, 0) + j)] = number;
      }
    }
  }
  void draw_dense(std::mt19937& random) {
    set_rows(c.seq_q, c.seq_k);
    bytes.resize(size_t(place(c.batch, 0, 0)));
    // Blocks of 64 that all, none or some see: every kind comes.
    const auto salt = unsigned(random());
    for (int64_t at = c.pad; at < int64_t(bytes.size()); ++at) {
      const int64_t i = (at - c.pad) / row % rows, j = (at - c.pad) % row;
      const unsigned of_block = unsigned(i / 64 * 7919 + j / 64 * 104729) * 2654435761u + salt;
      const unsigned kind = (of_block >> 16) % 4;
      const bool some = int(random() % 16) < c.seen_of_16;
      const bool sees = kind == 0 ? some : kind != 1;
      bytes[size_t(at)] = sees ? uint8_t(1 + random() % 255) : 0;
    }
  }
  // Runs that are seen, hidden or neither; bits after the last key too.
  void fill_bits(std::mt19937& random) {
    for (size_t at = size_t(c.pad); at < bytes.size();) {
      const size_t end = std::min(bytes.size(), at + 1 + size_t(below(random, 60)));
      const auto kind = random() % 4;
      for (; at < end; ++at) bytes[at] = uint8_t(kind == 0 ? 0 : kind == 1 ? 255 : random());
    }
  }
  void draw_bits(std::mt19937& random) {
    set_rows(c.seq_q, (c.seq_k + 7) / 8);
    bytes.resize(size_t(place(c.batch, 0, 0)));
    fill_bits(random);
  }
  void draw_bit_blocks(std::mt19937& random) {
    const MaskShape shape = c.shape();
    set_rows(shape.q_blocks(), shape.k_blocks());
    ints.resize(size_t(place(c.batch, 0, 0)));
    bytes.resize(size_t(c.pad + kBlocksOfBits * kMaskBlock * bit_row()));
    fill_bits(random);
    for (int& which : ints) {
      which = below(random, kBlocksOfBits + 3) - 2;  // hidden, all, a block, or one too many
      if (c.garbage && random() % 4 == 0) which = garbage_of(random);
    }
  }
  void draw_blocks(std::mt19937& random) {
    const int64_t all = (c.seq_k + c.block_keys - 1) / c.block_keys;
    most = all + 3;
    set_rows((c.seq_q + c.block_rows - 1) / c.block_rows, most);
    ints.resize(size_t(place(c.batch, 0, 0)));
    counts.resize(size_t(count_place(c.batch, 0, 0)));
    for (int64_t pair = 0; pair < c.batch * c.heads; ++pair)
      for (int64_t of = 0; of < rows; ++of) {
        int64_t count = 0;
        int* const list = ints.data() + place(0, pair, of);
        for (int64_t n = 0; n < most; ++n) list[n] = garbage_of(random);
        for (int64_t block = all; block-- > 0;)  // descending: their order is the caller's
          if (int(random() % 16) < c.seen_of_16) list[count++] = int(block);
        if (c.garbage) {
          list[count++] = below(random, all);  // once more, if it is there
          list[count++] = garbage_of(random);
          list[count++] = int(all);
        }
        int stored = int(count);
        if (c.garbage && random() % 4 == 0) {
          stored = std::numeric_limits<int>::max();
        } else if (c.garbage && random() % 4 == 0) {
          stored = -3;
        }
        counts[size_t(count_place(0, pair, of))] = stored;
      }
  }
};

}  // namespace flash3
