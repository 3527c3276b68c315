// SPDX-License-Identifier: Apache-2.0
// How the work of a decode call is cut. Integers only, host and device.
//
// An item is one query tile of one group of heads of one sequence. Its keys are cut into splits, at
// places that depend on the sequence's own length, the head counts and the head dims, never on the
// batch or the multiprocessors: whoever computes a split, its bits are the same. Splits are merged
// in one fixed order, eight to a fold and then the folds, each from left to right. So it does not
// matter which block computes how many of them (fold.cuh).
//
// Items lie one after the other on an axis of cost, in key tiles: all sequences of the first group
// of heads, then those of the next. So blocks that run at the same time read all heads of the same
// keys. Block c of n has what lies from c/n to (c+1)/n of the axis, rounded to whole splits, or to
// whole items or equal parts of them where those are near. It shares at most two of its items with
// others.
#pragma once

#include "cuda/device/types.hpp"
#include "cuda/sm90/decode/config.hpp"
#include "cuda/varlen/lengths.h"

namespace flash3::cuda::sm90 {

// What all sequences of a call have in common.
struct DecodeRule {
  SequenceLengths q, k;
  SequenceLengths added;  // rows that the call appends
  const int* leftpad;     // or null
  TileMaskRule mask;
  bool tree;         // each query tells which of its sequence's last keys it sees
  int most_queries;  // a sequence with more counts as one without queries: other kernels have it
  int tile_n;        // keys of a tile
  int tile_queries;  // queries of an item
  int head_groups;   // heads that share an item make a group
  int splits;        // a sequence is cut into so many
  int long_splits;   // a sequence of more than long_tiles key tiles is cut into so many
  int long_tiles;
  int least_tiles;  // a split has at least so many
  int most_tiles;   // and at most so many, unless that makes more than kMostDecodeSplits
  int cost_shift;   // costs are shifted right by it, so that their sum times blocks is below 2^32
};

// A cost, in key tiles shifted right by cost_shift.
using DecodeCost = unsigned;

// What an item costs besides its key tiles, in key tiles.
inline constexpr int kItemCost = 2;

// One sequence of the call.
struct DecodeSequence {
  int q_first, q_length;
  int k_first, k_length;       // k_first: place in the cache of key 0
  int split_tiles;             // key tiles of a split
  int split_begin, split_end;  // the splits that its queries see; one split if they see none

  FLASH3_HOST_DEVICE constexpr int splits() const { return split_end - split_begin; }
};

FLASH3_HOST_DEVICE constexpr int split_tiles_of(const DecodeRule& rule, int k_length) {
  const int tiles = ceil_div(k_length, rule.tile_n);
  const int splits = tiles > rule.long_tiles ? rule.long_splits : rule.splits;
  const int share = clamped(ceil_div(tiles, splits), rule.least_tiles, rule.most_tiles);
  const int least = ceil_div(tiles, kMostDecodeSplits);
  return share > least ? share : least;
}

FLASH3_HOST_DEVICE constexpr TileMask mask_of(const DecodeRule& rule, const DecodeSequence& s) {
  return TileMask::make(s.q_length, s.k_length, rule.mask);
}

// The keys that these queries see; empty ranges begin at a split's first key.
FLASH3_HOST_DEVICE constexpr TileMask::Range seen_keys(const DecodeRule& rule,
                                                       const DecodeSequence& s,
                                                       const TileMask::Range& queries) {
  const TileMask::Range keys = mask_of(rule, s).keys(queries, s.k_length);
  return keys.empty() ? TileMask::Range{0, 0} : keys;
}

// The splits that hold these keys; one split if there is no key.
FLASH3_HOST_DEVICE constexpr TileMask::Range splits_of(const DecodeRule& rule,
                                                       const DecodeSequence& s,
                                                       const TileMask::Range& keys) {
  const int size = s.split_tiles * rule.tile_n;
  if (keys.empty()) return {s.split_begin, s.split_begin + 1};
  return {keys.begin / size, ceil_div(keys.end, size)};
}

FLASH3_HOST_DEVICE constexpr DecodeSequence decode_sequence(const DecodeRule& rule, int b) {
  const SequenceRows q = rows_of(rule.q, b), k = rows_of(rule.k, b);
  const int pad = rule.leftpad != nullptr ? clamped(rule.leftpad[b], 0, k.length) : 0;
  DecodeSequence s{};
  s.q_first = q.first;
  s.q_length = q.length > rule.most_queries ? 0 : q.length;
  s.k_first = k.first + pad;
  s.k_length = k.length - pad;
  if (rule.added.rows > 0)
    s.k_length += clamped(rows_of(rule.added, b).length, 0, rule.k.max_length - k.length);
  s.split_tiles = split_tiles_of(rule, s.k_length);
  if (s.q_length == 0) return s;
  const TileMask::Range splits = splits_of(rule, s, seen_keys(rule, s, {0, s.q_length}));
  s.split_begin = splits.begin;
  s.split_end = splits.end;
  return s;
}

// The key tiles that these queries see whole. Under a tree mask none with a key that it counts.
FLASH3_HOST_DEVICE constexpr TileMask::Range unmasked_tiles(const DecodeRule& rule,
                                                            const DecodeSequence& s,
                                                            const TileMask::Range& queries) {
  const int keys = rule.tree ? s.k_length - s.q_length : s.k_length;
  return mask_of(rule, s).full_tiles(queries, keys > 0 ? keys : 0, rule.tile_n);
}

// Items that a sequence has for one group of heads.
FLASH3_HOST_DEVICE constexpr int items_of(const DecodeRule& rule, const DecodeSequence& s) {
  return ceil_div(s.q_length, rule.tile_queries);
}

FLASH3_HOST_DEVICE constexpr DecodeCost item_cost(const DecodeRule& rule, const DecodeSequence& s) {
  return DecodeCost((s.splits() * s.split_tiles + kItemCost) >> rule.cost_shift) + 1;
}

// The part of an item's cost that its key tiles are; at least 1.
FLASH3_HOST_DEVICE constexpr DecodeCost tiles_of_cost(const DecodeRule& rule, DecodeCost item) {
  const DecodeCost most = (item - 1) << rule.cost_shift,
                   tiles = most > kItemCost ? (most - kItemCost) >> rule.cost_shift : 0;
  return tiles > 0 ? tiles : 1;
}

FLASH3_HOST_DEVICE constexpr DecodeCost cost_of(const DecodeRule& rule, const DecodeSequence& s) {
  return DecodeCost(items_of(rule, s)) * item_cost(rule, s);
}

// A place on the axis of cost: just before split `split` of item `item` of a sequence.
struct DecodePlace {
  int head_group, batch, item, split;
  DecodeCost before;  // cost of the sequences before this one, in its group of heads
  int items_before;   // their items
};

// How blocks share the axis: evenly, or where all items cost the same by whole numbers, of items
// for a block or of blocks for an item.
struct DecodeCut {
  DecodeCost total;
  DecodeCost unit;  // one item, or several; 0: even shares
  DecodeCost span;  // what of a unit its blocks share evenly: its key tiles
  unsigned parts;   // blocks of a unit
  unsigned blocks;
  DecodeCost snap;  // a block that would begin so near to an item's end begins at that end

