// SPDX-License-Identifier: Apache-2.0
#include "cpu/padding.hpp"

#include <algorithm>
#include <cstring>

namespace flash3::cpu {
namespace {

// A run of elements without gaps.
void fill(char* at, int64_t elements, const PaddedTensor& tensor) {
  if (tensor.bits == 0) {
    std::memset(at, 0, static_cast<size_t>(elements * tensor.element_bytes));
  } else {
    auto* const words = reinterpret_cast<uint32_t*>(at);
    std::fill(words, words + elements, tensor.bits);
  }
}

void fill(const RowGap& gap, const PaddedTensor& tensor) {
  const TensorView& view = tensor.view;
  for (Index row = gap.begin; row < gap.end; ++row)
    for (Index head = 0; head < view.heads; ++head) {
      const Index at =
          gap.element * view.stride_batch + row * view.stride_seq + head * view.stride_head;
      fill(static_cast<char*>(view.data) + at * tensor.element_bytes, view.dim, tensor);
    }
}

}  // namespace

void fill_padding(const Padding& padding) {
  for (int i = 0; i < padding.count; ++i) {
    const PaddedTensor& tensor = padding.tensors[i];
    const Index gaps = gap_count(tensor.sequences, padding.batch);
    for (Index gap = 0; gap < gaps; ++gap)
      fill(row_gap(tensor.sequences, padding.batch, gap), tensor);
  }
}

}  // namespace flash3::cpu
