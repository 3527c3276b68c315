// SPDX-License-Identifier: Apache-2.0
#include "core/rotary_checks.hpp"

#include "core/message.hpp"

namespace flash3 {

Status check_rotary_tables(const Field& cos, const Field& sin, const Field& of, const char* whose,
                           Pointers pointers) {
  for (const Field& f : {cos, sin}) {
    FLASH3_CHECK(check_form(f));
    const flash3_dtype dtype = f.tensor.dtype, other = of.tensor.dtype;
    if (dtype != FLASH3_FLOAT32 && dtype != other)
      return invalid_argument(message(f.name, ".dtype = ", dtype_name(dtype), " but ", of.name,
                                      ".dtype = ", dtype_name(other), "; it must be ",
                                      "float32 or the dtype of ", whose));
  }
  FLASH3_CHECK(check_same_dtype({cos, sin}));
  FLASH3_CHECK(check_same_shape(sin, cos));
  const Extent dim{of, of.ndim - 1};
  const int64_t pairs = cos.tensor.shape[1];
  if (pairs < 1 || 2 * pairs > dim.size())
    return invalid_argument(message(cos.part("shape", 1), " = ", pairs, " but ", dim.name(), " = ",
                                    dim.size(), "; it must be from 1 to half of head_dim"));
  for (const Field& f : {cos, sin}) {
    FLASH3_CHECK(check_strides(f));
    FLASH3_CHECK(check_data(f, pointers));
  }
  return {};
}

RotaryView rotary_view(const flash3_tensor& cos, const flash3_tensor& sin, bool interleaved) {
  const auto stride = [](const flash3_tensor& t) { return t.shape[0] > 1 ? t.stride[0] : 0; };
  return {.given = true,
          .cos = cos.data,
          .sin = sin.data,
          .dtype = cos.dtype,
          .interleaved = interleaved,
          .dim = static_cast<int>(2 * cos.shape[1]),
          .positions = cos.shape[0],
          .stride_cos = stride(cos),
          .stride_sin = stride(sin)};
}

}  // namespace flash3
