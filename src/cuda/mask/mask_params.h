// SPDX-License-Identifier: Apache-2.0
// What the kernels that make a mask are told. Host and device.
#pragma once

#include "core/mask_lists.hpp"
#include "core/mask_rule.hpp"
#include "core/seq_info.hpp"

namespace flash3::cuda {

// core/mask_problem.hpp: MaskTensor.
struct SourceTensor {
  const void* data;
  long long stride_batch, stride_head, stride_row;  // of elements
  long long size;                                   // of the last dimension

  template <class Element>
  FLASH3_HOST_DEVICE const Element* row(int batch, int head, long long which) const {
    return static_cast<const Element*>(data) + batch * stride_batch + head * stride_head +
           which * stride_row;
  }
};

// core/mask_problem.hpp: BlockBits.
struct BitsOfBlocks {
  const void* data;
  long long blocks;
  long long stride_block, stride_row;  // of bytes

  FLASH3_HOST_DEVICE const unsigned char* row(int block, int row) const {
    return static_cast<const unsigned char*>(data) + block * stride_block + row * stride_row;
  }
};

inline constexpr int kAllPairsSeen = -1;  // in place of the number of a block of bits

struct MaskParams {
  MaskMemory memory;
  MaskStarts starts;  // of documents, if there is room for any
  MaskRule rule;
  Sequences q, k;
  SourceTensor source, counts;
  long long block_rows, block_keys;  // of the caller's blocks
  bool in_vectors;                   // rows of bytes or bits lie at multiples of 16 bytes
  BitsOfBlocks block_bits;
};

// MaskCounts::overflow while the lists are made; in the end it is 0 or 1.
enum : int {
  kNoRoom = 1,
  kManyBlocks = 2,        // more than an int counts
  kManyPartialBlocks = 4  // likewise
};

}  // namespace flash3::cuda
