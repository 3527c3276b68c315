// SPDX-License-Identifier: Apache-2.0
/// @file
/// flash3 for C++20: views of the tensors that calls take. A part of the wrapper, which includes
/// it.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "flash3/flash3.h"

namespace flash3 {

/// A strided view of memory that the caller owns.
using Tensor = flash3_tensor;

/// A contiguous tensor, for instance tensor(p, FLASH3_BFLOAT16, {batch, seq, heads, dim}).
inline Tensor tensor(void* data, flash3_dtype dtype, std::array<int64_t, 4> shape) {
  Tensor t{data, dtype, 4, {shape[0], shape[1], shape[2], shape[3]}, {0, 0, 0, 1}};
  for (int i = 2; i >= 0; --i) t.stride[i] = t.stride[i + 1] * t.shape[i + 1];
  return t;
}

/// A contiguous [batch, heads, seq] float32 tensor for the log-sum-exp.
inline Tensor lse_tensor(float* data, int64_t batch, int64_t heads, int64_t seq) {
  return Tensor{data, FLASH3_FLOAT32, 3, {batch, heads, seq, 0}, {heads * seq, seq, 1, 0}};
}

/// A contiguous [total, heads, dim] tensor of a ragged batch: q, k, v, out.
inline Tensor packed_tensor(void* data, flash3_dtype dtype, std::array<int64_t, 3> shape) {
  return Tensor{
      data, dtype, 3, {shape[0], shape[1], shape[2], 0}, {shape[1] * shape[2], shape[2], 1, 0}};
}
/// A contiguous [heads, total] float32 tensor for the log-sum-exp of a ragged batch.
inline Tensor packed_lse_tensor(float* data, int64_t heads, int64_t total) {
  return Tensor{data, FLASH3_FLOAT32, 2, {heads, total, 0, 0}, {total, 1, 0, 0}};
}

/// One dimension of int32: cu_seqlens and seqused.
inline Tensor index_tensor(const int32_t* data, int64_t size) {
  return Tensor{const_cast<int32_t*>(data), FLASH3_INT32, 1, {size, 0, 0, 0}, {1, 0, 0, 0}};
}
/// Two dimensions of int32: page_table, [batch, max_pages].
inline Tensor page_table_tensor(const int32_t* data, int64_t batch, int64_t max_pages) {
  return Tensor{
      const_cast<int32_t*>(data), FLASH3_INT32, 2, {batch, max_pages, 0, 0}, {max_pages, 1, 0, 0}};
}
/// A word of 64 bits for each query: tree_mask, [batch, seq_q].
inline Tensor tree_mask_tensor(const uint64_t* words, int64_t batch, int64_t seq_q) {
  return Tensor{
      const_cast<uint64_t*>(words), FLASH3_INT64, 2, {batch, seq_q, 0, 0}, {seq_q, 1, 0, 0}};
}
/// The same of packed queries, [total_q].
inline Tensor packed_tree_mask_tensor(const uint64_t* words, int64_t total) {
  return Tensor{const_cast<uint64_t*>(words), FLASH3_INT64, 1, {total, 0, 0, 0}, {1, 0, 0, 0}};
}
/// [positions, rotary_dim / 2]: rotary_cos and rotary_sin.
inline Tensor rotary_tensor(void* data, flash3_dtype dtype, int64_t positions, int64_t pairs) {
  return Tensor{data, dtype, 2, {positions, pairs, 0, 0}, {pairs, 1, 0, 0}};
}
/// [heads], float32 or the dtype of out.
inline Tensor sink_tensor(void* data, flash3_dtype dtype, int64_t heads) {
  return Tensor{data, dtype, 1, {heads, 0, 0, 0}, {1, 0, 0, 0}};
}

/// The scale of an FP8 tensor: [1], one for all of it.
inline Tensor scale_tensor(float* data) {
  return Tensor{data, FLASH3_FLOAT32, 1, {1, 0, 0, 0}, {1, 0, 0, 0}};
}
/// Scales of an FP8 tensor: [batch, heads_k], one for each sequence and KV head.
inline Tensor scale_tensor(float* data, int64_t batch, int64_t heads_k) {
  return Tensor{data, FLASH3_FLOAT32, 2, {batch, heads_k, 0, 0}, {heads_k, 1, 0, 0}};
}
/// Scales of an FP8 tensor: [batch, heads, blocks], one for each scale_blocks() of tokens (packed:
/// batch 1, and scale_blocks_packed() of them).
inline Tensor scale_tensor(float* data, int64_t batch, int64_t heads, int64_t blocks) {
  return Tensor{data, FLASH3_FLOAT32, 3, {batch, heads, blocks, 0}, {heads * blocks, blocks, 1, 0}};
}
/// The blocks of FLASH3_FP8_BLOCK tokens that a sequence has.
inline int64_t scale_blocks(int64_t seq) { return (seq + FLASH3_FP8_BLOCK - 1) / FLASH3_FP8_BLOCK; }
/// The blocks of FLASH3_FP8_BLOCK tokens that a packed batch has.
inline int64_t scale_blocks_packed(int64_t total, int64_t batch) {
  return total / FLASH3_FP8_BLOCK + batch;
}

/// [batch, heads, seq, dim] memory seen as [batch, seq, heads, dim].
inline Tensor heads_first(Tensor t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

}  // namespace flash3
