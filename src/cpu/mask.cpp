// SPDX-License-Identifier: Apache-2.0
// Each block of queries is looked at twice: the first time its blocks of keys are counted, so that
// everything has a place of its own whatever the threads do; the second time they are written.
#include "cpu/mask.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/arithmetic.hpp"
#include "core/interrupt.hpp"
#include "core/option_checks.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cpu {
namespace {

// Keys of a block that a query sees, counted from the block's first: a bit each.
struct KeyBits {
  uint64_t words[kMaskBlock / 64] = {};

  bool operator==(const KeyBits&) const = default;

  // Keys [begin, end), inside the block or not.
  void add(Index begin, Index end) {
    for (int w = 0; w < kMaskBlock / 64; ++w) {
      const Index first = std::clamp<Index>(begin - 64 * w, 0, 64),
                  last = std::clamp<Index>(end - 64 * w, 0, 64);
      if (first < last) words[w] |= ~uint64_t{0} >> (64 - (last - first)) << first;
    }
  }
  static KeyBits of(Index begin, Index end) {
    KeyBits bits;
    bits.add(begin, end);
    return bits;
  }
};

// What the queries of one block see of one block of keys.
struct SeenBits {
  KeyBits rows[kMaskBlock];
};

// One of the lists to be made: a block of queries of a sequence and a head, of those that the mask
// has.
struct QueryBlock {
  Index batch, head, block;
  Range queries;  // that exist
  RowRange q, k;  // of the sequence
  Mask band;      // likewise
};

// What is seen, by the source and the band.
class MaskMaker {
 public:
  explicit MaskMaker(const MaskProblem& p) : p_(p) {}

  QueryBlock query_block(Index list) const {
    const Index blocks = p_.shape.q_blocks(), pair = list / blocks;
    QueryBlock of{pair / p_.shape.heads, pair % p_.shape.heads, list % blocks, {}, {}, {}, {}};
    const SeqInfo rows = seq_info(p_.sequences_q, p_.sequences_k, of.batch);
    of.q = rows.q, of.k = rows.k;
    of.band = Mask::make(of.q.length, of.k.length, p_.rule);
    const Index first = of.block * kMaskBlock;
    of.queries = {first, std::max(first, std::min<Index>(first + kMaskBlock, of.q.length))};
    return of;
  }

  // Fills the ranges of the block's queries; those after the last query are empty.
  void write_ranges(const QueryBlock& of, const MaskMemory& to) const {
    for (int which = 0; which < p_.shape.ranges; ++which) {
      Range document{0, 0};
      for (Index i = of.block * kMaskBlock; i < (of.block + 1) * kMaskBlock; ++i) {
        const bool exists = i < of.queries.end;
        Range seen = exists ? in_band(of, i) : Range{0, 0};
        if (p_.source == MaskSource::kRanges && exists) {
          const Index column = of.q.first + i;
          seen = both(seen, {int_at(p_.tensor, of, 2 * which, column),
                             int_at(p_.tensor, of, 2 * which + 1, column)});
        }
        if (p_.source == MaskSource::kDocuments && exists)
          seen = both(seen, document = document_of(of, i, document));
        if (seen.empty()) seen = {0, 0};
        *to.range(which, of.batch, of.head, i) = {static_cast<int>(seen.begin),
                                                  static_cast<int>(seen.end)};
      }
    }
  }

  // Calls what(block, bits) for the blocks of keys that some query of the block sees, in ascending
  // order.
  template <class What>
  void for_each_block(const QueryBlock& of, const MaskMemory& made, const What& what) const {
    const Range keys = keys_of(of, made);
    if (keys.empty()) return;
    SeenBits bits;
    for (Index block = keys.begin / kMaskBlock; block < ceil_div(keys.end, Index{kMaskBlock});
         ++block) {
      if (p_.source == MaskSource::kBlocks && !is_listed(of, block)) continue;
      if (p_.source == MaskSource::kBitBlocks && !has_bits(of, block)) continue;
      find_bits(of, made, block, &bits);
      const Quarters quarters = quarters_of(of, bits);
      if (quarters.seen != 0) what(listed_block(of, made, block, bits, quarters), bits);
    }
  }

