// When an output is right. Per call:
//
//   max |got − ref|  ≤  2 · max |naive − ref| + ε
//
// ref is the float64 oracle, naive the plain implementation in the tensors' own precision. Its
// error may be small by luck, so ε allows what no implementation can avoid:
//   out: max |ref| · (one rounding to the dtype + 2⁻²⁴ · max |lse|). The second term is one float32
//        rounding of the largest score (lse is its size), which moves a probability by that factor;
//        it matters for float32 tensors alone.
//   lse: 2⁻¹⁷ of the largest |lse|, at least of 1: hardware exp2 and log2 err by a few float32
//   ulps.
// Infinities and NaNs must stand where the oracle has them, and no element may keep its poison.
#pragma once

#include <string>

#include "cases/tensors.hpp"
#include "cpu/attention_ref.hpp"

namespace flash3::cases {

struct Score {
  double error = 0;    // max |got − ref| over finite elements
  double naive = 0;    // max |naive − ref|
  double allowed = 0;  // 2 · naive + ε
  double rmse = 0;     // √ mean (got − ref)² over finite elements
  double naive_rmse = 0;
  std::string failure;  // "" if passed, else what and where
};

struct Verdict {
  Score out, lse;
  std::string failure;       // the first thing that went wrong; "" if the case passed
  bool unsupported = false;  // the backend said no, and why is in failure
  double oracle_seconds = 0, seconds = 0;
  bool passed() const { return failure.empty(); }
};

// got and naive are host tensors, [batch, seq_q, heads_q, dim_v] or [batch, heads_q, seq_q].
Score judge_out(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref);
Score judge_lse(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref);

}  // namespace flash3::cases
