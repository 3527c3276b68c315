// SPDX-License-Identifier: Apache-2.0
// Where the input of flash3_merge is checked: params of the C interface in, a problem out.
#include "core/alias_checks.hpp"
#include "core/message.hpp"
#include "core/params.hpp"
#include "core/problem.hpp"

namespace flash3 {
namespace {

struct Fields {
  Field out_parts, lse_parts, out, lse, sink;
};

Fields fields_of(const flash3_merge_params& p) {
  return {{"out_parts", "[parts, rows, heads, head_dim_v]", 4, p.out_parts},
          {"lse_parts", "[parts, heads, rows]", 3, p.lse_parts},
          {"out", "[rows, heads, head_dim_v]", 3, p.out},
          {"lse", "[heads, rows]", 2, p.lse},
          {"sink", "[heads]", 1, p.sink}};
}

Status check_float32(const Field& f, const char* advice) {
  if (!is_given(f.tensor)) return check_form(f);  // which says so
  if (f.tensor.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(f.tensor.dtype),
                                    " but it must be 3 (float32)", advice));
  return check_form(f);
}

Status check_shapes(const Fields& f) {
  const Extent parts{f.out_parts, 0}, rows{f.out_parts, 1}, heads{f.out_parts, 2};
  const Extent dim{f.out_parts, 3};
  FLASH3_CHECK(check_same({f.lse_parts, 0}, parts, "number of parts"));
  FLASH3_CHECK(check_same({f.lse_parts, 1}, heads, "heads"));
  FLASH3_CHECK(check_same({f.lse_parts, 2}, rows, "rows"));
  FLASH3_CHECK(check_same({f.out, 0}, rows, "rows"));
  FLASH3_CHECK(check_same({f.out, 1}, heads, "heads"));
  FLASH3_CHECK(check_same({f.out, 2}, dim, "head_dim_v"));
  if (dim.size() < 1 || dim.size() > kMaxMergedDim)
    return invalid_argument(message(dim.name(), " = ", dim.size(),
                                    " but head_dim_v must be from 1 to ", kMaxMergedDim));
  if (rows.size() * heads.size() > kMaxSize)  // both are below 2^31
    return invalid_argument(message(rows.name(), " = ", rows.size(), " and ", heads.name(), " = ",
                                    heads.size(), "; rows * heads must be at most ", kMaxSize));
  if (!is_given(f.lse.tensor)) return {};
  FLASH3_CHECK(check_same({f.lse, 0}, heads, "heads"));
  return check_same({f.lse, 1}, rows, "rows");
}

Status check_tensors(const Fields& f, Pointers pointers) {
  FLASH3_CHECK(check_float32(f.out_parts, ""));
  FLASH3_CHECK(check_float32(f.lse_parts, ""));
  FLASH3_CHECK(check_form(f.out));
  const bool has_lse = is_given(f.lse.tensor);
  if (has_lse) FLASH3_CHECK(check_float32(f.lse, "; an lse that is not wanted is all zero"));
  FLASH3_CHECK(check_shapes(f));
  for (const Field& each : {f.out_parts, f.lse_parts, f.out}) {
    FLASH3_CHECK(check_strides(each));
    FLASH3_CHECK(check_data(each, pointers));
  }
  FLASH3_CHECK(check_no_overlap(f.out));
  if (is_given(f.sink.tensor)) FLASH3_CHECK(check_sink(f.sink, f.out, f.out, pointers));
  if (!has_lse) return {};
  FLASH3_CHECK(check_strides(f.lse));
  FLASH3_CHECK(check_no_overlap(f.lse));
  return check_data(f.lse, pointers);
}

}  // namespace

Status make_merge_problem(const flash3_merge_params* params, Pointers pointers,
                          MergeProblem* problem) {
  WholeParams<flash3_merge_params> whole;
  FLASH3_CHECK(whole.read(params));
  const auto& p = *whole;
  FLASH3_CHECK(check_tensors(fields_of(p), pointers));
  FLASH3_CHECK(check_context(p));
  MergeProblem made;
  made.out_dtype = p.out.dtype;
  made.out_parts = view(p.out_parts);
  made.lse_parts = lse_view(p.lse_parts);
  made.parts = made.out_parts.batch;
  made.rows = made.out_parts.seq;
  made.heads = made.out_parts.heads;
  made.head_dim_v = static_cast<int>(made.out_parts.dim);
  made.out = packed_view(p.out, 1, made.rows);
  made.lse = packed_lse_view(p.lse);
  made.sink = sink_view(p.sink);
  fill_context(p, &made);
  *problem = made;
  return check_aliases(p, made);
}

}  // namespace flash3