 private:
  static Range both(const Range& a, const Range& b) {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }
  static Range in_band(const QueryBlock& of, Index i) {
    return both({0, of.k.length}, {of.band.first(i), of.band.end(i)});
  }
  static Index offset(const MaskTensor& t, const QueryBlock& of) {
    return of.batch * t.stride_batch + of.head * t.stride_head;
  }
  static int int_at(const MaskTensor& t, const QueryBlock& of, Index row, Index i) {
    return static_cast<const int*>(t.data)[offset(t, of) + row * t.stride_row + i];
  }

  // The document that query i is in; `last`: that of the query before it, which mostly is the same.
  Range document_of(const QueryBlock& of, Index i, const Range& last) const {
    const Index seq_k = of.k.length, key = i + seq_k - of.q.length;
    if (last.begin <= key && key < last.end) return last;
    if (key < 0 || key >= seq_k) return {0, 0};
    const auto number = [&](Index j) { return int_at(p_.tensor, of, 0, of.k.first + j); };
    const int own = number(key);
    Range document{key, key + 1};
    while (document.begin > 0 && number(document.begin - 1) == own) --document.begin;
    while (document.end < seq_k && number(document.end) == own) ++document.end;
    return document;
  }

  // No query of the block sees a key outside of these.
  Range keys_of(const QueryBlock& of, const MaskMemory& made) const {
    Range all{p_.shape.seq_k, 0};
    for (int which = 0; which < p_.shape.ranges; ++which)
      for (Index i = of.queries.begin; i < of.queries.end; ++i) {
        const MaskRange& seen = *made.range(which, of.batch, of.head, i);
        if (seen.begin >= seen.end) continue;
        all.begin = std::min<Index>(all.begin, seen.begin);
        all.end = std::max<Index>(all.end, seen.end);
      }
    return all;
  }

  // ---- the caller's blocks ----

  // Calls what(keys) for those that the block of rows with query i sees.
  template <class What>
  void for_each_listed(const QueryBlock& of, Index i, const What& what) const {
    const Index row = i / p_.block_rows;
    const Index count = std::min<Index>(
        static_cast<const int*>(p_.counts.data)[offset(p_.counts, of) + row], p_.tensor.size);
    const Index blocks = ceil_div(Index{p_.shape.seq_k}, Index{p_.block_keys});
    for (Index n = 0; n < count; ++n) {
      const Index block = int_at(p_.tensor, of, row, n);
      if (block < 0 || block >= blocks) continue;
      what(Range{block * p_.block_keys,
                 std::min<Index>((block + 1) * p_.block_keys, p_.shape.seq_k)});
    }
  }
  // Calls what(queries) for the parts of the block that each share a row of the caller's blocks.
  template <class What>
  void for_each_row_block(const QueryBlock& of, const What& what) const {
    for (Index i = of.queries.begin; i < of.queries.end;) {
      const Index end = std::min<Index>((i / p_.block_rows + 1) * p_.block_rows, of.queries.end);
      what(Range{i, end});
      i = end;
    }
  }
  // Whether any of the caller's blocks reaches into the block of keys.
  bool is_listed(const QueryBlock& of, Index block) const {
    const Range own{block * kMaskBlock, (block + 1) * kMaskBlock};
    bool listed = false;
    for_each_row_block(of, [&](Range queries) {
      if (!listed)
        for_each_listed(of, queries.begin,
                        [&](Range keys) { listed = listed || !both(keys, own).empty(); });
    });
    return listed;
  }

  // ---- one block ----

