// SPDX-License-Identifier: Apache-2.0
#include "core/added_checks.hpp"

#include <algorithm>
#include <string>

namespace flash3 {
namespace {

// A tensor as one of the shapes that it may have.
Field field_of(const char* name, std::string_view shape, const flash3_tensor& t,
               const Layout& layout) {
  if (shape == "heads") return {name, "[heads_q]", 1, t};
  if (shape == "batch_heads") return {name, "[batch, heads_q]", 2, t};
  if (shape == "rows") return layout.lse(name, t);
  if (shape == "state") return {name, "[2]", 1, t};
  if (is_of_distances(shape)) return {name, "[1 or heads_q, 2 * D + 1]", 2, t};
  return {name,
          layout.packed_q ? "[1, 1 or heads_q, 1 or total_q, seq_k]"
                          : "[1 or batch, 1 or heads_q, 1 or seq_q, seq_k]",
          4, t};
}

// A dimension that may be 1.
Status check_one_or_same(const Extent& a, const Extent& b, const char* what) {
  if (a.size() == 1 || a.size() == b.size()) return {};
  return invalid_argument(message(a.name(), " = ", a.size(), " but ", b.name(), " = ", b.size(),
                                  "; ", a.field.name, " must have the ", what, " of ", b.field.name,
                                  ", or 1"));
}

Status check_keys(const Extent& own, const KeyCount& keys) {
  if (keys.is_exact ? own.size() == keys.count : own.size() >= keys.count) return {};
  return invalid_argument(message(
      own.name(), " = ", own.size(), " but ", keys.name, " = ", keys.count, "; ", own.field.name,
      keys.is_exact ? " and k must have the same seq_k"
                    : " must have an element for each key that a sequence may have"));
}

Status check_pairs(const Field& field, const AddedContext& context) {
  const Field& q = context.q;
  const bool packed = context.layout.packed_q;
  if (!packed) FLASH3_CHECK(check_one_or_same({field, 0}, context.batch, "batch size"));
  if (packed && field.tensor.shape[0] != 1)
    return invalid_argument(message(field.part("shape", 0), " = ", field.tensor.shape[0],
                                    " but it must be 1; rows of packed queries are in the third "
                                    "dimension"));
  FLASH3_CHECK(check_one_or_same({field, 1}, {q, q.ndim - 2}, "heads_q"));
  FLASH3_CHECK(check_one_or_same({field, 2}, {q, q.ndim - 3}, packed ? "total_q" : "seq_q"));
  return check_keys({field, 3}, context.keys);
}

Status check_distances(const Field& field, const Field& q) {
  FLASH3_CHECK(check_one_or_same({field, 0}, {q, q.ndim - 2}, "heads_q"));
  if (field.tensor.shape[1] % 2 == 1) return {};
  return invalid_argument(message(field.part("shape", 1), " = ", field.tensor.shape[1],
                                  " but it must be 2 * D + 1, an entry for each distance from -D "
                                  "to D"));
}

Status check_state(const Field& field) {
  if (field.tensor.shape[0] == 2) return {};
  return invalid_argument(message(field.part("shape", 0), " = ", field.tensor.shape[0],
                                  " but it must be 2: a seed and an offset"));
}

Status check_shape(const Field& field, std::string_view shape, const AddedContext& context) {
  const Field& q = context.q;
  FLASH3_CHECK(check_sizes(field));
  if (shape == "rows") return check_rows(field, q, "");
  if (shape == "state") return check_state(field);
  if (is_of_pairs(shape)) return check_pairs(field, context);
  if (is_of_distances(shape)) return check_distances(field, q);
  if (shape == "batch_heads") FLASH3_CHECK(check_same({field, 0}, context.batch, "batch size"));
  return check_same({field, field.ndim - 1}, {q, q.ndim - 2}, "heads_q");
}

// like: the tensor whose shape it has, if there is one.
Status check_dtype(const ParamField& about, const flash3_tensor& t, const flash3_tensor* like) {
  const bool is_float = t.dtype >= FLASH3_FLOAT16 && t.dtype <= FLASH3_FLOAT32;
  if (about.dtype != FLASH3_DTYPE_NONE ? t.dtype == about.dtype
      : like                           ? t.dtype == FLASH3_FLOAT32 || t.dtype == like->dtype
                                       : is_float)
    return {};
  const std::string wanted =
      about.dtype != FLASH3_DTYPE_NONE ? dtype_name(about.dtype)
      : like ? message("float32 or the dtype of ", about.like, ", ", dtype_name(like->dtype))
             : "float16, bfloat16 or float32";
  return invalid_argument(message(about.name, ".dtype = ", dtype_name(t.dtype), " but it must be ",
                                  wanted, "; a ", about.name, " that is not ",
                                  about.is_written ? "wanted" : "given", " is all zero"));
}

Status check_like(const Field& field, const ParamField& about, const flash3_tensor& like) {
  if (!is_given(like))
    return invalid_argument(message(field.name, " is given but ", about.like,
                                    " is all zero; it is the gradient of ", about.like));
  const std::string name(about.like);
  const Field of{name.c_str(), field.layout, like.ndim, like};
  if (field.tensor.ndim != like.ndim)
    return invalid_argument(message(field.name, ".ndim = ", field.tensor.ndim, " but ", of.name,
                                    ".ndim = ", like.ndim, "; both must have the same shape"));
  for (int d = 0; d < like.ndim; ++d) FLASH3_CHECK(check_same({field, d}, {of, d}, "shape"));
  return {};
}

int64_t stride_of(const flash3_tensor& t, int dim) { return t.shape[dim] > 1 ? t.stride[dim] : 0; }

}  // namespace

Status check_added_tensor(const ParamField& about, const flash3_tensor& t,
                          const flash3_tensor* like, const AddedContext& context) {
  const char* const name = about.name.data();
  FLASH3_CHECK(check_dtype(about, t, like && is_given(*like) ? like : nullptr));
  std::string shapes;
  for (int64_t i = 0; i < count_words(about.shapes); ++i) {
    const std::string_view shape = word_at(about.shapes, i);
    const Field field = field_of(name, shape, t, context.layout);
    const std::string words = message(field.ndim, ", ", field.layout);
    if (shapes.find(words) == std::string::npos) append(shapes, (i > 0 ? " or " : "") + words);
    if (t.ndim != field.ndim) continue;
    FLASH3_CHECK(check_shape(field, shape, context));
    if (like) FLASH3_CHECK(check_like(field, about, *like));
    FLASH3_CHECK(check_strides(field, about.any_strides));
    if (about.is_written) FLASH3_CHECK(check_no_overlap(field));
    return check_data(field, context.pointers);
  }
  return invalid_argument(message(name, ".ndim = ", t.ndim, " but it must be ", shapes));
}

void view_added(const flash3_tensor& t, const Problem& p, LseView* view) {
  *view = p.sequences_q.packed || t.ndim == 1 ? packed_lse_view(t) : lse_view(t);
  view->of_heads = t.ndim == 1;
}

void view_added(const flash3_tensor& t, const Problem&, HeadsView* view) {
  *view = {static_cast<float*>(t.data), is_given(t), t.ndim == 2 ? stride_of(t, 0) : 0,
           t.ndim > 0 ? stride_of(t, t.ndim - 1) : 0, t.ndim == 2};
}

void view_added(const flash3_tensor& t, const Problem& p, BiasView* view) {
  *view = {t.data, t.dtype, is_given(t)};
  if (!view->given) return;
  view->stride_batch = stride_of(t, 0), view->stride_head = stride_of(t, 1);
  view->stride_row = stride_of(t, 2), view->stride_key = stride_of(t, 3);
  view->batch = t.shape[0], view->heads = t.shape[1];
  view->rows = t.shape[2], view->keys = t.shape[3];
  // A row of packed queries is of one sequence.
  const bool has_rows = t.shape[2] != 1;
  view->sums_batch = t.shape[0] == 1 && p.batch > 1 && !(p.sequences_q.packed && has_rows);
  view->sums_heads = t.shape[1] == 1 && p.heads_q > 1;
  view->sums_rows = !has_rows && p.sequences_q.rows > 1;
}

void view_added(const flash3_tensor& t, const Problem& p, BiasTableView* view) {
  *view = {static_cast<float*>(t.data), is_given(t)};
  if (!view->given) return;
  view->stride_head = stride_of(t, 0);
  view->distance = t.shape[1] / 2;
  view->heads = t.shape[0];
  view->sums_heads = t.shape[0] == 1 && p.heads_q > 1;
}

StateView state_view(const flash3_tensor& t) {
  return {static_cast<const int64_t*>(t.data), is_given(t)};
}

void view_added(const flash3_tensor& t, const Problem&, StateView* view) { *view = state_view(t); }

}  // namespace flash3
