// SPDX-License-Identifier: Apache-2.0
// A mask's memory against which query sees which key, wherever its lists and its bits lie.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda/mask/make_mask.hpp"
#include "device_call.hpp"
#include "mask_case.hpp"

namespace flash3 {

// What a block of queries sees of one of keys.
struct ExpectedBlock {
  int64_t block;
  int quarters;
  MaskKind kind;
  int64_t range;
};

class ExpectedMask {
 public:
  explicit ExpectedMask(const MaskInput& input) : in_(input), c_(input.c), shape_(c_.shape()) {
    for (int64_t b = 0; b < c_.batch; ++b)
      for (int64_t h = 0; h < c_.heads; ++h) {
        seen_.push_back(input.seen(b, h));
        for (int64_t q = 0; q < shape_.q_blocks(); ++q) lists_.push_back(find_list(b, h, q));
      }
    for (const auto& list : lists_)
      for (const ExpectedBlock& block : list) ++blocks_, partial_ += block.kind == kMaskBits;
  }

  int64_t blocks() const { return blocks_; }
  int64_t partial_blocks() const { return partial_; }

  // data: the mask's memory of a shape that may have more or less room.
  void expect_equal(const MaskShape& shape, std::byte* data) const {
    SCOPED_TRACE(c_.text());
    const MaskMemory memory = MaskMemory::of(shape, data);
    const bool fits = blocks_ <= shape.blocks && partial_ <= shape.partial_blocks;
    EXPECT_EQ(memory.counts->blocks, blocks_);
    EXPECT_EQ(memory.counts->partial_blocks, partial_);
    EXPECT_EQ(memory.counts->key_blocks, blocks_);
    EXPECT_EQ(memory.counts->overflow, !fits);
    expect_ranges(memory);
    if (!fits) {
      for (int64_t i = 0; i < shape.lists(); ++i) ASSERT_EQ(memory.lists[i].count, 0);
      for (int64_t i = 0; i < shape.key_lists(); ++i) ASSERT_EQ(memory.key_lists[i].count, 0);
      return;
    }
    Taken taken;
    for (int64_t b = 0; b < c_.batch && !testing::Test::HasFailure(); ++b)
      for (int64_t h = 0; h < c_.heads && !testing::Test::HasFailure(); ++h)
        expect_lists(memory, b, h, &taken);
  }

 private:
  // Places that a list has, or a block's bits.
  struct Taken {
    std::vector<bool> blocks, key_blocks, slots;
  };

  const std::vector<uint8_t>& seen(int64_t b, int64_t h) const {
    return seen_[size_t(b * c_.heads + h)];
  }
  const std::vector<ExpectedBlock>& list(int64_t b, int64_t h, int64_t q) const {
    return lists_[size_t((b * c_.heads + h) * shape_.q_blocks() + q)];
  }
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return i < c_.seq_q && j < c_.seq_k && seen(b, h)[size_t(i * c_.seq_k + j)] != 0;
  }

  MaskRange range(int64_t b, int64_t h, int64_t r, int64_t i) const {
    if (i >= c_.seq_q) return {0, 0};
    const Range own = in_.source_range(b, h, r, i);
    const Mask band = Mask::make(c_.seq_q, c_.seq_k, c_.rule);
    const int64_t begin = std::max({own.begin, band.first(i), Index{0}}),
                  end = std::min({own.end, band.end(i), Index{c_.seq_k}});
    return begin < end ? MaskRange{int(begin), int(end)} : MaskRange{0, 0};
  }

  std::vector<ExpectedBlock> find_list(int64_t b, int64_t h, int64_t q) const {
    const int64_t first_row = q * kMaskBlock, end_row = std::min(c_.seq_q, first_row + kMaskBlock);
    const int64_t ranges = shape_.ranges;
    std::vector<MaskRange> of_rows;
    for (int64_t r = 0; r < ranges; ++r)
      for (int64_t i = first_row; i < end_row; ++i) of_rows.push_back(range(b, h, r, i));
    std::vector<ExpectedBlock> found;
    for (int64_t k = 0; k < shape_.k_blocks(); ++k) {
      const int64_t first_key = k * kMaskBlock,
                    end_key = std::min(c_.seq_k, first_key + kMaskBlock);
      int64_t pairs = 0, of_quarters[4] = {};
      std::vector<bool> same(size_t(ranges), true);
      for (int64_t i = first_row; i < end_row; ++i) {
        const uint8_t* const own = seen(b, h).data() + i * c_.seq_k;
        int64_t of_row = 0;
        for (int64_t j = first_key; j < end_key; ++j) {
          of_row += own[j];
          of_quarters[(j - first_key) / 64 * 2 + (i - first_row) / 64] += own[j];
        }
        pairs += of_row;
        for (int64_t r = 0; r < ranges; ++r) {
          const MaskRange& told = of_rows[size_t(r * (end_row - first_row) + i - first_row)];
          // What it tells, and no more than that.
          int64_t inside = 0;
          const int64_t from = std::max<int64_t>(told.begin, first_key),
                        to = std::min<int64_t>(told.end, end_key);
          for (int64_t j = from; j < to; ++j) inside += own[j];
          if (inside != of_row || inside != std::max<int64_t>(to - from, 0))
            same[size_t(r)] = false;
        }
      }
      if (pairs == 0) continue;
      const auto told = std::find(same.begin(), same.end(), true);
      int quarters = 0;
      bool whole = true;  // each of them that is seen
      for (int quarter = 0; quarter < 4; ++quarter) {
        if (of_quarters[quarter] == 0) continue;
        quarters |= 1 << quarter;
        const int64_t rows = std::min<int64_t>(end_row - first_row - quarter % 2 * 64, 64);
        whole = whole && of_quarters[quarter] == rows * 64;
      }
      if (pairs == (end_row - first_row) * kMaskBlock)
        found.push_back({k, quarters, kMaskFull, 0});
      else if (whole)
        found.push_back({k, quarters, kMaskQuarters, 0});
      else if (told != same.end())
        found.push_back({k, quarters, kMaskRange, told - same.begin()});
      else
        found.push_back({k, quarters, kMaskBits, 0});
    }
    return found;
  }

