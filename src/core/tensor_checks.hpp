// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for tensors, one function each: what core/problem checks a call with.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/problem.hpp"

namespace flash3 {

inline constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

// A tensor of the call, with what messages say about it.
struct Field {
  const char* name;
  const char* layout;
  int ndim;  // 4: [batch, seq, heads, dim]; 3: that, packed [total, heads, dim], or the rows of one
  const flash3_tensor& tensor;
  const char* packed_by = nullptr;  // what a call has that packs it, with one dimension less

  std::string part(const char* member, int dim) const;
  bool has_no_elements() const;
};

// A size that others must agree with: a dimension of a tensor, less `extra` elements that are there
// besides (cu_seqlens has one more than there are sequences).
struct Extent {
  const Field& field;
  int dim;
  int extra = 0;

  int64_t size() const { return field.tensor.shape[dim] - extra; }
  std::string name() const;
};

// False for a zero-initialised tensor: not given.
inline bool is_given(const flash3_tensor& t) {
  int64_t any = t.dtype | t.ndim;
  for (int d = 0; d < 4; ++d) any |= t.shape[d] | t.stride[d];
  return t.data || any != 0;
}

inline bool is_fp8(const flash3_tensor& tensor) { return tensor.dtype == FLASH3_FLOAT8_E4M3; }

// dtype, ndim and each size by itself; check_sizes() leaves the dtype out.
enum class Dtypes { kFloat, kFloatOrFp8, kFp8 };
Status check_form(const Field& field, Dtypes dtypes = Dtypes::kFloat);
Status check_sizes(const Field& field);

// All have the dtype of the first.
Status check_same_dtype(std::initializer_list<Field> fields);

// "…; b and a must have the same `what`".
Status check_same(const Extent& a, const Extent& b, const char* what);

// What q, k, v and out say of each other's shapes, and the limits of head dims and heads. Packed
// tensors have their batch size elsewhere. `elements`: what the first dimension of k and v counts
// if it is not the batch ("pages").
struct DimLimits {
  int64_t qk, v;
};
Status check_shapes(const Field& q, const Field& k, const Field& v, const Field& out,
                    const Extent& batch_q, const Extent& batch_k, const DimLimits& limits,
                    const char* elements = nullptr);

Status check_same_shape(const Field& field, const Field& other);

// The stride of a dimension with fewer than two elements is never used, so it may be anything.
// any_last: that of the last dimension need not be 1.
Status check_strides(const Field& field, bool any_last = false);

// For outputs: no two elements share memory.
Status check_no_overlap(const Field& field);

Status check_data(const Field& field, Pointers pointers);

// dtype, ndim, shape and strides of a [batch, heads_q, seq_q] or [heads_q, total_q] float32 tensor.
// `advice` ends the sentence of a wrong dtype.
Status check_rows(const Field& rows, const Field& q, const char* advice);

TensorView view(const flash3_tensor& tensor);
TensorView packed_view(const flash3_tensor& tensor, int64_t batch, int64_t seq);
LseView lse_view(const flash3_tensor& tensor);
LseView packed_lse_view(const flash3_tensor& tensor);
SinkView sink_view(const flash3_tensor& tensor);

}  // namespace flash3
