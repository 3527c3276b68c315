// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_checks.hpp"

#include <algorithm>
#include <array>

#include "core/message.hpp"

namespace flash3 {
namespace {

// The dimensions of q, k, v and out, packed or not, counted from the last one.
Extent seq_of(const Field& f) { return {f, f.ndim - 3}; }
Extent heads_of(const Field& f) { return {f, f.ndim - 2}; }
Extent dim_of(const Field& f) { return {f, f.ndim - 1}; }
bool is_packed(const Field& f) { return f.ndim == 3; }

Status check_head_dim(const Extent& dim, int64_t most, const char* what) {
  if (dim.size() >= 1 && dim.size() <= most) return {};
  return invalid_argument(
      message(dim.name(), " = ", dim.size(), " but ", what, " must be from 1 to ", most));
}

Status check_heads(const Extent& batch, const Extent& heads_q, const Extent& heads_k) {
  const int64_t q = heads_q.size(), k = heads_k.size();
  if (k == 0 ? q > 0 : q % k != 0)
    return invalid_argument(message(heads_q.name(), " = ", q, " but ", heads_k.name(), " = ", k,
                                    "; heads_q must be a multiple of heads_k"));
  if (batch.size() * q > kMaxSize)  // both are below 2^31
    return invalid_argument(message(batch.name(), " = ", batch.size(), " and ", heads_q.name(),
                                    " = ", q, "; batch * heads_q must be at most ", kMaxSize));
  return {};
}

// No address space has more. With it, all sizes that follow from those of a call's tensors fit in
// int64: rows padded to whole vectors, in float32, are 32 times as large at most.
constexpr int64_t kMaxBytes = int64_t{1} << 56;

// The bytes of all elements, and those from the first element to the end of the last one.
bool fits_memory(const Field& f) {
  const flash3_tensor& t = f.tensor;
  int64_t count = dtype_size(t.dtype), last = 0;
  for (int d = 0; d < f.ndim; ++d) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(count, t.shape[d], &count)) return false;
    if (t.shape[d] > 1 && (__builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &reach) ||
                           __builtin_add_overflow(last, reach, &last)))
      return false;
  }
  return count <= kMaxBytes && last < kMaxBytes / dtype_size(t.dtype);
}

}  // namespace

std::string Field::part(const char* member, int dim) const {
  return message(name, ".", member, "[", dim, "]");
}

bool Field::has_no_elements() const {
  return std::find(tensor.shape, tensor.shape + ndim, 0) != tensor.shape + ndim;
}

std::string Extent::name() const {
  return extra ? message(field.part("shape", dim), " - ", extra) : field.part("shape", dim);
}

Status check_form(const Field& f, Dtypes dtypes) {
  const flash3_tensor& t = f.tensor;
  if (!is_given(t))
    return invalid_argument(message(f.name, " is all zero; it must be a tensor ", f.layout));
  const bool is_float = t.dtype >= FLASH3_FLOAT16 && t.dtype <= FLASH3_FLOAT32;
  if (dtypes == Dtypes::kFp8 ? !is_fp8(t)
                             : !is_float && !(dtypes == Dtypes::kFloatOrFp8 && is_fp8(t)))
    return invalid_argument(message(
        f.name, ".dtype = ", static_cast<int32_t>(t.dtype), " but it must be ",
        dtypes == Dtypes::kFp8     ? "5 (float8_e4m3)"
        : dtypes == Dtypes::kFloat ? "1 (float16), 2 (bfloat16) or 3 (float32)"
                                   : "1 (float16), 2 (bfloat16), 3 (float32) or, of a forward "
                                     "call, 5 (float8_e4m3)"));
  return check_sizes(f);
}

