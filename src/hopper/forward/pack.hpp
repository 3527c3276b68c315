// Copies a tensor whose rows TMA cannot address to one whose rows it can. Costs one read and one
// write of the tensor; only head dims or strides that are not multiples of 8 elements, or bases off
// 16 bytes, need it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace flash3::hopper {

// The packed tensor at `data`: [batch, seq, heads, dim] with `row` elements from one row to the
// next.
TensorView packed_view(const TensorView& source, void* data, int64_t row);

cudaError_t launch_pack(const TensorView& source, const TensorView& packed, cudaStream_t stream);

}  // namespace flash3::hopper
