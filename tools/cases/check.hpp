// SPDX-License-Identifier: Apache-2.0
// When an output is right: every element by itself must lie within its error bound, which the
// float64 oracle hands out beside it (oracle/yardsticks/yardsticks.hpp derives it),
//
//   |got − ref|  ≤  bound
//
// In FP8 single weights round by more than a small element is worth; there the root mean square
// over each block of 128 rows of a head, of N elements, is bounded instead,
//
//   RMS(got − ref)  ≤  (1 + 2/√N) · RMS(bound) + 1.5 · RMS(naive − ref)
//
// where naive is the plain implementation (attention_naive). It has a part in this where rounding
// was not all that happened: for calls that bring 16-bit tensors to FP8 themselves, and for the
// lse, whose sums are those of FP8 tensor cores.
//
// A gradient that the mask leaves nothing for must be exactly 0, and so must that of a token that
// does not count; other rows of ragged batches that hold no token are looked at only where the call
// fills them. Infinities and NaNs must stand where the oracle has them, and no element may keep the
// fill pattern.
//
// Results other than out and lse, those of FP8 calls too, are held to the first rule. For calls
// that bring 16-bit tensors to FP8 themselves it is one of a block of one element, N = 1.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cases/backward_tensors.hpp"
#include "cases/tensors.hpp"
#include "oracle/attention_ref.hpp"

namespace flash3::cases {

// The check of one tensor.
struct TensorCheck {
  double fraction = 0;    // the worst element's error, or in FP8 the worst block's, of its bound
  double error = 0;       // max |got − ref| over finite elements
  double rmse = 0;        // √ mean (got − ref)² over finite elements
  double naive_rmse = 0;  // the same of naive, where it was computed
  std::string failure;    // "" if passed, else what and where
};

struct CheckResult {
  TensorCheck out, lse;                                    // of a forward case
  std::vector<std::pair<std::string, TensorCheck>> added;  // and what else its call writes, by name
  TensorCheck dq, dk, dv, dsink;                           // of a backward case
  TensorCheck q, k, v;                                     // of what flash3_quantize makes
  std::string failure;  // the first thing that went wrong; "" if the case passed
  double oracle_seconds = 0, seconds = 0;
  bool passed() const { return failure.empty(); }
};

// What a row of a tensor must hold.
enum class RowRule : char {
  kValues,
  kZeros,
  kFilled,  // 0, or −∞ of lse
  kAnything
};

// Host tensors, [batch, seq_q, heads_q, dim_v] and [batch, heads_q, seq_q], or packed ones. rules:
// of each row; empty: values. naive: a tensor without data if there is none.
TensorCheck check_out(const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules = {}, const flash3_tensor& naive = {});
TensorCheck check_lse(const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules = {});

// What a forward case must have come to; naive: without data if it was not computed.
struct ExpectedForward {
  ReferenceForward ref;
  GuardedTensor naive_out, naive_lse;
  ExtraTensors naive_extra;
};

// The checks of all that a forward call has written: `got` names each tensor by its field.
void check_forward(const Case& c,
                   const std::vector<std::pair<std::string_view, const GuardedTensor*>>& got,
                   const ExpectedForward& expected, CheckResult* result);

// The check of a case, in FP8 or not. naive: where needs_naive(c).
TensorCheck check_out(const Case& c, const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules, const flash3_tensor& naive);
TensorCheck check_lse(const Case& c, const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules, const flash3_tensor& naive);
bool needs_naive(const Case& c);

// The rules of the rows of out and lse.
std::vector<RowRule> output_rules(const Case& c, const CaseSequences& sequences);

struct GradientChecks {
  TensorCheck dq, dk, dv, dsink;
  std::vector<std::pair<std::string, TensorCheck>> added;  // by name
  std::string failure() const;                             // the first; "" if all passed
};

// Host tensors of a backward case.
GradientChecks check_gradients(const Case& c, const BackwardViews& got,
                               const ReferenceBackward& ref);

}  // namespace flash3::cases