Status check_sizes(const Field& f) {
  const flash3_tensor& t = f.tensor;
  if (t.ndim != f.ndim) {
    const bool packed = f.packed_by && t.ndim == f.ndim - 1;
    return invalid_argument(message(f.name, ".ndim = ", t.ndim, " but it must be ", f.ndim, ", ",
                                    f.layout, packed ? "; packed sequences need " : "",
                                    packed ? f.packed_by : ""));
  }
  for (int d = 0; d < f.ndim; ++d)
    if (t.shape[d] < 0 || t.shape[d] > kMaxSize)
      return invalid_argument(message(f.part("shape", d), " = ", t.shape[d],
                                      " but a size must be from 0 to ", kMaxSize));
  return {};
}

Status check_same_dtype(std::initializer_list<Field> fields) {
  const Field& first = *fields.begin();
  for (const Field& f : fields) {
    if (f.tensor.dtype == first.tensor.dtype) continue;
    std::string names = first.name;
    for (auto other = fields.begin() + 1; other != fields.end(); ++other)
      append(names, message(other + 1 == fields.end() ? " and " : ", ", other->name));
    return invalid_argument(message(f.name, ".dtype = ", dtype_name(f.tensor.dtype), " but ",
                                    first.name, ".dtype = ", dtype_name(first.tensor.dtype), "; ",
                                    names, " must have the same dtype"));
  }
  return {};
}

Status check_same(const Extent& a, const Extent& b, const char* what) {
  if (a.size() == b.size()) return {};
  return invalid_argument(message(a.name(), " = ", a.size(), " but ", b.name(), " = ", b.size(),
                                  "; ", b.field.name, " and ", a.field.name, " must have the same ",
                                  what));
}

Status check_shapes(const Field& q, const Field& k, const Field& v, const Field& out,
                    const Extent& batch_q, const Extent& batch_k, const DimLimits& limits,
                    const char* elements) {
  FLASH3_CHECK(check_same(batch_k, batch_q, "batch size"));
  if (elements)
    FLASH3_CHECK(check_same({v, 0}, {k, 0}, elements));
  else if (!is_packed(v))
    FLASH3_CHECK(check_same({v, 0}, batch_q, "batch size"));
  if (!is_packed(out)) FLASH3_CHECK(check_same({out, 0}, batch_q, "batch size"));
  FLASH3_CHECK(check_same(seq_of(v), seq_of(k), is_packed(k) ? "total_k" : "seq_k"));
  FLASH3_CHECK(check_same(heads_of(v), heads_of(k), "heads_k"));
  FLASH3_CHECK(check_same(dim_of(k), dim_of(q), "head_dim"));
  FLASH3_CHECK(check_same(seq_of(out), seq_of(q), is_packed(q) ? "total_q" : "seq_q"));
  FLASH3_CHECK(check_same(heads_of(out), heads_of(q), "heads_q"));
  FLASH3_CHECK(check_same(dim_of(out), dim_of(v), "head_dim_v"));
  FLASH3_CHECK(check_head_dim(dim_of(q), limits.qk, "head_dim"));
  FLASH3_CHECK(check_head_dim(dim_of(v), limits.v, "head_dim_v"));
  return check_heads(batch_q, heads_of(q), heads_of(k));
}

Status check_same_shape(const Field& f, const Field& other) {
  for (int d = 0; d < f.ndim; ++d) FLASH3_CHECK(check_same({f, d}, {other, d}, "shape"));
  return {};
}

Status check_strides(const Field& f, bool any_last) {
  const flash3_tensor& t = f.tensor;
  for (int d = 0; d < f.ndim; ++d)
    if (t.shape[d] > 1 && t.stride[d] < 0)
      return invalid_argument(
          message(f.part("stride", d), " = ", t.stride[d], " but a stride must be at least 0"));
  const int last = f.ndim - 1;
  if (!any_last && t.shape[last] > 1 && t.stride[last] != 1)
    return invalid_argument(message(f.part("stride", last), " = ", t.stride[last],
                                    " but it must be 1; the last dimension of ", f.name, ", ",
                                    f.layout, ", must be contiguous"));
  if (!fits_memory(f)) {
    std::string text = message(f.name, " takes more than 2^56 bytes; shape x stride = ");
    for (int d = 0; d < f.ndim; ++d)
      append(text, message(d ? " + " : "", t.shape[d], " x ", t.stride[d]));
    return invalid_argument(std::move(text));
  }
  return {};
}

