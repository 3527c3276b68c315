// SPDX-License-Identifier: Apache-2.0
// A simulation of the sums that Hopper's tensor cores make of FP8 products.
#pragma once

namespace flash3 {

// 32 bytes of numbers.
template <class Real>
struct Lanes {
  static constexpr int kCount = 32 / sizeof(Real);
  typedef Real Vector __attribute__((vector_size(32)));
  Vector x = {};
};

// A sum as Hopper's tensor cores make it of FP8 products: 32 of them and what there is already are
// brought to the exponent of the largest, of which 13 bits of fraction stay, the rest is cut off
// (DeepSeek-V3, arXiv:2412.19437, §3.3.2).
struct TensorCoreSum {
  using Vector = Lanes<float>;
  static constexpr int kTerms = 32;

  Vector sum, terms[kTerms] = {};
  int count = 0;

  void add(const Vector& term) {
    terms[count++] = term;
    if (count == kTerms) fold();
  }
  void fold() {
    typedef int Int __attribute__((vector_size(32)));
    typedef float Float __attribute__((vector_size(32)));
    Int largest = Int(sum.x) & 0x7FFFFFFF;  // ordered as sizes are
    for (int i = 0; i < count; ++i) {
      const Int size = Int(terms[i].x) & 0x7FFFFFFF;
      largest = size > largest ? size : largest;
    }
    bool finite = true;
    for (int lane = 0; lane < Vector::kCount; ++lane) finite &= largest[lane] < 0x7F800000;
    if (!finite) {
      for (int i = 0; i < count; ++i) sum.x += terms[i].x;
    } else {
      // Below 2^-100 nothing is cut off: the reciprocal must be a float too.
      const Int exponent = largest & 0x7F800000, least = Int{} + (27 << 23);
      const Int step = (exponent > least ? exponent : least) - (13 << 23);
      const Float per_step = Float((254 << 23) - step);
      Int steps = __builtin_convertvector(sum.x * per_step, Int);
      for (int i = 0; i < count; ++i) steps += __builtin_convertvector(terms[i].x * per_step, Int);
      sum.x = __builtin_convertvector(steps, Float) * Float(step);
    }
    count = 0;
  }
};

}  // namespace flash3
