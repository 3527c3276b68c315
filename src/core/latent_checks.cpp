// SPDX-License-Identifier: Apache-2.0
#include "core/latent_checks.hpp"

#include "core/message.hpp"

namespace flash3 {
namespace {

// Whether q, or k and v, are FP8, or become it.
bool computes_fp8(const flash3_forward_params& p) {
  return is_fp8(p.q) || is_fp8(p.k) || p.compute == FLASH3_COMPUTE_FP8;
}

// Elements from the first one of k to the first one of v; false if not a whole number.
bool distance(const ForwardProblem& p, int64_t* elements) {
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.v.data) -
                                          reinterpret_cast<uintptr_t>(p.k.data));
  *elements = bytes / dtype_size(p.kv_dtype);
  return bytes % dtype_size(p.kv_dtype) == 0;
}

bool same_strides(const TensorView& a, const TensorView& b) {
  return a.stride_batch == b.stride_batch && a.stride_seq == b.stride_seq &&
         a.stride_head == b.stride_head;
}

}  // namespace

DimLimits limits_of(flash3_head_dims_of calls) {
  if (calls == FLASH3_HEAD_DIMS_OF_FORWARD) return {kMaxScoreDim, kMaxValueDim};
  return {kMaxHeadDim, kMaxHeadDim};
}

DimLimits forward_limits(const flash3_forward_params& p) {
  return limits_of(computes_fp8(p) ? FLASH3_HEAD_DIMS_OF_FORWARD_FP8 : FLASH3_HEAD_DIMS_OF_FORWARD);
}

Status check_qv(const flash3_forward_params& p, const Field& q, const Field& v, Pointers pointers) {
  if (!is_given(p.qv)) return {};
  const Field qv{
      "qv", q.ndim == 3 ? "[total_q, heads_q, head_dim_v]" : "[batch, seq_q, heads_q, head_dim_v]",
      q.ndim, p.qv};
  if (computes_fp8(p))
    return unsupported(message("qv is given but ",
                               p.compute == FLASH3_COMPUTE_FP8 ? "compute = 1 (fp8)"
                               : is_fp8(p.q)                   ? "q.dtype = float8_e4m3"
                                                               : "k.dtype = float8_e4m3",
                               "; with qv nothing may be FP8"));
  FLASH3_CHECK(check_form(qv));
  FLASH3_CHECK(check_same_dtype({q, qv}));
  for (int d = 0; d < q.ndim - 1; ++d)
    FLASH3_CHECK(check_same({qv, d}, {q, d},
                            d == q.ndim - 2             ? "heads_q"
                            : d == q.ndim - 3 && d == 0 ? "total_q"
                            : d == 0                    ? "batch size"
                                                        : "seq_q"));
  const Extent dim{q, q.ndim - 1}, dim_v{v, v.ndim - 1};
  FLASH3_CHECK(check_same({qv, q.ndim - 1}, dim_v, "head_dim_v"));
  if (dim.size() + dim_v.size() > kMaxScoreDim)
    return invalid_argument(message(dim.name(), " = ", dim.size(), " and ", dim_v.name(), " = ",
                                    dim_v.size(), " but with qv head_dim + head_dim_v must be at ",
                                    "most ", kMaxScoreDim));
  FLASH3_CHECK(check_strides(qv));
  return check_data(qv, pointers);
}

Status check_values_in_keys(const Field& k, const Field& v) {
  if (is_fp8(k.tensor))
    return unsupported(
        message("k_new is given but v_new is not, and k.dtype = ", dtype_name(k.tensor.dtype),
                "; an FP8 cache has values of its own, which v_new gives"));
  const Extent dim{k, k.ndim - 1}, dim_v{v, v.ndim - 1};
  if (dim_v.size() <= dim.size()) return {};
  return invalid_argument(message("k_new is given but v_new is not; keys are appended with their ",
                                  "values, unless v is a part of k, but ", dim_v.name(), " = ",
                                  dim_v.size(), " and ", dim.name(), " = ", dim.size()));
}

Status check_shared_rows(const ForwardProblem& p) {
  if (!p.append.given || p.append.has_v || !p.k.data || !p.v.data) return {};
  int64_t first = 0;
  const bool whole = distance(p, &first), even = whole && same_strides(p.k, p.v);
  if (!even || first < 0 || first + p.head_dim_v > p.head_dim)
    return invalid_argument(
        "k_new is given but v_new is not; keys are appended with their values, unless v is a part "
        "of the rows of k, with the same strides");
  if (!p.append.rotary.given || first >= p.append.rotary.dim) return {};
  return invalid_argument(message("rotary_cos.shape[1] = ", p.append.rotary.dim / 2,
                                  " but v begins at element ", first,
                                  " of the rows of k, and v_new is not given; the values must not ",
                                  "get the embedding of the keys"));
}

}  // namespace flash3
