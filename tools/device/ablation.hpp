// SPDX-License-Identifier: Apache-2.0
// The forward kernel with parts of its schedule switched off, to show what each part is worth: the
// ablation of the FlashAttention-3 paper (arXiv:2407.08608, section 4), on the paper's shape.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "flash3/flash3.h"

namespace flash3::device {

// The paper's shape, as a case; and as an FP8 one, which the paper has no figures of.
inline constexpr const char* kAblationCase = "fp16/b4/q8448/k8448/h16/d128/full";
inline constexpr const char* kFp8AblationCase =
    "e4m3/b4/q8448/k8448/h16/d128/full/blockscales/outfp16";

struct AblationVariant {
  std::string name, tile;      // "no GEMM-softmax overlap", "128x128"
  double paper_tflops;         // on the paper's H100; 0: the paper has no figure
  std::function<void()> call;  // enqueues one call; throws std::runtime_error if that fails
};

// The library's kernel first, then the others; each call writes params.out. params is a call on
// GPU memory in the head dim, dtypes and mask of one of these cases, contiguous; its contents are
// copied, what they point to is not. Throws std::runtime_error if a kernel cannot run it.
std::vector<AblationVariant> ablation_variants(const flash3_forward_params& params);

}  // namespace flash3::device
