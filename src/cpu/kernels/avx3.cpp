#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include "cpu/kernels/attention-inl.hpp"

namespace flash3 {
const AttentionKernel kAvx3Kernel{scratch_bytes, run_task};
}
