// SPDX-License-Identifier: Apache-2.0
// Kernels that end the CUDA context.
#pragma once

namespace flash3 {

void launch_trap();
void launch_illegal_write();

}  // namespace flash3
