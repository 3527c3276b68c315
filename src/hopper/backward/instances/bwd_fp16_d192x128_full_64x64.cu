// SPDX-License-Identifier: Apache-2.0
#include "hopper/backward/instance.cuh"

FLASH3_BACKWARD_INSTANCE(kFloat16, 192, 128, false, 64)
