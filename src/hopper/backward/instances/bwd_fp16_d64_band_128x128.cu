// SPDX-License-Identifier: Apache-2.0
#include "hopper/backward/instance.cuh"

FLASH3_BACKWARD_INSTANCE(kFloat16, 64, 64, true, 128)
