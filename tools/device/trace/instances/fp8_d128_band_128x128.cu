// SPDX-License-Identifier: Apache-2.0
#include "device/trace/instance.cuh"

FLASH3_TRACED_INSTANCE(kE4m3, 128, true, 128, 128)
