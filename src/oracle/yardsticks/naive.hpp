// SPDX-License-Identifier: Apache-2.0
// Attention as a plain framework implementation computes it, in the tensors' own precision: the
// yardstick of the accuracy experiment and the baseline of the CPU benchmark. It is no oracle.
//
// All read and write host memory, with any strides. num_threads 0: all cores.
#pragma once

#include "core/problem.hpp"
#include "oracle/mask_pairs.hpp"

namespace flash3 {

// Writes problem.out and, if they have memory, problem.lse and problem.max_logits. Scores and
// probabilities are materialised in the problem's dtype, sums are float32. An FP8 problem rounds
// exp(score − max) · 256 to e4m3, as the library does, and for Hopper sums as its tensor cores do
// (attention_naive.cpp). mask: as attention_ref() takes it.
void attention_naive(const ForwardProblem& problem, int num_threads = 0,
                     const MaskPairs* mask = nullptr);

// The same of an FP8 problem, but with probabilities rounded to e4m3 as they are: what a framework
// would do.
void attention_plain_fp8(const ForwardProblem& problem, int num_threads = 0);

// The same for a problem that computes in FP8: the CPU backend brings q, k and v to FP8, then the
// naive arithmetic runs on those. Not quantize_ref: where the largest element of a block lies
// within float32's rounding of a power of two times 448, it takes twice the scale or half of it,
// and errors of other roundings say nothing of each other. (The quantizer itself is held against
// quantize_ref.)
void attention_naive_fp8(ForwardProblem problem, int num_threads = 0);

// Writes dq, dk, dv and dsink. Scores, probabilities and the gradients of both are rounded to the
// problem's dtype; delta is the row sum of dout ∘ out with out as given; sums are float32. mask: as
// attention_ref() takes it.
void attention_backward_naive(const BackwardProblem& problem, int num_threads = 0,
                              const MaskPairs* mask = nullptr);

}  // namespace flash3