  void find_bits(const QueryBlock& of, const MaskMemory& made, Index block, SeenBits* bits) const {
    const Index first = block * kMaskBlock;
    *bits = {};
    if (p_.source == MaskSource::kBlocks) {
      for_each_row_block(of, [&](Range queries) {
        KeyBits listed;
        for_each_listed(of, queries.begin,
                        [&](Range keys) { listed.add(keys.begin - first, keys.end - first); });
        for (Index i = queries.begin; i < queries.end; ++i)
          bits->rows[i - of.queries.begin] = in_range(listed, of, made, i, first);
      });
      return;
    }
    for (Index i = of.queries.begin; i < of.queries.end; ++i) {
      KeyBits& row = bits->rows[i - of.queries.begin];
      if (p_.source == MaskSource::kDense || p_.source == MaskSource::kBits ||
          p_.source == MaskSource::kBitBlocks) {
        row = in_range(pair_bits(of, i, first), of, made, i, first);
        continue;
      }
      for (int which = 0; which < p_.shape.ranges; ++which) {
        const MaskRange& seen = *made.range(which, of.batch, of.head, i);
        row.add(seen.begin - first, seen.end - first);
      }
    }
  }
  // Of a source that tells each pair by itself. Keys after the last one may have bits.
  KeyBits pair_bits(const QueryBlock& of, Index i, Index first) const {
    if (p_.source == MaskSource::kBitBlocks) return bits_of_block(of, i, first / kMaskBlock);
    const auto* const row = static_cast<const uint8_t*>(p_.tensor.data) + offset(p_.tensor, of) +
                            i * p_.tensor.stride_row;
    if (p_.source == MaskSource::kBits) {
      constexpr Index kBytes = kMaskBlock / 8;
      return bits_of_bytes(row + first / 8, std::min<Index>(p_.tensor.size - first / 8, kBytes));
    }
    KeyBits bits;
    for (Index j = first; j < std::min<Index>(first + kMaskBlock, p_.shape.seq_k); ++j)
      bits.words[(j - first) / 64] |= uint64_t{row[j] != 0} << (j - first) % 64;
    return bits;
  }
  static KeyBits bits_of_bytes(const uint8_t* bytes, Index count) {
    KeyBits bits;
    for (Index n = 0; n < count; ++n) bits.words[n / 8] |= uint64_t{bytes[n]} << n % 8 * 8;
    return bits;
  }

  // ---- the caller's blocks of bits ----

  bool has_bits(const QueryBlock& of, Index block) const {
    const int which = int_at(p_.tensor, of, of.block, block);
    return which == kAllSeen || (which >= 0 && which < p_.block_bits.blocks);
  }
  // Of a block that has them.
  KeyBits bits_of_block(const QueryBlock& of, Index i, Index block) const {
    const int which = int_at(p_.tensor, of, of.block, block);
    if (which == kAllSeen) return KeyBits::of(0, kMaskBlock);
    const BlockBits& bits = p_.block_bits;
    return bits_of_bytes(static_cast<const uint8_t*>(bits.data) + which * bits.stride_block +
                             i % kMaskBlock * bits.stride_row,
                         kMaskBlock / 8);
  }
  // Those that range 0 of the query has too.
  static KeyBits in_range(KeyBits bits, const QueryBlock& of, const MaskMemory& made, Index i,
                          Index first) {
    const MaskRange& seen = *made.range(0, of.batch, of.head, i);
    const KeyBits own = KeyBits::of(seen.begin - first, seen.end - first);
    for (int w = 0; w < kMaskBlock / 64; ++w) bits.words[w] &= own.words[w];
    return bits;
  }

  // Those that have a pair that is seen, and those that have one that is not. A block that reaches
  // past the last key has some of these.
  struct Quarters {
    int seen = 0, hidden = 0;
  };
  static Quarters quarters_of(const QueryBlock& of, const SeenBits& bits) {
    Quarters quarters;
    for (Index r = 0; r < of.queries.size(); ++r)
      for (int half = 0; half < 2; ++half) {
        const int quarter = quarter_bit(static_cast<int>(r / kMaskQuarter), half);
        const uint64_t word = bits.rows[r].words[half];
        quarters.seen |= word != 0 ? quarter : 0;
        quarters.hidden |= ~word != 0 ? quarter : 0;
      }
    return quarters;
  }

