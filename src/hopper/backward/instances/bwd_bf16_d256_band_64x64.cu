#include "hopper/backward/instance.cuh"

FLASH3_BACKWARD_INSTANCE(kBFloat16, 256, 256, true, 64)
