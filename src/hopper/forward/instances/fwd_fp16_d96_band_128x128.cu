// SPDX-License-Identifier: Apache-2.0
#include "hopper/forward/instance.cuh"

FLASH3_FORWARD_INSTANCE(kFloat16, 96, 96, true, 128)
