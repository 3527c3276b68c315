// SPDX-License-Identifier: Apache-2.0
// Kernels of one stream that overlap (programmatic dependent launch). PTX ISA 9.7.13.13,
// griddepcontrol.
#pragma once

namespace flash3::hopper {

// Lets the next kernel of the stream be launched as soon as all blocks have come here or ended.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and what it wrote is visible. Every block of a
// kernel launched as dependent must come here before it touches what others wrote.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash3::hopper
