// SPDX-License-Identifier: Apache-2.0
#include "core/scale_checks.hpp"

#include "core/arithmetic.hpp"
#include "core/message.hpp"

namespace flash3 {
namespace {

// [batch, heads, blocks] against the tensor that it belongs to.
Status check_blocks(const Field& scale, const Field& of, const ScaleChecks& checks) {
  const Extent& batch = checks.batch;
  const bool packed = of.ndim == 3;
  const int64_t batches = scale.tensor.shape[0], blocks = scale.tensor.shape[2];
  const Extent seq{of, of.ndim - 3};
  if (packed && batches != 1)
    return invalid_argument(message(scale.part("shape", 0), " = ", batches, " but ", of.name,
                                    " is packed; the scales of its blocks are [1, heads, blocks]"));
  if (checks.elements)
    FLASH3_CHECK(check_same({scale, 0}, {of, 0}, checks.elements));
  else if (!packed)
    FLASH3_CHECK(check_same({scale, 0}, batch, "batch size"));
  FLASH3_CHECK(check_same({scale, 1}, {of, of.ndim - 2}, "heads"));
  const int64_t needed =
      packed ? seq.size() / kScaleBlock + batch.size() : ceil_div(seq.size(), kScaleBlock);
  if (blocks == needed) return {};
  return invalid_argument(message(
      scale.part("shape", 2), " = ", blocks, " but ", seq.name(), " = ", seq.size(),
      packed ? message(" and ", batch.name(), " = ", batch.size(), "; blocks must be ", needed,
                       ", total / ", kScaleBlock, " + batch, rounded down")
             : message("; blocks must be ", needed, checks.elements ? ", rows / " : ", seq / ",
                       kScaleBlock, ", rounded up")));
}

}  // namespace

Field scale_field(const char* name, const flash3_tensor& scale) {
  return {name,
          scale.ndim == 1   ? "[1]"
          : scale.ndim == 2 ? "[batch, heads_k]"
                            : "[batch, heads, blocks]",
          scale.ndim, scale};
}

Status check_scale(const Field& scale, const Field& of, const ScaleChecks& checks) {
  const flash3_tensor& t = scale.tensor;
  if (t.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(scale.name, ".dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 3 (float32)"));
  if (t.ndim < 1 || t.ndim > 3)
    return invalid_argument(message(scale.name, ".ndim = ", t.ndim,
                                    " but it must be 1, [1], 2, [batch, heads_k], or 3, "
                                    "[batch, heads, blocks]"));
  FLASH3_CHECK(check_sizes(scale));
  if (t.ndim == 1 && t.shape[0] != 1)
    return invalid_argument(
        message(scale.part("shape", 0), " = ", t.shape[0],
                " but scales of one dimension must be [1], one for the tensor"));
  if (t.ndim == 2) {
    FLASH3_CHECK(check_same({scale, 0}, checks.batch, "batch size"));
    FLASH3_CHECK(check_same({scale, 1}, checks.heads_k, "heads_k"));
  }
  if (t.ndim == 3) FLASH3_CHECK(check_blocks(scale, of, checks));
  FLASH3_CHECK(check_strides(scale));
  return check_data(scale, checks.pointers);
}

Status check_scale_of(const flash3_tensor& scale, const char* name, const Field& of,
                      const ScaleChecks& checks) {
  if (!is_given(scale)) return {};
  if (!is_fp8(of.tensor))
    return invalid_argument(
        message(name, " is given but ", of.name, ".dtype = ", dtype_name(of.tensor.dtype),
                "; only FP8 tensors have scales, ", "and one that is not given is all zero"));
  return check_scale(scale_field(name, scale), of, checks);
}

ScaleView scale_view(const flash3_tensor& t, Index heads) {
  ScaleView view;
  if (!is_given(t)) return view;
  const auto stride = [&](int d) { return d < t.ndim && t.shape[d] > 1 ? t.stride[d] : 0; };
  view.data = static_cast<float*>(t.data);
  view.kind = t.ndim == 1 ? ScaleKind::kTensor : t.ndim == 2 ? ScaleKind::kHead : ScaleKind::kBlock;
  if (view.kind == ScaleKind::kTensor) return view;
  view.stride_batch = stride(0);
  view.stride_head = stride(1);
  view.stride_block = stride(2);
  if (view.kind == ScaleKind::kHead) view.heads_per_scale = heads > 0 ? heads : 1;
  return view;
}

}  // namespace flash3