  FLASH3_HOST_DEVICE constexpr DecodeCost begin_of(int block) const {
    if (unit == 0) return total * unsigned(block) / blocks;
    const DecodeCost place =
        unsigned(block) / parts * unit + unsigned(block) % parts * span / parts;
    return place < total ? place : total;
  }
  // A block that begins at this place or before it. The next one begins at this place or after it.
  FLASH3_HOST_DEVICE constexpr int block_at(DecodeCost place) const {
    if (unit == 0) return int(place * blocks / total);
    const unsigned part = place % unit * parts / span;
    return int(place / unit * parts + (part < parts ? part : parts - 1));
  }
};

// A cut between whole items spares a merge, which takes as long as some key tiles, and one at equal
// parts of all items spares runs that begin in one item and end in the next. Memory is as fast with
// a few multiprocessors less, so a block may have a little more than its even share, or kSnap tiles
// more. cost: what every item costs, or 0 if they differ.
inline constexpr int kSnap = 4;

FLASH3_HOST_DEVICE constexpr DecodeCut cut_of(const DecodeRule& rule, DecodeCost total,
                                              unsigned items, DecodeCost cost, int blocks) {
  const DecodeCost even = total / unsigned(blocks), snap = unsigned(kSnap) >> rule.cost_shift;
  DecodeCut cut{total, 0, 0, 1, unsigned(blocks), snap < even / 4 ? snap : even / 4};
  if (cost == 0) return cut;
  const unsigned parts = items < unsigned(blocks) ? unsigned(blocks) / items : 1;
  const DecodeCost unit = ceil_div(items, unsigned(blocks)) * cost;
  if (ceil_div(unit, parts) > even + even / 16 + snap) return cut;
  cut.unit = unit;
  cut.span = parts == 1 ? unit : tiles_of_cost(rule, cost);
  cut.parts = parts;
  return cut;
}

// The split at which an item is cut that has so much cost before the cut: split_begin to split_end.
FLASH3_HOST_DEVICE constexpr int split_at(const DecodeRule& rule, const DecodeSequence& s,
                                          const DecodeCut& cut, DecodeCost cost) {
  if (cost <= cut.snap) return s.split_begin;
  if (cost + cut.snap >= item_cost(rule, s)) return s.split_end;
  const unsigned size = unsigned(s.split_tiles);
  const unsigned splits = ((cost << rule.cost_shift) + size / 2) / size;
  return splits < unsigned(s.splits()) ? s.split_begin + int(splits) : s.split_end;
}

}  // namespace flash3::cuda::sm90
