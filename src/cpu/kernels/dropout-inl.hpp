// SPDX-License-Identifier: Apache-2.0
// Which weights dropout keeps (core/dropout.hpp), as a bit for each: bit j mod 8 of byte j / 8 of a
// row is that of key j. Included by attention-inl.hpp.
#include "core/dropout.hpp"

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// What a row's keys begin at a multiple of, and how many are found at least.
constexpr Index kKeptKeys = kKeyAlignment;

// What tells which weights of a query head are kept.
struct DropoutOfHead {
  PhiloxKey key;
  unsigned threshold, head;  // Problem::dropout_head()
};

#if HWY_TARGET == HWY_SCALAR

HWY_INLINE void find_kept(const DropoutOfHead& of, Index query, Range keys, uint8_t* const* rows) {
  for (int half = 0; half < 2; ++half)
    for (Index j = keys.begin; rows[half] && j < keys.end; ++j) {
      const bool keeps = dropout_keeps(of.key, of.threshold, of.head,
                                       static_cast<int>(query) + 8 * half, static_cast<int>(j));
      uint8_t& byte = rows[half][(j - keys.begin) / 8];
      byte = static_cast<uint8_t>((j % 8 == 0 ? 0 : byte) | keeps << j % 8);
    }
}

#else

using Draws = hn::Repartition<uint16_t, U32>;  // two of a word
constexpr int kEvaluatedKeys = 4 * kLanes;     // of kLanes groups
static_assert(kKeptKeys % kEvaluatedKeys == 0);

struct Products {
  VecU high, low;  // of 64 bits
};
HWY_INLINE Products multiply(VecU x, unsigned factor) {
  const U32 words;
  const hn::RepartitionToWide<U32> pairs;
  const VecU factors = hn::Set(words, factor);
  const auto even = hn::MulEven(x, factors);
  const auto odd =
      hn::MulEven(hn::BitCast(words, hn::ShiftRight<32>(hn::BitCast(pairs, x))), factors);
  return {hn::OddEven(hn::BitCast(words, odd), hn::BitCast(words, hn::ShiftRight<32>(even))),
          hn::OddEven(hn::BitCast(words, hn::ShiftLeft<32>(odd)), hn::BitCast(words, even))};
}

// philox() of kLanes counters.
HWY_INLINE void philox(PhiloxKey key, VecU (&word)[4]) {
  for (int round = 0; round < 7; ++round) {
    const Products first = multiply(word[0], 0xD2511F53u);
    const Products second = multiply(word[2], 0xCD9E8D57u);
    word[0] = hn::Xor3(second.high, word[1], hn::Set(U32(), key.low));
    word[2] = hn::Xor3(first.high, word[3], hn::Set(U32(), key.high));
    word[1] = second.low;
    word[3] = first.low;
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
}

// Which weights of a query of the lower half of a group, and of the query 8 after it, are kept of
// these keys, which begin and end at multiples of kKeptKeys: to rows[0] and rows[1]; null: not
// wanted.
HWY_INLINE void find_kept(const DropoutOfHead& of, Index query, Range keys, uint8_t* const* rows) {
  const Draws draws;
  const auto most_dropped = hn::Set(draws, static_cast<uint16_t>(of.threshold - 1));
  const DropoutGroup group = DropoutGroup::of(static_cast<int>(query), 0);
  for (Index j = keys.begin; j < keys.end; j += kEvaluatedKeys) {
    VecU word[4] = {hn::Iota(U32(), static_cast<unsigned>(j / 4)), hn::Set(U32(), group.queries),
                    hn::Set(U32(), of.head), hn::Zero(U32())};
    philox(of.key, word);
    for (int half = 0; half < 2; ++half) {
      if (!rows[half]) continue;
      uint8_t low[8], high[8];  // keys 0 … 7 of each 16, and 8 … 15
      hn::StoreMaskBits(draws, hn::Gt(hn::BitCast(draws, word[2 * half]), most_dropped), low);
      hn::StoreMaskBits(draws, hn::Gt(hn::BitCast(draws, word[2 * half + 1]), most_dropped), high);
      uint8_t* const out = rows[half] + (j - keys.begin) / 8;
      for (int i = 0; i < kLanes / 4; ++i) out[2 * i] = low[i], out[2 * i + 1] = high[i];
    }
  }
}

#endif

// The same for packed rows of a KV head with a group of query heads. bits: of the first row and
// key; a row has `stride` bytes.
HWY_NOINLINE void find_kept(const Problem& p, PhiloxKey key, Index sequence, Index kv_head,
                            Range rows, Range keys, uint8_t* bits, Index stride) {
  const Index group = p.queries_per_kv_head(), next = 8 * group;
  for (Index r = rows.begin; r < rows.end; ++r, bits += stride) {
    const PackedRow row = packed_row(group, kv_head, r);
    const bool is_upper = row.query / 8 % 2 == 1;
    if (is_upper && r - next >= rows.begin) continue;  // found with the lower one
    uint8_t* const to[2] = {is_upper ? nullptr : bits, is_upper              ? bits
                                                       : r + next < rows.end ? bits + next * stride
                                                                             : nullptr};
    find_kept({key, p.dropout.threshold, p.dropout_head(sequence, row.head)},
              row.query - (is_upper ? 8 : 0), keys, to);
  }
}

// x where the weights of key j and those after it are kept, else 0; j is a multiple of kLanes.
HWY_INLINE VecF keep(VecF x, const uint8_t* kept, Index j) {
  uint8_t bits[8] = {};
  if constexpr (kLanes < 8)
    bits[0] = static_cast<uint8_t>(kept[j / 8] >> j % 8);
  else
    std::memcpy(bits, kept + j / 8, kLanes / 8);
  return hn::IfThenElseZero(hn::LoadMaskBits(F32(), bits), x);
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
