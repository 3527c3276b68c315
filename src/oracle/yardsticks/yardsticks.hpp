// SPDX-License-Identifier: Apache-2.0
// What errors are measured with: a plain implementation, and bounds.
//
// Attention as a plain framework implementation computes it, in the tensors' own precision: the
// yardstick of the accuracy experiment and the baseline of the CPU benchmark. It is no oracle.
//
// All read and write host memory, with any strides. num_threads 0: all cores.
#pragma once

#include <cmath>
#include <cstdint>

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

// How far an element of a right result may lie from the float64 oracle: a forward error bound in
// the sense of Higham, Accuracy and Stability of Numerical Algorithms, ch. 3, made of what the
// kernels round. This is its only place; the oracles add up the sums of magnitudes that it needs.
//
// u is the unit roundoff of q's dtype, in which P and dS enter their products, and ε = 2⁻²⁴ that of
// float32, in which everything else is computed. A number x rounds by at most u · (|x| + η), where
// η is the dtype's smallest normal number.
//
// A sum of n products in float32 errs by γ(n) · Σ|products|. Roundings to nearest are random:
// √n · ε is six standard deviations of n of them that never cancel (Higham & Mary, SISC 2019).
// Tensor cores cut off instead, once for 16 products, by at most 2ε of the sum: n/8 · ε more.
//
// Scores. With T = softmax_scale · |q| · max|k| (Euclidean norms; keys that the row sees), which no
// score exceeds,
//
//   |Δs| ≤ E = γ(head_dim) · T + 8ε · (T + A + |sink|) + cap · τ
//
// (with qv, q is both parts side by side, and so is k; A is the most that is added to a score)
// for the sum, for scale · log₂e, the shift by the row's maximum and the argument of exp2, and for
// the tanh of a softcap, whose slope is at most 1: it errs by τ. Hopper's polynomial has τ = 2⁻¹⁷·⁵
// (cuda/device/score/softcap.hpp) and may take up to 2⁻²⁸ of the largest weight from each of the
// others.
//
// The largest score of a row errs by E without the sink, which is none; that of a head by what lies
// between it and the largest score + E of its rows.
//
// lse = m + log l:  E for the scores, γ(keys) and 16ε for l and the 2-ulp exp2 and log2 in it, 4ε
// of |lse| and log(keys) for the sum and the change of base. The sink is one more key.
//
// out = Σ p·v / l.  p and l err by E and some ε each, p is rounded to u, sums err by γ(keys), and
// the result is rounded to the u of out. What is rounded is exp(s − m), so that η there is p_max ·
// η:
//
//   |Δout| ≤ (u + 2E + 2γ(keys) + 16ε) · Σ (p + p_max·η)·|v|  +  u_out · (|out| + η_out)
//
// What is less than float32's smallest normal number, 2⁻¹²⁶, may become 0: the largest weight of a
// row, beside a sink that is far above its scores, and the others with it; and out.
//
// With dropout the sums are those of the kept weights, each divided by 1 − its p, and all that they
// leave of a row may be as small.
//
// Gradients. lse is an input in float32 there, so that p = exp(s − lse) errs by more than in the
// forward, where a common error cancels:  Ep = E + 4ε·|lse| + 8ε.  out is an input rounded to u:
//
//   delta = Σ dout·out − dlse   errs by  Δδ = (u + γ(head_dim_v)) · Σ|dout|·(|out| + η) + 4ε·D
//   dp = dout·v                 errs by  Δdp = (γ(head_dim_v) + 4ε) · |dout|·max|v|
//   ds = p·(dp − delta)·slope   errs by  Ep·|ds| + p·slope·(Δdp + Δδ) + p·2τ·(|dout|·max|v| + D)
//
// with D = Σ|dout||out| + |dlse|. The last is that of the softcap's slope 1 − tanh², and without
// one there is no such term. Then ds is rounded to u, and summed up:
//
//   |Δdq| ≤ softmax_scale · Σ_keys W·|k| + u·(|dq| + η),    dk likewise over rows, with |q|
//           W = (u + Ep + 8ε + γ(n))·|ds| + u·η + p·(slope·(Δdp + Δδ) + 2τ·(|dout|·max|v| + D))
//   |Δdv| ≤ Σ_rows ((u + Ep + 8ε + γ(n))·p + u·η)·|dout| + u·(|dv| + η)
//   |Δdsink| ≤ Σ_rows p_sink·((Es + 8ε + γ(n))·|delta| + Δδ) + u_sink·(|dsink| + η)
//
// n is the number of terms, those of all query heads of a KV head for dk and dv, and
// Es = 4ε·(|sink| + |lse|). Products of two errors are some u of the bound: kSecondOrder. Less than
// 2⁻¹²⁶ may be, and then become 0, a p, whose ds errs by as much of |dp − delta|·slope, a ds,
// p_sink and its product, and each of the n products, before softmax_scale.
//
// FP8. A weight in e4m3 errs by up to u = 2⁻⁴ of itself, and out, if one key has all the weight, by
// as much of v. Over several keys an error has a part of its own for each, u·√Σ(p·v)² together, and
// one that all share, u·|out|: equal weights round alike. u·√(Σ(p·v)² + out²) bounds the root mean
// square over a block of rows; so do the lse's. (cases/check.hpp has the rule.) Hopper's FP8 sums
// keep 13 bits of fraction: 2⁻¹³ · T more in E.
//
// FP8 keys and values under a q of 16 bits: q, k and v enter the products as they are. Weights
// round to float16, or where there are more than 16 queries perhaps to q's dtype: u is the larger
// of the two, η that of float16. The scale of a key rounds once more: 2ε · T more in E.