  // The block without the place of its bits, if it has any.
  MaskBlock listed_block(const QueryBlock& of, const MaskMemory& made, Index block,
                         const SeenBits& bits, const Quarters& quarters) const {
    const auto listed = [&](MaskKind kind, int data) {
      return MaskBlock::make(static_cast<int>(block), quarters.seen, kind, data);
    };
    if (quarters.hidden == 0) return listed(kMaskFull, 0);
    if ((quarters.seen & quarters.hidden) == 0) return listed(kMaskQuarters, 0);
    const Index first = block * kMaskBlock;
    for (int which = 0; which < p_.shape.ranges; ++which) {
      bool same = true;
      for (Index r = 0; same && r < of.queries.size(); ++r) {
        const MaskRange& seen = *made.range(which, of.batch, of.head, of.queries.begin + r);
        same = bits.rows[r] == KeyBits::of(seen.begin - first, seen.end - first);
      }
      if (same) return listed(kMaskRange, which);
    }
    return listed(kMaskBits, 0);
  }

  const MaskProblem& p_;
};

// Bits 0 and 1 of each byte, side by side.
unsigned pairs_of_bytes(uint64_t word) {
  word &= 0x0303030303030303;
  word = (word | word >> 6) & 0x000F000F000F000F;
  word = (word | word >> 12) & 0x000000FF000000FF;
  return static_cast<unsigned>((word | word >> 24) & 0xFFFF);
}

// 16 keys of a row at a time, which lie in one word: 2 of each 8.
void write_words(const SeenBits& bits, unsigned* words) {
  std::fill_n(words, kMaskWords, 0u);
  for (int row = 0; row < kMaskBlock; ++row)
    for (int half = 0; half < kMaskBlock; half += 64)
      for (int key = 0; key < 8; key += 2) {
        const MaskBit at = mask_bit(row, half + key);
        words[at.word] |= pairs_of_bytes(bits.rows[row].words[half / 64] >> key) << at.bit;
      }
}

// What a list takes, and then where its part begins.
struct Places {
  Index blocks = 0, partial = 0;
};

// Turns counts into places; returns what all take.
Places place(std::vector<Places>* lists) {
  Places all;
  for (Places& list : *lists) {
    const Places own = list;
    list = all;
    all.blocks += own.blocks, all.partial += own.partial;
  }
  return all;
}

// The lists of blocks of keys of one sequence and head, from those of blocks of queries.
void transpose(const MaskMemory& memory, Index batch, Index head) {
  const MaskShape& s = memory.shape;
  if (s.q_blocks() == 0 || s.k_blocks() == 0) return;
  MaskList* const columns = memory.key_list(batch, head, 0);
  std::fill_n(columns, s.k_blocks(), MaskList{0, 0});
  const auto for_each = [&](const auto& what) {
    for (Index q = 0; q < s.q_blocks(); ++q) {
      const MaskList& list = *memory.list(batch, head, q);
      for (int n = 0; n < list.count; ++n) what(q, memory.blocks[list.begin + n]);
    }
  };
  for_each([&](Index, const MaskBlock& block) { ++columns[block.block()].count; });
  int begin = memory.list(batch, head, 0)->begin;
  for (Index k = 0; k < s.k_blocks(); ++k) {
    columns[k].begin = begin;
    begin += columns[k].count;
    columns[k].count = 0;
  }
  for_each([&](Index q, const MaskBlock& block) {
    MaskList& column = columns[block.block()];
    memory.key_blocks[column.begin + column.count++] = block.as_seen_from(static_cast<int>(q));
  });
}

// Notes where documents begin, as far as there is room; how many there are.
Index note_documents(const MaskProblem& p) {
  const Index room = p.documents, keys = p.shape.seq_k;
  const MaskStarts to = p.starts();
  const auto* const numbers = static_cast<const int*>(p.tensor.data);
  Index found = 0;
  for (Index j = 0; room > 0 && j < keys; ++j) {
    if (j > 0 && numbers[j] == numbers[j - 1]) continue;
    if (found < room) to.q[found] = to.k[found] = static_cast<int>(j);
    ++found;
  }
  for (Index i = std::min(found, room); i < to.count(); ++i)
    to.q[i] = to.k[i] = static_cast<int>(keys);
  return found;
}

int at_most_int(Index n) {
  return static_cast<int>(std::min<Index>(n, std::numeric_limits<int>::max()));
}

}  // namespace

