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

// The paper's figure: `both` must not be above it on the paper's data.
inline constexpr double kFp8Bar = 9.1e-3;

struct Fp8Accuracy {
  double rms = 0;                // of the true out itself
  std::array<double, 4> rmse{};  // of kFp8Ways
  double plain = 0;              // of the 16-bit call
  int64_t rows = 0;              // of each head that were compared
  std::string failure;
};

// host: a forward call on 16-bit host tensors, neither ragged nor windowed. Of more than `most`
// rows of a head that many, evenly spread, are compared.
Fp8Accuracy measure_fp8_accuracy(const flash3_forward_params& host, Memory& memory,
                                 flash3_backend backend, int threads, int64_t most = 4096);

// Why `both` does not pass; "" if it does. on_paper_data: the bar counts.
std::string judge_fp8_accuracy(const Fp8Accuracy& accuracy, bool on_paper_data);

}  // namespace flash3::cases