  void expect_ranges(const MaskMemory& memory) const {
    for (int64_t r = 0; r < shape_.ranges; ++r)
      for (int64_t b = 0; b < c_.batch; ++b)
        for (int64_t h = 0; h < c_.heads; ++h)
          for (int64_t i = 0; i < shape_.rows(); ++i) {
            const MaskRange want = range(b, h, r, i), got = *memory.range(int(r), b, h, i);
            if (want.begin == got.begin && want.end == got.end) continue;
            ADD_FAILURE() << "range " << r << " of query " << i << " is [" << got.begin << ", "
                          << got.end << ") and not [" << want.begin << ", " << want.end << ")";
            return;
          }
  }

  // A list's places, which no other has.
  static void take(const MaskList& list, int64_t room, std::vector<bool>* taken) {
    ASSERT_GE(list.begin, 0);
    ASSERT_LE(int64_t{list.begin} + list.count, room);
    taken->resize(size_t(room));
    for (int n = 0; n < list.count; ++n) {
      ASSERT_FALSE((*taken)[size_t(list.begin + n)]) << "place " << list.begin + n;
      (*taken)[size_t(list.begin + n)] = true;
    }
  }

  void expect_lists(const MaskMemory& memory, int64_t b, int64_t h, Taken* taken) const {
    std::vector<bool>& slots = taken->slots;
    slots.resize(size_t(memory.shape.partial_blocks));
    std::vector<std::vector<MaskBlock>> transposed(size_t(shape_.k_blocks()));
    for (int64_t q = 0; q < shape_.q_blocks(); ++q) {
      SCOPED_TRACE("block of queries " + std::to_string(q));
      const MaskList got = *memory.list(b, h, q);
      const auto& want = list(b, h, q);
      ASSERT_EQ(got.count, int64_t(want.size()));
      if (got.count == 0) continue;
      take(got, memory.shape.blocks, &taken->blocks);
      for (size_t n = 0; n < want.size(); ++n) {
        const MaskBlock block = memory.blocks[got.begin + int(n)];
        ASSERT_EQ(block.block(), want[n].block);
        ASSERT_EQ(int(block.kind()), int(want[n].kind)) << "block of keys " << want[n].block;
        ASSERT_EQ(block.quarters(), want[n].quarters) << "block of keys " << want[n].block;
        transposed[size_t(block.block())].push_back(block.as_seen_from(int(q)));
        if (block.kind() != kMaskBits) {
          ASSERT_EQ(block.data, want[n].range);
          continue;
        }
        ASSERT_GE(block.data, 0);
        ASSERT_LT(block.data, memory.shape.partial_blocks);
        ASSERT_FALSE(slots[size_t(block.data)]) << "slot " << block.data;
        slots[size_t(block.data)] = true;
        expect_bits(memory, b, h, q, block);
      }
    }
    for (int64_t k = 0; k < shape_.k_blocks(); ++k) {
      SCOPED_TRACE("block of keys " + std::to_string(k));
      const MaskList got = *memory.key_list(b, h, k);
      const auto& want = transposed[size_t(k)];
      ASSERT_EQ(got.count, int64_t(want.size()));
      if (got.count == 0) continue;
      take(got, memory.shape.blocks, &taken->key_blocks);
      for (size_t n = 0; n < want.size(); ++n) {
        const MaskBlock block = memory.key_blocks[got.begin + int(n)];
        ASSERT_EQ(block.bits, want[n].bits);
        ASSERT_EQ(block.data, want[n].data);
      }
    }
  }

