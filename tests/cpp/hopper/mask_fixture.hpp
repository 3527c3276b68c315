// SPDX-License-Identifier: Apache-2.0
// What the tests of masks that the device makes share.
#pragma once

#include <utility>

#include "cuda/mask/make_mask.hpp"
#include "fixture.hpp"
#include "mask_memory.hpp"

namespace flash3 {

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

  Made make_problem(const MaskInput& in, const MaskShape& shape) {
    const MaskCase& c = in.c;
    Made made;
    MaskProblem& p = made.problem;
    p.shape = shape;
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
    made.bytes = size_t(MaskPlaces::of(shape).bytes);
    made.memory = memory_->allocate(made.bytes + 2 * canary_);
    p.data = static_cast<std::byte*>(made.memory.get()) + canary_;
    memory_->fill(made.memory.get(), kPattern, made.bytes + 2 * canary_);
    return made;
  }

  void expect_mask(const ExpectedMask& expected, const Made& made) {
    std::vector<std::byte> host(made.bytes + 2 * canary_);
    memory_->copy_out(host.data(), made.memory.get(), host.size());
    const auto is_canary = [](std::byte b) { return b == kPattern; };
    EXPECT_TRUE(std::all_of(host.begin(), host.begin() + canary_, is_canary));
    EXPECT_TRUE(std::all_of(host.end() - canary_, host.end(), is_canary));
    expected.expect_equal(made.problem.shape, host.data() + canary_);
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
