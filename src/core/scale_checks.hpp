// SPDX-License-Identifier: Apache-2.0
// The rules of flash3.h for the scales of FP8 tensors, as core/tensor_checks has for the rest.
#pragma once

#include <cstdint>

#include "core/tensor_checks.hpp"

namespace flash3 {

// What scales are checked against besides the tensor that they belong to.
struct ScaleChecks {
  Extent batch;
  Extent heads_k;
  Pointers pointers;
  const char* elements = nullptr;  // what a tensor's first dimension counts if not the batch
};

// A scale tensor, whose dimensions its ndim tells.
Field scale_field(const char* name, const flash3_tensor& scale);

// dtype, shape, strides and memory of the scales of `of`.
Status check_scale(const Field& scale, const Field& of, const ScaleChecks& checks);

// The scales of a tensor that is read; they may be not given, and must be if it is not FP8.
Status check_scale_of(const flash3_tensor& scale, const char* name, const Field& of,
                      const ScaleChecks& checks);

// heads: those of the tensor that share a scale where there is one for each KV head.
ScaleView scale_view(const flash3_tensor& scale, Index heads);

}  // namespace flash3
