// SPDX-License-Identifier: Apache-2.0
/** @file
 * flash3 for C++20: masks as data, a header-only layer over mask.h.
 *
 *     flash3::MaskArguments args{.batch = 1, .heads_q = 8, .seq_q = n, .seq_k = n, .causal = true,
 *                                .documents = flash3::documents_tensor(numbers, 1, n)};
 *     flash3_mask mask = flash3::make_mask(args, memory, flash3::mask_size(args));
 *     call.mask = &mask;
 *     for (each layer) flash3::forward(call);
 */
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "flash3/flash3.hpp"
#include "flash3/mask.h"

namespace flash3 {

/// A number for each key, [batch, seq_k]: documents.
inline Tensor documents_tensor(const int32_t* numbers, int64_t batch, int64_t seq_k) {
  return page_table_tensor(numbers, batch, seq_k);
}
/// Ranges of keys, [batch, heads, 2·n, seq_q]: ranges.
inline Tensor ranges_tensor(const int32_t* bounds, std::array<int64_t, 4> shape) {
  return tensor(const_cast<int32_t*>(bounds), FLASH3_INT32, shape);
}
/// A byte for each pair, [batch, heads, seq_q, seq_k]: dense.
inline Tensor dense_mask_tensor(const uint8_t* bytes, std::array<int64_t, 4> shape) {
  return tensor(const_cast<uint8_t*>(bytes), FLASH3_UINT8, shape);
}
/// A bit for each pair, [batch, heads, seq_q, ⌈seq_k / 8⌉]: bits.
inline Tensor mask_bits_tensor(const uint8_t* bytes, std::array<int64_t, 4> shape) {
  return tensor(const_cast<uint8_t*>(bytes), FLASH3_UINT8, shape);
}
/// A bit for each pair of so many blocks: bits, where bit_blocks says which.
inline Tensor mask_block_bits_tensor(const uint8_t* bytes, int64_t blocks) {
  return packed_tensor(const_cast<uint8_t*>(bytes), FLASH3_UINT8,
                       {blocks, FLASH3_MASK_BLOCK, FLASH3_MASK_BLOCK / 8});
}
/// Which block of bits, [batch, heads, blocks of queries, blocks of keys]: bit_blocks.
inline Tensor bit_blocks_tensor(const int32_t* numbers, std::array<int64_t, 4> shape) {
  return tensor(const_cast<int32_t*>(numbers), FLASH3_INT32, shape);
}
/// How many blocks, [batch, heads, blocks of rows]: block_counts.
inline Tensor block_counts_tensor(const int32_t* counts, std::array<int64_t, 3> shape) {
  return packed_tensor(const_cast<int32_t*>(counts), FLASH3_INT32, shape);
}
/// Which blocks, [batch, heads, blocks of rows, most]: block_indices.
inline Tensor block_indices_tensor(const int32_t* indices, std::array<int64_t, 4> shape) {
  return tensor(const_cast<int32_t*>(indices), FLASH3_INT32, shape);
}

/// What a mask needs: its room, to be exact, is then max_blocks, max_partial_blocks and
/// max_documents.
struct MaskUse {
  int64_t blocks = 0;          ///< in all
  int64_t partial_blocks = 0;  ///< of those, the ones that need bits
  int64_t documents = 0;       ///< 0 where it has no room for any
};

/// Finds the bytes that this mask takes; sets nothing if it fails.
inline Result try_mask_size(const MaskArguments& args, size_t* bytes) {
  const flash3_mask_params p = args.params();
  return Result(flash3_mask_size(&p, bytes));
}

/// Makes the mask in memory of the caller's; sets nothing if it fails.
inline Result try_make_mask(const MaskArguments& args, void* data, size_t size, flash3_mask* mask) {
  const flash3_mask_params p = args.params();
  flash3_mask made{};
  made.data = data, made.size = size;
  Result result(flash3_mask_make(&p, &made));
  if (result) *mask = made;
  return result;
}

/// Waits for the stream, and finds what the mask needs; sets nothing if it fails.
inline Result try_mask_use(const flash3_mask& mask, void* stream, MaskUse* use) {
  MaskUse found;
  Result result(
      flash3_mask_used(&mask, stream, &found.blocks, &found.partial_blocks, &found.documents));
  if (result) *use = found;
  return result;
}

#if FLASH3_EXCEPTIONS

/// Bytes that this mask takes. Throws Error.
inline size_t mask_size(const MaskArguments& args) {
  return detail::or_throw<size_t>([&](size_t* bytes) { return try_mask_size(args, bytes); });
}

/// Makes the mask in memory of the caller's. Throws Error.
inline flash3_mask make_mask(const MaskArguments& args, void* data, size_t size) {
  return detail::or_throw<flash3_mask>(
      [&](flash3_mask* mask) { return try_make_mask(args, data, size, mask); });
}

/// Waits for the stream; what the mask needs. Throws Error.
inline MaskUse mask_use(const flash3_mask& mask, void* stream = nullptr) {
  return detail::or_throw<MaskUse>([&](MaskUse* use) { return try_mask_use(mask, stream, use); });
}

#endif  // FLASH3_EXCEPTIONS

}  // namespace flash3
