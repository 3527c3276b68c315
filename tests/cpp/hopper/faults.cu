// SPDX-License-Identifier: Apache-2.0
// Kernels that end the CUDA context, for context_loss_test.cpp.
#include <cuda_runtime.h>

namespace flash3 {
namespace {

__global__ void trap() { __trap(); }
__global__ void write(int* to) { *to = 1; }

}  // namespace

void launch_trap();
void launch_illegal_write();

void launch_trap() { trap<<<1, 1>>>(); }
void launch_illegal_write() { write<<<1, 1>>>(reinterpret_cast<int*>(256)); }

}  // namespace flash3