  void expect_bits(const MaskMemory& memory, int64_t b, int64_t h, int64_t q,
                   const MaskBlock& block) const {
    const unsigned* const words = memory.words_of(block.data);
    for (int row = 0; row < kMaskBlock; ++row)
      for (int key = 0; key < kMaskBlock; ++key) {
        const MaskBit at = mask_bit(row, key);
        const bool told = (words[at.word] >> at.bit & 1) != 0;
        if (told == sees(b, h, q * kMaskBlock + row, int64_t{block.block()} * kMaskBlock + key))
          continue;
        FAIL() << "bit " << told << " of row " << row << ", key " << key << " of block of keys "
               << block.block();
      }
  }

  const MaskInput& in_;
  const MaskCase& c_;
  MaskShape shape_;
  std::vector<std::vector<uint8_t>> seen_;
  std::vector<std::vector<ExpectedBlock>> lists_;
  int64_t blocks_ = 0, partial_ = 0;
};

// What the tests of masks that the device makes share.

class MakeMask : public HopperTest {
 protected:
  static constexpr std::byte kPattern{0xA5};
  size_t canary_ = 256;  // bytes of it before and after the mask

  // A source on the device, and memory of a mask.
  struct Made {
    MaskProblem problem;
    std::shared_ptr<void> source, counts, bits, memory;
    size_t bytes = 0;
  };

  template <class Element>
  std::shared_ptr<void> upload(const std::vector<Element>& values) {
    const auto memory = memory_->allocate(std::max<size_t>(values.size() * sizeof(Element), 1));
    if (!values.empty())
      memory_->copy_in(memory.get(), values.data(), values.size() * sizeof(Element));
    return memory;
  }

  Made make_problem(const MaskInput& in, const MaskShape& shape, int64_t documents = 0) {
    const MaskCase& c = in.c;
    Made made;
    MaskProblem& p = made.problem;
    p.shape = shape, p.documents = documents;
    p.sequences_q.rows = p.sequences_q.max_length = shape.seq_q;
    p.sequences_k.rows = p.sequences_k.max_length = shape.seq_k;
    p.rule = c.rule;
    p.source = c.source;
    const bool bytes = c.source == MaskSource::kDense || c.source == MaskSource::kBits;
    made.source = bytes ? upload(in.bytes) : upload(in.ints);
    made.counts = upload(in.counts);
    // A dimension of size 1 has no stride (core/mask_problem.hpp).
    const auto stride = [](int64_t size, int64_t own) { return size > 1 ? own : 0; };
    if (c.source != MaskSource::kBand) {
      p.tensor.data = static_cast<const std::byte*>(made.source.get()) + c.pad * (bytes ? 1 : 4);
      p.tensor.stride_batch = stride(c.batch, c.heads * in.rows * in.row);
      p.tensor.stride_head = stride(c.heads, in.rows * in.row);
      p.tensor.stride_row = stride(in.rows, in.row);
      p.tensor.size = in.row - c.pad;
    }
    if (c.source == MaskSource::kBlocks) {
      p.counts.data = static_cast<const int*>(made.counts.get()) + c.pad;
      p.counts.stride_batch = stride(c.batch, c.heads * in.rows);
      p.counts.stride_head = stride(c.heads, in.rows);
      p.counts.size = in.rows;
      p.block_rows = c.block_rows, p.block_keys = c.block_keys;
    }
    if (c.source == MaskSource::kBitBlocks) {
      made.bits = upload(in.bytes);
      p.block_bits = {static_cast<const std::byte*>(made.bits.get()) + c.pad,
                      MaskInput::kBlocksOfBits, kMaskBlock * in.bit_row(), in.bit_row()};
    }
    p.stream = memory_->stream();
    made.bytes = mask_bytes(shape, documents);
    made.memory = memory_->allocate(made.bytes + 2 * canary_);
    p.data = static_cast<std::byte*>(made.memory.get()) + canary_;
    memory_->fill(made.memory.get(), kPattern, made.bytes + 2 * canary_);
    return made;
  }

  // The mask's memory, around which nothing is written.
  std::vector<std::byte> read(const Made& made) {
    std::vector<std::byte> host(made.bytes + 2 * canary_);
    memory_->copy_out(host.data(), made.memory.get(), host.size());
    const auto is_canary = [](std::byte b) { return b == kPattern; };
    EXPECT_TRUE(std::all_of(host.begin(), host.begin() + canary_, is_canary));
    EXPECT_TRUE(std::all_of(host.end() - canary_, host.end(), is_canary));
    return {host.begin() + canary_, host.end() - canary_};
  }

  void expect_mask(const ExpectedMask& expected, const Made& made) {
    expected.expect_equal(made.problem.shape, read(made).data());
  }

  void verify(const MaskCase& c, int repeat = 1) {
    const MaskInput in(c, 7);
    const ExpectedMask expected(in);
    // No more room than it needs.
    MaskShape shape = c.shape();
    shape.blocks = expected.blocks(), shape.partial_blocks = expected.partial_blocks();
    const Made made = make_problem(in, shape);
    for (int i = 0; i < repeat && !HasFailure(); ++i) {
      const Status status = cuda::launch_make_mask(made.problem);
      ASSERT_TRUE(status.ok()) << status.message();
      expect_mask(expected, made);
    }
  }
};

}  // namespace flash3
