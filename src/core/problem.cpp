// The one place where user input is checked: flash3_forward_params in, ForwardProblem out.
#include "core/problem.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "core/message.hpp"

namespace flash3 {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

// What flash3_forward_params took in its first version. Fields are only ever added at its end, so a
// caller built against any version passes at least this much.
constexpr size_t kFirstParamsSize =
    offsetof(flash3_forward_params, workspace_size) + sizeof(flash3_forward_params::workspace_size);

// No version will come near this: a struct_size beyond it was never set, and reading that far would
// crash.
constexpr size_t kPlausibleParamsSize = 4096;

// A tensor of the call, with what messages say about it.
struct Field {
  const char* name;
  const char* layout;
  int ndim;
  const flash3_tensor& tensor;

  std::string part(const char* member, int dim) const {
    return message(name, ".", member, "[", dim, "]");
  }
  bool has_no_elements() const {
    return std::find(tensor.shape, tensor.shape + ndim, 0) != tensor.shape + ndim;
  }
};

bool is_given(const flash3_tensor& t) {
  const auto is_zero = [](int64_t x) { return x == 0; };
  return t.data || t.dtype != FLASH3_DTYPE_NONE || t.ndim != 0 ||
         !std::all_of(t.shape, t.shape + 4, is_zero) ||
         !std::all_of(t.stride, t.stride + 4, is_zero);
}

// Fields that a newer header has and this library has not must be zero: they ask for nothing.
Status read_params(const flash3_forward_params* given, flash3_forward_params* params) {
  if (!given) return invalid_argument("params is null; it must point to a flash3_forward_params");
  const size_t size = given->struct_size;
  if (size < kFirstParamsSize || size > kPlausibleParamsSize)
    return invalid_argument(message("struct_size = ", size, " but flash3_forward_params takes ",
                                    sizeof *params,
                                    " bytes; set struct_size = sizeof(flash3_forward_params)"));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof *params; i < size; ++i)
    if (bytes[i] != 0)
      return unsupported(message("struct_size = ", size, " but this library knows ", sizeof *params,
                                 " bytes, and byte ", i,
                                 " is set; the call was made for a newer flash3 than this one, ",
                                 FLASH3_VERSION_STRING));
  std::memcpy(params, given, sizeof *params);
  return {};
}

// dtype, ndim and each size by itself.
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

// The stride of a dimension with fewer than two elements is never used, so it may be anything.
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

Status check_flag(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return invalid_argument(message(name, " = ", value, " but it must be 0 or 1"));
}

Status check_options(const flash3_forward_params& p) {
  if (!std::isfinite(p.softmax_scale) || p.softmax_scale < 0.f)
    return invalid_argument(message("softmax_scale = ", p.softmax_scale,
                                    " but it must be finite and at least 0 (0: 1/sqrt(head_dim))"));
  FLASH3_CHECK(check_flag("causal", p.causal));
  FLASH3_CHECK(check_flag("window", p.window));
  if (p.backend < FLASH3_BACKEND_AUTO || p.backend > FLASH3_BACKEND_CPU)
    return invalid_argument(
        message("backend = ", p.backend, " but it must be 0 (auto), 1 (hopper) or 2 (cpu)"));
  if (p.num_threads < 0)
    return invalid_argument(
        message("num_threads = ", p.num_threads, " but it must be at least 0 (0: one per core)"));
  return {};
}

