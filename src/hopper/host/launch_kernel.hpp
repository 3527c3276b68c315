// SPDX-License-Identifier: Apache-2.0
// The launch of an attention kernel.
#pragma once

#include "core/status.hpp"

namespace flash3::hopper {

// What a launch takes besides the kernel's params.
struct KernelLaunch {
  const void* function;
  int blocks, threads;
  int shared_bytes;   // dynamic shared memory of a block
  bool after_kernel;  // it waits itself for the kernel before, and may begin while that one ends
  int cluster = 1;    // blocks of a cluster
};

// Enqueues the kernel with these params, its only argument, on the stream. `what`: as in "launching
// the forward kernel", for the message.
Status launch_kernel(const KernelLaunch& launch, void* params, void* stream, const char* what);

}  // namespace flash3::hopper
