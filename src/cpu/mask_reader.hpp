// SPDX-License-Identifier: Apache-2.0
// How the CPU reads a mask as data (core/mask_lists.hpp). Numbers that no mask holds, as in memory
// that something else has been written to since, list nothing: no address follows from them.
#pragma once

#include <algorithm>

#include "core/mask_problem.hpp"

namespace flash3::cpu {

// What a query sees of one block of keys: a range, and of that what the words tell, if there are
// any.
struct SeenKeys {
  Range keys = {};
  const unsigned* words = nullptr;
  int row = 0;      // in the block of queries
  Index first = 0;  // key of the block

  bool hides(Index key) const {
    if (!words) return false;
    const MaskBit at = mask_bit(row, static_cast<int>(key - first));
    return (words[at.word] >> at.bit & 1) == 0;
  }
};

// The lists of one sequence. Blocks that it names are blocks of kMaskBlock queries and keys.
class MaskReader {
 public:
  MaskReader() = default;  // of a call without a mask: nobody asks it
  MaskReader(const MaskLists& lists, Index batch)
      : memory_(lists.given ? lists.memory() : MaskMemory{}), batch_(batch) {}

  // What a query block lists, in ascending order.
  struct Blocks {
    const MaskBlock *begin, *end;
    bool empty() const { return begin == end; }
  };
  Blocks blocks(Index q_block, Index head) const {
    const MaskList list = *memory_.list(batch_, head, q_block);
    if (list.begin < 0 || list.count <= 0 || list.begin > memory_.shape.blocks ||
        list.count > memory_.shape.blocks - list.begin)
      return {nullptr, nullptr};
    return {memory_.blocks + list.begin, memory_.blocks + list.begin + list.count};
  }

  // The block of keys as a query block has it; null where it sees none of them.
  const MaskBlock* find(Index q_block, Index head, Index k_block) const {
    const Blocks all = blocks(q_block, head);
    const MaskBlock* const at = std::lower_bound(
        all.begin, all.end, k_block,
        [](const MaskBlock& block, Index number) { return block.block() < number; });
    return at != all.end && at->block() == k_block ? at : nullptr;
  }

  // What a query sees of a block that was found for it.
  SeenKeys seen(const MaskBlock* block, Index query, Index head, Index k_block) const {
    SeenKeys seen{.row = static_cast<int>(query % kMaskBlock), .first = k_block * kMaskBlock};
    if (!block) return seen;
    const Range all{seen.first, std::min<Index>(seen.first + kMaskBlock, memory_.shape.seq_k)};
    const int own = block->quarters() & quarters_of_rows(seen.row / kMaskQuarter);
    switch (block->kind()) {
      case kMaskFull: seen.keys = all; break;
      case kMaskRange:
        if (block->data >= 0 && block->data < memory_.shape.ranges) {
          const MaskRange range = *memory_.range(block->data, batch_, head, query);
          seen.keys = {std::max<Index>(range.begin, all.begin),
                       std::min<Index>(range.end, all.end)};
        }
        break;
      case kMaskBits:
        if (block->data >= 0 && block->data < memory_.shape.partial_blocks) {
          seen.keys = all;
          seen.words = memory_.words_of(block->data);
        }
        break;
      case kMaskQuarters:
        seen.keys = all;
        if ((own & quarters_of_keys(0)) == 0) seen.keys.begin = seen.first + kMaskQuarter;
        if ((own & quarters_of_keys(1)) == 0)
          seen.keys.end = std::min<Index>(seen.first + kMaskQuarter, all.end);
        break;
    }
    if (seen.keys.empty()) seen.keys = {seen.first, seen.first};
    return seen;
  }
  SeenKeys seen(Index query, Index head, Index k_block) const {
    return seen(find(query / kMaskBlock, head, k_block), query, head, k_block);
  }

  // Calls what(block of queries, head) for all that these packed rows of a KV head are in, as far
  // as their lists differ, until it returns true; then this is true.
  template <class What>
  bool any_of_rows(Range rows, Index group, Index kv_head, const What& what) const {
    const Index first = rows.begin / group, last = (rows.end - 1) / group;
    const Index heads = memory_.shape.heads == 1 ? 1 : group;
    for (Index block = first / kMaskBlock; block <= last / kMaskBlock; ++block)
      for (Index h = 0; h < heads; ++h)
        if (what(block, kv_head * group + h)) return true;
    return false;
  }

  // Whether any of the rows may see keys of the block.
  bool lists(Range rows, Index group, Index kv_head, Index k_block) const {
    return any_of_rows(rows, group, kv_head, [&](Index q_block, Index head) {
      return find(q_block, head, k_block) != nullptr;
    });
  }

  // The blocks of keys from the first that any of the rows may see to the last; begin = end if
  // there is none.
  Range k_blocks(Range rows, Index group, Index kv_head) const {
    const Index most = memory_.shape.k_blocks();
    Range all{most, 0};
    any_of_rows(rows, group, kv_head, [&](Index q_block, Index head) {
      if (const Blocks own = blocks(q_block, head); !own.empty()) {
        all.begin = std::min<Index>(all.begin, std::max(own.begin->block(), 0));
        all.end = std::max<Index>(all.end, std::min<Index>(own.end[-1].block() + 1, most));
      }
      return false;
    });
    return all.empty() ? Range{0, 0} : all;
  }

  // Blocks of keys that the rows see, the mean over their lists: what they cost.
  double mean_blocks(Range rows, Index group, Index kv_head) const {
    double blocks_in_all = 0, lists = 0;
    any_of_rows(rows, group, kv_head, [&](Index q_block, Index head) {
      const Blocks own = blocks(q_block, head);
      blocks_in_all += static_cast<double>(own.end - own.begin);
      ++lists;
      return false;
    });
    return blocks_in_all / std::max(lists, 1.0);
  }

 private:
  MaskMemory memory_{};
  Index batch_ = 0;
};

}  // namespace flash3::cpu
