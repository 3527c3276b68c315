// SPDX-License-Identifier: Apache-2.0
// The kernel of host/packed_copy.hpp. Without what a Status takes: nvcc would read that three
// times.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensor_view.hpp"

namespace flash3::cuda {

// Enqueues the copy of all elements; an element has 1 byte or 2.
cudaError_t launch_pack_rows(const TensorView& source, const TensorView& packed, int element_bytes,
                             cudaStream_t stream);

}  // namespace flash3::cuda
