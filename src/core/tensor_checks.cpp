#include "core/tensor_checks.hpp"

#include <algorithm>
#include <array>

#include "core/message.hpp"

namespace flash3 {
namespace {

// shape[dim] of `f` must be that of `other`.
struct Agreement {
  const Field& f;
  int dim;
  const Field& other;
  int other_dim;
  const char* rule;
};

Status check(const Agreement& a) {
  const int64_t size = a.f.tensor.shape[a.dim], expected = a.other.tensor.shape[a.other_dim];
  if (size == expected) return {};
  return invalid_argument(message(a.f.part("shape", a.dim), " = ", size, " but ",
                                  a.other.part("shape", a.other_dim), " = ", expected, "; ",
                                  a.rule));
}

Status check_head_dim(const Field& f, const char* what) {
  if (f.tensor.shape[3] >= 1 && f.tensor.shape[3] <= kMaxHeadDim) return {};
  return invalid_argument(message(f.part("shape", 3), " = ", f.tensor.shape[3], " but ", what,
                                  " must be from 1 to ", kMaxHeadDim));
}

Status check_heads(const Field& q, const Field& k) {
  const int64_t batch = q.tensor.shape[0], heads_q = q.tensor.shape[2];
  const int64_t heads_k = k.tensor.shape[2];
  if (heads_k == 0 ? heads_q > 0 : heads_q % heads_k != 0)
    return invalid_argument(message(q.part("shape", 2), " = ", heads_q, " but ", k.part("shape", 2),
                                    " = ", heads_k, "; heads_q must be a multiple of heads_k"));
  if (batch * heads_q > kMaxSize)  // both are below 2^31
    return invalid_argument(message(q.part("shape", 0), " = ", batch, " and ", q.part("shape", 2),
                                    " = ", heads_q, "; batch * heads_q must be at most ",
                                    kMaxSize));
  return {};
}

// The element count, and the bytes from the first element to the end of the last one, in int64.
bool fits_int64(const Field& f) {
  const flash3_tensor& t = f.tensor;
  int64_t count = dtype_size(t.dtype), last = 0;
  for (int d = 0; d < f.ndim; ++d) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(count, t.shape[d], &count)) return false;
    if (t.shape[d] > 1 && (__builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &reach) ||
                           __builtin_add_overflow(last, reach, &last)))
      return false;
  }
  int64_t bytes = 0;
  return !__builtin_add_overflow(last, 1, &bytes) &&
         !__builtin_mul_overflow(bytes, dtype_size(t.dtype), &bytes);
}

}  // namespace

std::string Field::part(const char* member, int dim) const {
  return message(name, ".", member, "[", dim, "]");
}

bool Field::has_no_elements() const {
  return std::find(tensor.shape, tensor.shape + ndim, 0) != tensor.shape + ndim;
}

bool is_given(const flash3_tensor& t) {
  const auto is_zero = [](int64_t x) { return x == 0; };
  return t.data || t.dtype != FLASH3_DTYPE_NONE || t.ndim != 0 ||
         !std::all_of(t.shape, t.shape + 4, is_zero) ||
         !std::all_of(t.stride, t.stride + 4, is_zero);
}

Status check_form(const Field& f) {
  const flash3_tensor& t = f.tensor;
  if (!is_given(t))
    return invalid_argument(message(f.name, " is all zero; it must be a tensor ", f.layout));
  if (dtype_size(t.dtype) == 0)
    return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 1 (float16), 2 (bfloat16) or 3 (float32)"));
  if (t.ndim != f.ndim)
    return invalid_argument(
        message(f.name, ".ndim = ", t.ndim, " but it must be ", f.ndim, ", ", f.layout));
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

Status check_shapes(const Field& q, const Field& k, const Field& v, const Field& out) {
  for (const Agreement& a : {
           Agreement{k, 0, q, 0, "q and k must have the same batch size"},
           Agreement{v, 0, q, 0, "q and v must have the same batch size"},
           Agreement{out, 0, q, 0, "q and out must have the same batch size"},
           Agreement{v, 1, k, 1, "k and v must have the same seq_k"},
           Agreement{v, 2, k, 2, "k and v must have the same heads_k"},
           Agreement{k, 3, q, 3, "q and k must have the same head_dim"},
           Agreement{out, 1, q, 1, "q and out must have the same seq_q"},
           Agreement{out, 2, q, 2, "q and out must have the same heads_q"},
           Agreement{out, 3, v, 3, "v and out must have the same head_dim_v"},
       })
    FLASH3_CHECK(check(a));
  FLASH3_CHECK(check_head_dim(q, "head_dim"));
  FLASH3_CHECK(check_head_dim(v, "head_dim_v"));
  return check_heads(q, k);
}

Status check_same_shape(const Field& f, const Field& other) {
  const std::string rule = message(other.name, " and ", f.name, " must have the same shape");
  for (int d = 0; d < f.ndim; ++d) FLASH3_CHECK(check({f, d, other, d, rule.c_str()}));
  return {};
}

Status check_strides(const Field& f) {
  const flash3_tensor& t = f.tensor;
  for (int d = 0; d < f.ndim; ++d)
    if (t.shape[d] > 1 && t.stride[d] < 0)
      return invalid_argument(
          message(f.part("stride", d), " = ", t.stride[d], " but a stride must be at least 0"));
  const int last = f.ndim - 1;
  if (t.shape[last] > 1 && t.stride[last] != 1)
    return invalid_argument(message(f.part("stride", last), " = ", t.stride[last],
                                    " but it must be 1; the last dimension of ", f.name, ", ",
                                    f.layout, ", must be contiguous"));
  if (!fits_int64(f)) {
    std::string text = message(f.name, " spans more bytes than int64 can count; shape x stride = ");
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
  std::array<int, 4> dims = {0, 1, 2, 3};
  std::stable_sort(dims.begin(), dims.begin() + f.ndim,
                   [&](int a, int b) { return t.stride[a] < t.stride[b]; });
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
    return invalid_argument(message(f.name, ".data = ", hex(t.data),
                                    " but it must be a multiple of ", dtype_size(t.dtype),
                                    ", the size of a ", dtype_name(t.dtype)));
  return {};
}

Status check_rows(const Field& rows, const Field& q, const char* advice) {
  if (rows.tensor.dtype != FLASH3_FLOAT32)
    return invalid_argument(message(rows.name, ".dtype = ", static_cast<int32_t>(rows.tensor.dtype),
                                    " but it must be 3 (float32)", advice));
  FLASH3_CHECK(check_form(rows));
  const auto rule = [&](const char* what) {
    return message("q and ", rows.name, " must have the same ", what);
  };
  FLASH3_CHECK(check({rows, 0, q, 0, rule("batch size").c_str()}));
  FLASH3_CHECK(check({rows, 1, q, 2, rule("heads_q").c_str()}));
  FLASH3_CHECK(check({rows, 2, q, 1, rule("seq_q").c_str()}));
  return check_strides(rows);
}

TensorView view(const flash3_tensor& t) {
  const auto stride = [&](int d) { return t.shape[d] > 1 ? t.stride[d] : 0; };
  return {t.data, t.shape[0], t.shape[1], t.shape[2], t.shape[3], stride(0), stride(1), stride(2)};
}

LseView lse_view(const flash3_tensor& t) {
  const auto stride = [&](int d) { return t.shape[d] > 1 ? t.stride[d] : 0; };
  return {static_cast<float*>(t.data), is_given(t), stride(0), stride(1)};
}

}  // namespace flash3
