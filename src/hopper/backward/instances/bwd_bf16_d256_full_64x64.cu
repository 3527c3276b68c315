// SPDX-License-Identifier: Apache-2.0
#include "hopper/backward/instance.cuh"

FLASH3_BACKWARD_INSTANCE(kBFloat16, 256, 256, false, 64)