Status check_tensors(const flash3_forward_params& p, Pointers pointers) {
  const Field q{"q", "[batch, seq_q, heads_q, head_dim]", 4, p.q};
  const Field k{"k", "[batch, seq_k, heads_k, head_dim]", 4, p.k};
  const Field v{"v", "[batch, seq_k, heads_k, head_dim_v]", 4, p.v};
  const Field out{"out", "[batch, seq_q, heads_q, head_dim_v]", 4, p.out};
  const Field lse{"lse", "[batch, heads_q, seq_q]", 3, p.lse};

  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_form(f));
  for (const Field& f : {k, v, out})
    if (f.tensor.dtype != p.q.dtype)
      return invalid_argument(message(f.name, ".dtype = ", dtype_name(f.tensor.dtype),
                                      " but q.dtype = ", dtype_name(p.q.dtype),
                                      "; q, k, v and out must have the same dtype"));
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
  FLASH3_CHECK(check_heads(q, k));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_strides(f));
  FLASH3_CHECK(check_no_overlap(out));
  for (const Field& f : {q, k, v, out}) FLASH3_CHECK(check_data(f, pointers));

  if (!is_given(p.lse)) return {};
  if (p.lse.dtype != FLASH3_FLOAT32)
    return invalid_argument(message("lse.dtype = ", static_cast<int32_t>(p.lse.dtype),
                                    " but it must be 3 (float32); an lse that is not wanted is ",
                                    "all zero"));
  FLASH3_CHECK(check_form(lse));
  FLASH3_CHECK(check({lse, 0, q, 0, "q and lse must have the same batch size"}));
  FLASH3_CHECK(check({lse, 1, q, 2, "q and lse must have the same heads_q"}));
  FLASH3_CHECK(check({lse, 2, q, 1, "q and lse must have the same seq_q"}));
  FLASH3_CHECK(check_strides(lse));
  FLASH3_CHECK(check_no_overlap(lse));
  return check_data(lse, pointers);
}

TensorView view(const flash3_tensor& t) {
  const auto stride = [&](int d) { return t.shape[d] > 1 ? t.stride[d] : 0; };
  return {t.data, t.shape[0], t.shape[1], t.shape[2], t.shape[3], stride(0), stride(1), stride(2)};
}

LseView lse_view(const flash3_tensor& t) {
  const auto stride = [&](int d) { return t.shape[d] > 1 ? t.stride[d] : 0; };
  return {static_cast<float*>(t.data), is_given(t), stride(0), stride(1)};
}

}  // namespace

Status make_forward_problem(const flash3_forward_params* params, Pointers pointers,
                            ForwardProblem* problem) {
  flash3_forward_params p;
  FLASH3_CHECK(read_params(params, &p));
  FLASH3_CHECK(check_tensors(p, pointers));
  FLASH3_CHECK(check_options(p));

  ForwardProblem made;
  made.dtype = p.q.dtype;
  made.batch = p.q.shape[0];
  made.seq_q = p.q.shape[1];
  made.seq_k = p.k.shape[1];
  made.heads_q = p.q.shape[2];
  made.heads_k = p.k.shape[2];
  made.head_dim = static_cast<int>(p.q.shape[3]);
  made.head_dim_v = static_cast<int>(p.v.shape[3]);
  made.q = view(p.q);
  made.k = view(p.k);
  made.v = view(p.v);
  made.out = view(p.out);
  made.lse = lse_view(p.lse);
  made.softmax_scale = p.softmax_scale > 0.f
                           ? p.softmax_scale
                           : static_cast<float>(1.0 / std::sqrt(double(made.head_dim)));
  // causal is window_right = 0, the narrowest bound that a window can have on that side.
  const int64_t left = p.window ? p.window_left : -1;
  const int64_t right = p.causal ? 0 : p.window ? p.window_right : -1;
  made.band = Band::make(made.seq_q, made.seq_k, left, right);
  made.backend = static_cast<flash3_backend>(p.backend);
  made.num_threads = p.num_threads;
  made.stream = p.stream;
  made.workspace = p.workspace;
  made.workspace_size = p.workspace_size;
  *problem = made;
  return {};
}

const char* dtype_name(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_DTYPE_NONE: return "none";
    case FLASH3_FLOAT16: return "float16";
    case FLASH3_BFLOAT16: return "bfloat16";
    case FLASH3_FLOAT32: return "float32";
  }
  return "unknown";
}

int dtype_size(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16:
    case FLASH3_BFLOAT16: return 2;
    case FLASH3_FLOAT32: return 4;
    case FLASH3_DTYPE_NONE: break;
  }
  return 0;
}

}  // namespace flash3
