#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX2
#include "cpu/kernels/attention-inl.hpp"

namespace flash3 {
const AttentionKernel kAvx2Kernel{scratch_bytes, run_task};
}
