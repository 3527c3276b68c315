// SPDX-License-Identifier: Apache-2.0
// Moving registers between the warpgroups of a block. PTX ISA 9.7.19.5, setmaxnreg. Every warp of a
// warpgroup must call it.
#pragma once

namespace flash3::hopper {

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash3::hopper
