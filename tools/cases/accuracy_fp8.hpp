// SPDX-License-Identifier: Apache-2.0
// The FP8 half of the accuracy experiment (FlashAttention-3, table 3): the root mean square error
// of out against float64 of the tensors before they became FP8. The paper has 2.4e-2 with a scale
// for each tensor and 9.1e-3 with scales for blocks and a rotation. Here the same data with each of
// the two by itself too.
#pragma once

#include <array>
#include <string>

#include "cases/case.hpp"
#include "cases/memory.hpp"

namespace flash3::cases {

struct Fp8Way {
  const char* name;
  Scales scales;
  bool rotate;
};
inline constexpr std::array<Fp8Way, 4> kFp8Ways = {{{"tensor", Scales::kTensor, false},
                                                    {"blocks", Scales::kBlock, false},
                                                    {"rotated", Scales::kTensor, true},
                                                    {"both", Scales::kBlock, true}}};

// The paper's figure. It does not tell the sizes that this belongs to, and the error of FP8 goes
// with the size of out, which is larger in rows that see few keys and for small head dims, whose
// scores spread more: the bar is put to head dims from 128 on without a mask.
inline constexpr double kFp8Bar = 9.1e-3;

// For every case: RMSE of `both` beside the RMS of out itself. Three roundings to 3 bits of
// mantissa (scores, weights, v) of 2.6 % each make 5 %.
inline constexpr double kFp8RelativeBar = 0.08;

struct Fp8Accuracy {
  double rms = 0;                // of the true out itself
  std::array<double, 4> rmse{};  // of kFp8Ways
  double half = 0;               // of the 16-bit call
  double plain = 0;              // attention_plain_fp8 with scales by tensors
  int64_t rows = 0;              // of each head that were compared
  std::string failure;
};

// host: a forward call on 16-bit host tensors, neither ragged nor windowed. Where heads have more
// than `most` rows 64, evenly spread, are compared.
inline constexpr int64_t kAllRows = 4096;
Fp8Accuracy measure_fp8_accuracy(const flash3_forward_params& host, Memory& memory,
                                 flash3_backend backend, int threads, int64_t most = kAllRows);

// What is asked of `both`: nothing; to be no worse than `tensor` and within kFp8RelativeBar;
// kFp8Bar too.
enum class Fp8Demand { kNone, kOwn, kPaper };

// Why it does not pass; "" if it does.
std::string check_fp8_accuracy(const Fp8Accuracy& accuracy, Fp8Demand demand);

}  // namespace flash3::cases
