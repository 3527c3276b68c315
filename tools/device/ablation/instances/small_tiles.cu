// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/instance.cuh"

FLASH3_ABLATION_INSTANCE(kSmallTiles, kThreeStageTileN)
