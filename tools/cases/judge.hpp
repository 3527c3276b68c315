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
//   dq, dk, dv: max |ref| · one rounding to the dtype, and for what cancels in their sums
//        2⁻²² · (1 + max |lse|) of what the largest element would be if nothing did
//        (ReferenceBackward): four float32 roundings of each term, and of the score that its
//        probability exp(score − lse) is made from.
// dsink is judged as they are, with the sum of its own terms; of fewer than 16 heads three times
// the naive error is allowed, as the worst of a few values says little.
// A gradient that the mask leaves nothing for must be exactly 0, and so must that of a token that
// does not count; other rows of ragged batches that hold no token are not looked at. Infinities and
// NaNs must stand where the oracle has them, and no element may keep its poison.
#pragma once

#include <string>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cases/tensors.hpp"
#include "cpu/attention_backward_ref.hpp"
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
  Score out, lse;           // of a forward case
  Score dq, dk, dv, dsink;  // of a backward case
  Score q, k, v;            // of what flash3_quantize makes
  std::string failure;      // the first thing that went wrong; "" if the case passed
  double oracle_seconds = 0, seconds = 0;
  bool passed() const { return failure.empty(); }
};

// What a row of a tensor must hold.
enum class RowRule : char { kValues, kZeros, kAnything };

// got and naive are host tensors, [batch, seq_q, heads_q, dim_v] and [batch, heads_q, seq_q], or
// packed ones. rules: of each row; empty: values.
Score judge_out(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules = {});

// Of a case on this backend. In FP8 the maximum of a row follows lazily on Hopper: the weight of
// the largest score is not exactly 1 then, and rounds as any other, by up to 2^-4 of itself. Single
// elements may be off by as much, but the RMSE may not.
Score judge_out(const Case& c, flash3_backend backend, const flash3_tensor& got,
                const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules);
Score judge_lse(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules = {});

// Of the rows of out and lse.
std::vector<RowRule> output_rules(const CaseSequences& sequences, int64_t batch);

struct GradientScores {
  Score dq, dk, dv, dsink;
  std::string failure() const;  // the first; "" if all passed
};

// Host tensors of a backward case; lse of `got` is read too.
GradientScores judge_gradients(const Case& c, const BackwardViews& got, const BackwardViews& naive,
                               const ReferenceBackward& ref);

}  // namespace flash3::cases