// Taken from the smallest stride to the largest, each dimension must step over all that lies inside
// it. (This also refuses layouts that interleave two dimensions without a collision: no framework
// makes them.)
Status check_no_overlap(const Field& f) {
  const flash3_tensor& t = f.tensor;
  if (f.has_no_elements()) return {};
  // By their strides: an insertion sort, stable and without memory of its own.
  std::array<int, 4> dims = {0, 1, 2, 3};
  for (int i = 1; i < f.ndim; ++i)
    for (int j = i; j > 0 && t.stride[dims[j - 1]] > t.stride[dims[j]]; --j)
      std::swap(dims[j - 1], dims[j]);
  int64_t extent = 1;  // elements from the first to the last of the dimensions so far
  for (int i = 0; i < f.ndim; ++i) {
    const int d = dims[i];
    if (t.shape[d] <= 1) continue;
    if (t.stride[d] < extent)
      return invalid_argument(message(f.part("stride", d), " = ", t.stride[d],
                                      " but it must be at least ", extent,
                                      ", the extent of the dimensions with smaller strides; the ",
                                      "elements of an output must not overlap"));
    extent += (t.shape[d] - 1) * t.stride[d];
  }
  return {};
}

Status check_data(const Field& f, Pointers pointers) {
  const flash3_tensor& t = f.tensor;
  if (!t.data && pointers == Pointers::kRequired && !f.has_no_elements())
    return invalid_argument(message(f.name, ".data is null but ", f.name, " has elements; only ",
                                    "a tensor with a size of 0 needs no memory"));
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size(t.dtype) != 0)
    return invalid_argument(message(
        f.name, ".data = ", hex(t.data), " but it must be a multiple of ", dtype_size(t.dtype),
        ", the size of ", t.dtype == FLASH3_INT32 ? "an " : "a ", dtype_name(t.dtype)));
  return {};
}

Status check_rows(const Field& rows, const Field& q, const char* advice) {
  if (rows.tensor.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(rows.name, ".dtype = ", static_cast<int32_t>(rows.tensor.dtype),
                                    " but it must be 3 (float32)", advice));
  FLASH3_CHECK(check_form(rows));
  if (!is_packed(q)) FLASH3_CHECK(check_same({rows, 0}, {q, 0}, "batch size"));
  FLASH3_CHECK(check_same({rows, rows.ndim - 2}, heads_of(q), "heads_q"));
  FLASH3_CHECK(check_same({rows, rows.ndim - 1}, seq_of(q), is_packed(q) ? "total_q" : "seq_q"));
  return check_strides(rows);
}

namespace {

// A dimension of one element or none is never stepped along.
int64_t stride_of(const flash3_tensor& t, int dim) { return t.shape[dim] > 1 ? t.stride[dim] : 0; }

}  // namespace

TensorView view(const flash3_tensor& t) {
  return {t.data,     t.shape[0],      t.shape[1],      t.shape[2],
          t.shape[3], stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

TensorView packed_view(const flash3_tensor& t, int64_t batch, int64_t seq) {
  return {t.data, batch, seq, t.shape[1], t.shape[2], 0, stride_of(t, 0), stride_of(t, 1)};
}

LseView lse_view(const flash3_tensor& t) {
  return {static_cast<float*>(t.data), is_given(t), stride_of(t, 0), stride_of(t, 1)};
}

LseView packed_lse_view(const flash3_tensor& t) {
  return {static_cast<float*>(t.data), is_given(t), 0, stride_of(t, 0)};
}

SinkView sink_view(const flash3_tensor& t) { return {t.data, t.dtype, is_given(t)}; }

}  // namespace flash3