Status make_mask(const MaskProblem& p) {
  const MaskShape& s = p.shape;
  FLASH3_CHECK(check_lengths_of(p.sequences_q, s.batch, "cu_seqlens_q", "seqused_q", "seq_q"));
  FLASH3_CHECK(check_lengths_of(p.sequences_k, s.batch, "cu_seqlens_k", "seqused_k", "seq_k"));
  const MaskMemory memory = MaskMemory::of(s, p.data);
  const MaskMaker maker(p);
  std::vector<Places> places(static_cast<size_t>(s.lists()));

  Interrupt interrupt;
  // Comparing a row of a block takes about as long as so many multiply-adds.
  constexpr double kRowWork = 64;
  const int threads = threads_for(static_cast<double>(s.lists()) *
                                      static_cast<double>(s.k_blocks() + 1) * kMaskBlock * kRowWork,
                                  p.num_threads);
  const auto for_each = [&](Index count, const auto& what) {
    std::atomic<Index> next{0};
    run_workers(static_cast<int>(std::clamp<Index>(count, 1, threads)), [&](int worker) {
      for (Index i; !interrupt.ends(worker) && (i = next.fetch_add(1)) < count;) what(i);
    });
  };

  for_each(s.lists(), [&](Index list) {
    const QueryBlock of = maker.query_block(list);
    maker.write_ranges(of, memory);
    Places& counts = places[static_cast<size_t>(list)];
    maker.for_each_block(of, memory, [&](const MaskBlock& block, const SeenBits&) {
      ++counts.blocks, counts.partial += block.kind() == kMaskBits;
    });
  });
  FLASH3_CHECK(interrupt.status());

  const Places all = place(&places);
  const Index documents = note_documents(p);
  const bool overflow =
      all.blocks > s.blocks || all.partial > s.partial_blocks || documents > p.documents;
  *memory.counts = {at_most_int(all.blocks), at_most_int(all.partial), at_most_int(all.blocks),
                    overflow, static_cast<int>(documents)};
  if (overflow) {
    std::fill_n(memory.lists, s.lists(), MaskList{0, 0});
    std::fill_n(memory.key_lists, s.key_lists(), MaskList{0, 0});
    const MaskStarts starts = p.starts();
    for (Index i = 0; i < starts.count(); ++i) starts.set_empty(s, i);
    return {};
  }

  for_each(s.lists(), [&](Index list) {
    const QueryBlock of = maker.query_block(list);
    Places at = places[static_cast<size_t>(list)];
    const int begin = static_cast<int>(at.blocks);
    maker.for_each_block(of, memory, [&](const MaskBlock& block, const SeenBits& bits) {
      MaskBlock& made = memory.blocks[at.blocks++] = block;
      if (block.kind() != kMaskBits) return;
      made.data = static_cast<int>(at.partial++);
      write_words(bits, memory.words_of(made.data));
    });
    *memory.list(of.batch, of.head, of.block) = {begin, static_cast<int>(at.blocks) - begin};
  });
  FLASH3_CHECK(interrupt.status());
  std::fill_n(memory.key_lists, s.key_lists(), MaskList{0, 0});
  for_each(s.batch * s.heads,
           [&](Index pair) { transpose(memory, pair / s.heads, pair % s.heads); });
  return interrupt.status();
}

}  // namespace flash3::cpu
