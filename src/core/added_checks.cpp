// SPDX-License-Identifier: Apache-2.0
#include "core/added_checks.hpp"

namespace flash3 {
namespace {

// A tensor as one of the shapes that it may have.
Field field_of(const char* name, std::string_view shape, const flash3_tensor& t,
               const Layout& layout) {
  if (shape == "heads") return {name, "[heads_q]", 1, t};
  if (shape == "batch_heads") return {name, "[batch, heads_q]", 2, t};
  if (shape == "state") return {name, "[2]", 1, t};
  return layout.lse(name, t);
}

Status check_shape(const Field& field, std::string_view shape, const Field& q,
                   const Extent& batch) {
  const Extent heads{q, q.ndim - 2};
  FLASH3_CHECK(check_sizes(field));
  if (shape == "rows") return check_rows(field, q, "");
  if (shape == "state") {
    if (field.tensor.shape[0] == 2) return check_strides(field);
    return invalid_argument(message(field.part("shape", 0), " = ", field.tensor.shape[0],
                                    " but it must be 2: a seed and an offset"));
  }
  if (shape == "batch_heads") FLASH3_CHECK(check_same({field, 0}, batch, "batch size"));
  FLASH3_CHECK(check_same({field, field.ndim - 1}, heads, "heads_q"));
  return check_strides(field);
}

}  // namespace

Status check_added_tensor(const ParamField& about, const flash3_tensor& t, const Field& q,
                          const Extent& batch, const Layout& layout, Pointers pointers) {
  const char* const name = about.name.data();
  if (t.dtype != about.dtype)
    return invalid_argument(message(name, ".dtype = ", dtype_name(t.dtype), " but it must be ",
                                    dtype_name(about.dtype), "; a ", name, " that is not ",
                                    about.is_written ? "wanted" : "given", " is all zero"));
  std::string shapes;
  for (int64_t i = 0; i < count_words(about.shapes); ++i) {
    const std::string_view shape = word_at(about.shapes, i);
    const Field field = field_of(name, shape, t, layout);
    append(shapes, message(i > 0 ? " or " : "", field.ndim, ", ", field.layout));
    if (t.ndim != field.ndim) continue;
    FLASH3_CHECK(check_shape(field, shape, q, batch));
    if (about.is_written) FLASH3_CHECK(check_no_overlap(field));
    return check_data(field, pointers);
  }
  return invalid_argument(message(name, ".ndim = ", t.ndim, " but it must be ", shapes));
}

void view_added(const flash3_tensor& t, bool packed, LseView* view) {
  *view = packed || t.ndim == 1 ? packed_lse_view(t) : lse_view(t);
  view->of_heads = t.ndim == 1;
}

void view_added(const flash3_tensor& t, bool, HeadsView* view) {
  const auto stride = [&](int dim) { return t.shape[dim] > 1 ? t.stride[dim] : 0; };
  *view = {static_cast<const float*>(t.data), is_given(t), t.ndim == 2 ? stride(0) : 0,
           t.ndim > 0 ? stride(t.ndim - 1) : 0};
}

void view_added(const flash3_tensor& t, bool, StateView* view) {
  *view = {static_cast<const int64_t*>(t.data), is_given(t)};
}

}  // namespace flash3
