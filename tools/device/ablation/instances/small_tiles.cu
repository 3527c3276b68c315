#include "device/ablation/instance.cuh"

FLASH3_ABLATION_INSTANCE(kSmallTiles, kThreeStageTileN)
