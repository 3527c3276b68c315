// SPDX-License-Identifier: Apache-2.0
// The launch of an attention kernel.
#pragma once

#include "core/status.hpp"

namespace flash3::cuda {

// What a launch takes besides the kernel's params.
struct KernelLaunch {
  const void* function;
  int blocks, threads;
  int shared_bytes;   // dynamic shared memory of a block
  bool after_kernel;  // it waits itself for the kernel before, and may begin while that one ends
  int cluster = 1;    // blocks of a cluster
};

// Loads the kernel and reserves its shared memory, which launch_kernel() does otherwise when it
// comes to it: for calls that enqueue something before that they could not take back.
Status load_kernel(const KernelLaunch& launch);

// Enqueues the kernel with these params, its only argument, on the stream. `what`: as in "launching
// the forward kernel", for the message.
Status launch_kernel(const KernelLaunch& launch, void* params, void* stream, const char* what);

}  // namespace flash3::cuda
