// The case lists of flash3 bench.
#pragma once

#include <string>
#include <vector>

#include "cases/case.hpp"

namespace flash3::cli {

// "forward": the FlashAttention papers' sweep (a fixed number of tokens, hidden size 2048 on a GPU,
// head_dim 64, 128, 256, full and causal, sequence lengths 512 … 16k); "backward": the backward of
// the same; "quick": one length of it;
// "window": one long causal sequence (32k on a GPU) under windows of 128 keys, twice as many, …,
// half the sequence, and none. On the CPU tokens and hidden size are smaller. Throws UsageError for
// another name.
std::vector<cases::Case> bench_suite(const std::string& name, flash3_backend backend,
                                     flash3_dtype dtype = FLASH3_BFLOAT16);

}  // namespace flash3::cli
