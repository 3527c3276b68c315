// What the compiler may assume anyway.
#include "cpu/kernels/attention-inl.hpp"

namespace flash3 {
const AttentionKernel kBaselineKernel{scratch_bytes, run_task};
}
