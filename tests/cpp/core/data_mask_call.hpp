// SPDX-License-Identifier: Apache-2.0
// A mask in host memory that a test can then bend: of the sizes of call.hpp, from any source.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "call.hpp"
#include "flash3/mask.hpp"

namespace flash3::test {

inline std::string error_of(flash3_status status,
                            flash3_status expected = FLASH3_INVALID_ARGUMENT) {
  EXPECT_EQ(status, expected) << flash3_last_error();
  return flash3_last_error();
}

struct DataMask {
  static constexpr int64_t kBatch = 2, kSeqQ = 3, kSeqK = 5, kHeads = 4;

  std::array<int32_t, kBatch * kHeads * 2 * kSeqQ> bounds{};
  std::array<int32_t, kBatch * kSeqK> numbers{};
  std::array<uint8_t, kBatch * kHeads * kSeqQ * kSeqK> bytes{};
  std::array<int32_t, 1> counts{1};
  std::array<int32_t, 2> indices{};
  std::array<uint8_t, 2 * FLASH3_MASK_BLOCK * FLASH3_MASK_BLOCK / 8> packed{};
  std::array<int32_t, kBatch> bit_numbers{};
  alignas(256) std::array<unsigned char, 64 << 10> memory{};
  flash3_mask mask{};

  DataMask() {
    for (size_t i = 0; i < bounds.size(); ++i) bounds[i] = i / kSeqQ % 2 == 0 ? 0 : 4;
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 3 != 0;
    mask.data = memory.data(), mask.size = memory.size();
  }
  DataMask(const DataMask&) = delete;
  DataMask& operator=(const DataMask&) = delete;

  static MaskArguments band() {
    return {.batch = kBatch,
            .heads_q = kHeads,
            .seq_q = kSeqQ,
            .seq_k = kSeqK,
            .backend = FLASH3_BACKEND_CPU};
  }
  MaskArguments ranges() {
    MaskArguments args = band();
    args.ranges = ranges_tensor(bounds.data(), {kBatch, kHeads, 2, kSeqQ});
    return args;
  }
  MaskArguments documents() {
    MaskArguments args = band();
    args.documents = documents_tensor(numbers.data(), kBatch, kSeqK);
    return args;
  }
  MaskArguments dense() {
    MaskArguments args = band();
    args.dense = dense_mask_tensor(bytes.data(), {kBatch, kHeads, kSeqQ, kSeqK});
    return args;
  }
  MaskArguments blocks() {
    MaskArguments args = band();
    args.block_counts = block_counts_tensor(counts.data(), {1, 1, 1});
    args.block_indices = block_indices_tensor(indices.data(), {1, 1, 1, 2});
    args.block_rows = 128, args.block_keys = 64;
    return args;
  }
  MaskArguments bits() {
    MaskArguments args = band();
    args.bits = mask_bits_tensor(packed.data(), {kBatch, kHeads, kSeqQ, 1});
    return args;
  }
  MaskArguments bit_blocks() {
    MaskArguments args = band();
    args.bits = mask_block_bits_tensor(packed.data(), 2);
    args.bit_blocks = bit_blocks_tensor(bit_numbers.data(), {kBatch, 1, 1, 1});
    return args;
  }

  const flash3_mask* make(const MaskArguments& args) {
    const flash3_mask_params p = args.params();
    EXPECT_EQ(flash3_mask_make(&p, &mask), FLASH3_OK) << flash3_last_error();
    return &mask;
  }
};

}  // namespace flash3::test
