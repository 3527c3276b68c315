// SPDX-License-Identifier: Apache-2.0
#include "hopper/backward/instance.cuh"

FLASH3_BACKWARD_SOFTCAP_INSTANCE(kFloat16, 256, 64)