inline constexpr double kFloat32Roundoff = 0x1p-24;  // ε
inline constexpr double kFloat32Smallest = 0x1p-126;
inline constexpr double kSecondOrder = 1.05;
inline constexpr int64_t kFewQueries = 16;  // of a sequence that decodes

// What a number of this size may lose in float32, as it may become 0; 0 loses nothing.
inline double underflow(double size) {
  return size > 0 && size < kFloat32Smallest ? kFloat32Smallest : 0;
}

// What a number of the dtype loses when it is rounded: roundoff · (|x| + smallest).
struct Precision {
  double roundoff = 0, smallest = 0;
  double error(double x) const { return kSecondOrder * roundoff * (std::abs(x) + smallest); }
};

inline Precision precision_of(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16: return {0x1p-11, 0x1p-14};
    case FLASH3_BFLOAT16: return {0x1p-8, 0x1p-126};
    case FLASH3_FLOAT8_E4M3: return {0x1p-4, 0x1p-12};  // of weights times 2⁶
    default: return {kFloat32Roundoff, 0x1p-126};
  }
}

// The precision of weights where keys are FP8 and q has 16 bits.
inline Precision widened_precision(const Problem& p) {
  Precision precision = precision_of(FLASH3_FLOAT16);
  if (p.seq_q > kFewQueries)
    precision.roundoff = std::fmax(precision.roundoff, precision_of(p.dtype).roundoff);
  return precision;
}

// The part of the bound that depends on the call alone, and on a row.
class ErrorBound {
 public:
  explicit ErrorBound(const Problem& p, bool fp8 = false)
      : fp8_(fp8),
        hopper_(p.backend == FLASH3_BACKEND_HOPPER),
        tensor_cores_(p.dtype != FLASH3_FLOAT32),
        of_dtype_(fp8               ? precision_of(FLASH3_FLOAT8_E4M3)
                  : p.widens_keys() ? widened_precision(p)
                                    : precision_of(p.dtype)),
        tanh_(p.softcap == 0 ? 0
              : hopper_      ? 0x1p-17 * 0.75
                             : 8 * kFloat32Roundoff),
        cap_(p.softcap),
        of_score_(sum(p.score_dim()) + (p.widens_keys() ? 10 : 8) * kFloat32Roundoff +
                  (fp8 && hopper_ ? 0x1p-13 : 0)) {}

  bool fp8() const { return fp8_; }
  Precision of_dtype() const { return of_dtype_; }
  double tanh() const { return tanh_; }

  // γ
  double sum(double terms) const {
    return (std::sqrt(terms) + 2 + (tensor_cores_ ? terms / 8 : 0)) * kFloat32Roundoff;
  }
  // E, of a row with this T, A, number of keys and sink.
  double score(double largest, double added, double keys, double sink) const {
    const double capped = tanh_ * cap_ + (hopper_ && cap_ > 0 ? keys * 0x1p-28 : 0);
    return of_score_ * largest + capped +
           8 * kFloat32Roundoff * (added + (std::isfinite(sink) ? std::abs(sink) : 0));
  }
  double lse(double score_error, double lse, double keys) const {
    return score_error + sum(keys) +
           kFloat32Roundoff * (16 + 4 * std::abs(lse) + 4 * std::log(keys + 1));
  }
  // The factor of the sum of magnitudes for out, without the rounding of out itself.
  double out(double score_error, double keys) const {
    return kSecondOrder * of_dtype_.roundoff + 2 * score_error + 2 * sum(keys) +
           16 * kFloat32Roundoff;
  }
  // Ep
  double probability(double score_error, double lse) const {
    return score_error + kFloat32Roundoff * (8 + 4 * std::abs(lse));
  }
  // The error of P or dS in a product, relative to itself.
  double weight(double probability_error, double terms) const {
    return kSecondOrder * of_dtype_.roundoff + probability_error + 8 * kFloat32Roundoff +
           sum(terms);
  }

 private:
  const bool fp8_, hopper_, tensor_cores_;
  const Precision of_dtype_;
  const double tanh_, cap_, of_score_;
};

}  // namespace flash3
