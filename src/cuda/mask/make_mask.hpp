// SPDX-License-Identifier: Apache-2.0
// Makes masks (flash3/mask.h) on the device: three kernels, of which the first clears what counts
// and finds where documents begin, the second makes the lists of blocks of queries, and the third
// those of blocks of keys. One more, after the first, notes documents as sequences.
#pragma once

#include "core/mask_problem.hpp"
#include "core/status.hpp"

namespace flash3::cuda {

// Enqueues the kernels on problem.stream. Nothing waits, and a CUDA graph can capture it.
Status launch_make_mask(const MaskProblem& problem);

// What a mask needs, once the stream has made it: waits for the stream.
Status read_mask_counts(const MaskShape& shape, const void* data, void* stream, MaskCounts* counts);

}  // namespace flash3::cuda
