// Guarded tensors and their contents. A tensor lies between two guard regions; guards and the gaps
// that its strides leave are poison (all bits one: a NaN in every dtype). A kernel that reads there
// computes NaN, one that writes there is caught, and an output starts as poison too, so that an
// element never written shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace flash3::cases {

// Host bytes with a tensor inside; view.data points into bytes.
struct GuardedTensor {
  std::vector<std::byte> bytes;
  size_t offset = 0;  // of view.data
  flash3_tensor view{};

  // The same view in a copy of bytes that lives at base.
  flash3_tensor at(void* base) const;
  // Every byte as it was before anything was written.
  void poison();
  // Which gap or guard byte has changed since the poisoning, in words; "" if none has.
  std::string damage() const;
};

GuardedTensor make_tensor(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads,
                          int64_t dim, Layout layout);
GuardedTensor make_lse(int64_t batch, int64_t heads, int64_t seq, Layout layout);
int64_t element_size(flash3_dtype dtype);

// Elements from the first to just behind the last one, gaps included.
int64_t span_of(const flash3_tensor& t);

// Fills all elements (numbered in [batch, seq, heads, dim] order, so that the layout does not
// change the values) with N(0, 1) or outliers; value i depends on seed and i alone.
void fill_random(const flash3_tensor& t, Distribution distribution, uint64_t seed);

// Value i of the standard normal sequence named by seed.
float normal_value(uint64_t seed, uint64_t i);

// count values of N(0, 1) as dtype, on all cores: input for benchmarks.
void fill_normal(void* data, flash3_dtype dtype, int64_t count, uint64_t seed);

struct ForwardTensors {
  GuardedTensor q, k, v, out, lse;  // lse is empty if not wanted
};

// Inputs filled after the case's seed and distribution, outputs poisoned.
ForwardTensors make_forward_tensors(const Case& c);

// The call on these views, without workspace, stream or backend.
flash3_forward_params make_params(const Case& c, const flash3_tensor& q, const flash3_tensor& k,
                                  const flash3_tensor& v, const flash3_tensor& out,
                                  const flash3_tensor& lse);

// The same without data, for questions.
flash3_forward_params make_question(const Case& c);

}  // namespace flash3::cases
