// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

using Params = flash3_forward_params;

// A field and its name, for the rules that look no further than whether it is given.
struct Named {
  const char* name;
  const flash3_tensor& tensor;

  bool given() const { return is_given(tensor); }
};

Status check_without(const Named& field, const Named& other, const char* why) {
  if (!field.given() || !other.given()) return {};
  return invalid_argument(message(field.name, " is given and ", other.name, " is given; ", why));
}

Status check_with(const Named& field, const Named& needed, const char* why) {
  if (!field.given() || needed.given()) return {};
  return invalid_argument(message(field.name, " is given but ", needed.name, " is not; ", why));
}

// Which fields go together.
Status check_company(const Params& p) {
  const Named page_table{"page_table", p.page_table}, cu_k{"cu_seqlens_k", p.cu_seqlens_k};
  const Named batch_idx{"cache_batch_idx", p.cache_batch_idx}, leftpad{"leftpad_k", p.leftpad_k};
  const Named k_new{"k_new", p.k_new}, v_new{"v_new", p.v_new};
  const Named cos{"rotary_cos", p.rotary_cos}, sin{"rotary_sin", p.rotary_sin};

  for (const Named& field : {page_table, batch_idx, leftpad, k_new})
    FLASH3_CHECK(check_without(field, cu_k, "packed keys are no cache"));
  FLASH3_CHECK(check_without(batch_idx, page_table, "a page table tells where the keys lie"));

  FLASH3_CHECK(check_with(v_new, k_new, "values are appended with their keys"));
  FLASH3_CHECK(
      check_with(k_new, {"seqused_k", p.seqused_k}, "it tells how many keys the new ones follow"));
  FLASH3_CHECK(check_with({"cu_seqlens_k_new", p.cu_seqlens_k_new}, k_new,
                          "it tells the sequences of k_new apart"));
  for (const Named& field : {cos, sin})
    FLASH3_CHECK(check_with(field, k_new, "q and the new keys get the embedding together"));
  FLASH3_CHECK(check_with(cos, sin, "an embedding needs both tables"));
  FLASH3_CHECK(check_with(sin, cos, "an embedding needs both tables"));
  return check_with({"rotary_offsets", p.rotary_offsets}, cos, "there are no positions without");
}

Field index_field(const char* name, const flash3_tensor& t) { return {name, "[batch]", 1, t}; }
Field page_table_of(const Params& p) {
  return {"page_table", "[batch, max_pages]", 2, p.page_table};
}
Field cu_new_of(const Params& p) {
  return {"cu_seqlens_k_new", "[batch + 1]", 1, p.cu_seqlens_k_new};
}

// One of k_new and v_new.
Field new_field(const Params& p, const char* name, bool is_v) {
  const flash3_tensor& t = is_v ? p.v_new : p.k_new;
  if (is_given(p.cu_seqlens_k_new))
    return {name, is_v ? "[total_new, heads_k, head_dim_v]" : "[total_new, heads_k, head_dim]", 3,
            t};
  return {name,
          is_v ? "[batch, seq_new, heads_k, head_dim_v]" : "[batch, seq_new, heads_k, head_dim]", 4,
          t, "cu_seqlens_k_new"};
}

// A page or an element that an index can name must exist, and all pages of a sequence together are
// a sequence like any other.
Status check_elements(const Params& p, const Field& k) {
  const Field table = page_table_of(p);
  const bool paged = is_given(p.page_table);
  if (!paged && !is_given(p.cache_batch_idx)) return {};
  if (k.tensor.shape[0] < 1)
    return invalid_argument(
        message(k.part("shape", 0), " = ", k.tensor.shape[0], " but it must be at least 1, with ",
                paged ? "page_table: the pages" : "cache_batch_idx: the elements of the cache"));
  if (!paged) return {};
  const int64_t page_size = k.tensor.shape[1], max_pages = p.page_table.shape[1];
  if (page_size < 1)
    return invalid_argument(message(k.part("shape", 1), " = ", page_size,
                                    " but it must be at least 1, with page_table: the page size"));
  if (max_pages * page_size > kMaxSize)  // both are below 2^31
    return invalid_argument(message(table.part("shape", 1), " = ", max_pages, " and ",
                                    k.part("shape", 1), " = ", page_size,
                                    "; max_pages * page_size must be at most ", kMaxSize));
  return {};
}

// What may be written into a cache: its own dtype, or what becomes FP8 on the way.
Status check_new_dtype(const Params& p, const Field& field, const Field& of) {
  FLASH3_CHECK(check_form(field, is_fp8(of.tensor) ? Dtypes::kFloatOrFp8 : Dtypes::kFloat));
  if (!is_fp8(of.tensor)) return check_same_dtype({of, field});
  const flash3_dtype dtype = field.tensor.dtype;
  if (is_fp8(field.tensor) || dtype == p.q.dtype || (is_fp8(p.q) && dtype_size(dtype) == 2))
    return {};
  return invalid_argument(message(field.name, ".dtype = ", dtype_name(dtype), " but ", of.name,
                                  ".dtype = ", dtype_name(of.tensor.dtype), " and q.dtype = ",
                                  dtype_name(p.q.dtype), "; it must be float8_e4m3 or ",
                                  is_fp8(p.q) ? "16-bit, float16 or bfloat16" : "the dtype of q"));
}

// k_new against k, or v_new against v.
Status check_new(const Params& p, const Field& field, const Field& of, const Extent& batch) {
  FLASH3_CHECK(check_new_dtype(p, field, of));
  FLASH3_CHECK(check_same({field, field.ndim - 2}, {of, of.ndim - 2}, "heads_k"));
  FLASH3_CHECK(check_same({field, field.ndim - 1}, {of, of.ndim - 1}, "head dim"));
  return field.ndim == 4 ? check_same({field, 0}, batch, "batch size") : Status();
}

Status check_index(int64_t value, int64_t end, const std::string& name, const char* what) {
  if (value >= 0 && value < end) return {};
  return invalid_argument(
      message(name, " = ", value, " but it must be from 0 to ", end - 1, ", ", what));
}

}  // namespace

Status check_cache_fields(const Params& p, Pointers pointers) {
  FLASH3_CHECK(check_company(p));
  if (is_given(p.page_table)) FLASH3_CHECK(check_index_field(page_table_of(p), 0, "", pointers));
  if (is_given(p.cu_seqlens_k_new))
    FLASH3_CHECK(
        check_index_field(cu_new_of(p), 1, ", one more than there are sequences", pointers));
  for (const Field& f :
       {index_field("cache_batch_idx", p.cache_batch_idx), index_field("leftpad_k", p.leftpad_k),
        index_field("rotary_offsets", p.rotary_offsets)})
    if (is_given(f.tensor)) FLASH3_CHECK(check_index_field(f, 0, "", pointers));
  return {};
}

Status check_cache_dtypes(const Params& p) {
  if (p.compute != FLASH3_COMPUTE_FP8) return {};
  for (const Named& field : {Named{"page_table", p.page_table},
                             {"cache_batch_idx", p.cache_batch_idx},
                             {"leftpad_k", p.leftpad_k},
                             {"k_new", p.k_new}})
    if (field.given())
      return unsupported(message(field.name, " is given but compute = 1 (fp8); a KV cache is ",
                                 "computed in the dtype that it has, and may be float8_e4m3"));
  return {};
}

Status check_cache_shapes(const Params& p, const Field& q, const Field& k, const Field& v,
                          const Field& out, const Extent& batch_q, const Extent& batch_k) {
  const Field table = page_table_of(p);
  const Field batch_idx = index_field("cache_batch_idx", p.cache_batch_idx);
  const Field leftpad = index_field("leftpad_k", p.leftpad_k);
  const DimLimits limits = forward_limits(p);
  if (is_given(p.page_table))
    FLASH3_CHECK(check_shapes(q, k, v, out, batch_q, {table, 0}, limits, "number of pages"));
  else if (is_given(p.cache_batch_idx))
    FLASH3_CHECK(check_shapes(q, k, v, out, batch_q, {batch_idx, 0}, limits, "number of elements"));
  else
    FLASH3_CHECK(check_shapes(q, k, v, out, batch_q, batch_k, limits));
  FLASH3_CHECK(check_elements(p, k));
  return is_given(p.leftpad_k) ? check_same({leftpad, 0}, batch_q, "batch size") : Status();
}

Status check_append(const Params& p, const Field& q, const Field& k, const Field& v,
                    Pointers pointers) {
  if (!is_given(p.k_new)) return {};
  const SequenceFields sequences = sequences_of_q(p);
  const Extent batch = batch_of(q, sequences);
  const Field k_new = new_field(p, "k_new", false), v_new = new_field(p, "v_new", true);
  const Field cu = cu_new_of(p), offsets = index_field("rotary_offsets", p.rotary_offsets);
  const bool has_v = is_given(p.v_new);
  FLASH3_CHECK(check_new(p, k_new, k, batch));
  if (has_v) {
    FLASH3_CHECK(check_new(p, v_new, v, batch));
    FLASH3_CHECK(check_same_dtype({k_new, v_new}));
    FLASH3_CHECK(check_same({v_new, v_new.ndim - 3}, {k_new, k_new.ndim - 3},
                            k_new.ndim == 3 ? "total_new" : "seq_new"));
  }
  if (is_given(p.cu_seqlens_k_new)) FLASH3_CHECK(check_same({cu, 0, 1}, batch, "batch size"));
  for (const Field& f : {k_new, v_new}) {
    if (!is_given(f.tensor)) continue;
    FLASH3_CHECK(check_strides(f));
    FLASH3_CHECK(check_data(f, pointers));
  }
  if (!has_v) FLASH3_CHECK(check_values_in_keys(k, v));
  for (const Field& f : {k, v}) FLASH3_CHECK(check_no_overlap(f));
  if (!is_given(p.rotary_cos)) return {};
  for (const Field& f : {q, k_new})
    if (is_fp8(f.tensor))
      return unsupported(message("rotary_cos is given but ", f.name,
                                 ".dtype = ", dtype_name(f.tensor.dtype),
                                 "; a tensor with an embedding must have ", "more than 8 bits"));
  FLASH3_CHECK(check_rotary_tables(rotary_field("rotary_cos", p.rotary_cos),
                                   rotary_field("rotary_sin", p.rotary_sin), q, "q and k_new",
                                   pointers));
  return is_given(p.rotary_offsets) ? check_same({offsets, 0}, batch, "batch size") : Status();
}

Status check_rotation(const Params& p, const Field& q) {
  FLASH3_CHECK(check_flag("rotate", p.rotate));
  if (p.rotate == 0) return {};
  if (p.compute == FLASH3_COMPUTE_FP8)
    return invalid_argument(
        "rotate = 1 and compute = 1 (fp8); the call rotates what it converts to FP8 anyway");
  for (const Field& f : {q, new_field(p, "k_new", false)})
    if (is_fp8(f.tensor))
      return unsupported(message("rotate = 1 but ", f.name, ".dtype = ", dtype_name(f.tensor.dtype),
                                 "; a rotated tensor must have more than 8 bits"));
  const Extent dim{q, q.ndim - 1};
  if (dim.size() > kMaxHeadDim)
    return invalid_argument(message("rotate = 1 but ", dim.name(), " = ", dim.size(),
                                    "; a head dim that is rotated must be at most ", kMaxHeadDim));
  if (!is_given(p.k_new) || is_given(p.v_new)) return {};
  return invalid_argument(
      "rotate = 1 and k_new is given but v_new is not; v would be a part of the rows of k that are "
      "rotated");
}

Status check_cache_options(const Params& p) {
  FLASH3_CHECK(check_flag("rotary_interleaved", p.rotary_interleaved));
  if (p.sm_margin >= 0) return {};
  return invalid_argument(message("sm_margin = ", p.sm_margin, " but it must be at least 0"));
}

// ---- what the tensors hold ----

namespace {

Status check_padding(const Problem& p, int64_t b) {
  const RowRange rows = rows_of(p.sequences_k, b);
  const int leftpad = p.cache.leftpad ? p.cache.leftpad[b] : 0;
  if (leftpad >= 0 && leftpad <= rows.length) return {};
  return invalid_argument(message("leftpad_k[", b, "] = ", leftpad, " but it must be from 0 to ",
                                  rows.length, ", the keys of that sequence"));
}

// The new tokens of sequence b have room, and the tables reach them and its queries.
Status check_new_tokens(const Problem& p, int64_t b) {
  const Index used = rows_of(p.sequences_k, b).length;
  const Index added = rows_of(p.append.sequences, b).length, most = p.sequences_k.max_length;
  if (used + added > most)
    return invalid_argument(message("seqused_k[", b, "] = ", used, " and ", added,
                                    " keys of k_new are appended but sequence ", b,
                                    " can have at most ", most, " keys"));
  const RotaryView& rotary = p.append.rotary;
  if (!rotary.given) return {};
  const bool has_offsets = p.append.rotary_offsets != nullptr;
  const Index first = has_offsets ? p.append.rotary_offsets[b] : used;
  const Index queries = rows_of(p.sequences_q, b).length;
  const Index count =
      std::max(added, p.mask_rule.is_none() ? std::min<Index>(queries, 1) : queries);
  if (first >= 0 && (count == 0 || first + count <= rotary.positions)) return {};
  return invalid_argument(message(has_offsets ? "rotary_offsets[" : "seqused_k[", b, "] = ", first,
                                  " but rotary_cos.shape[0] = ", rotary.positions,
                                  "; the tables must have a position for each of the ", count,
                                  " tokens from there on"));
}

// The pages of the keys that count, the appended ones too.
Status check_pages(const Problem& p, int64_t b) {
  const CacheKeys keys = p.keys_in_cache(b);
  if (keys.length() == 0) return {};
  const Index size = p.cache.page_size;
  for (Index i = keys.first / size; i <= (keys.first + keys.length() - 1) / size; ++i)
    FLASH3_CHECK(check_index(p.cache.page_table[b * p.cache.stride_table + i], p.cache.pages,
                             message("page_table[", b, "][", i, "]"), "the pages of k and v"));
  return {};
}

// No two new tokens go to one row: which is written last would be left to chance.
Status check_distinct(const Problem& p) {
  struct Written {
    Index element, row, sequence;
    bool operator<(const Written& other) const {
      return std::pair(element, row) < std::pair(other.element, other.row);
    }
  };
  std::vector<Written> all;
  for (Index b = 0; b < p.batch; ++b) {
    const CacheKeys keys = p.keys_in_cache(b);
    for (Index n = 0; n < keys.added; ++n) {
      const CacheRow at = cache_row(p.cache, b, keys.first + keys.cached + n);
      all.push_back({at.element, at.row, b});
    }
  }
  std::sort(all.begin(), all.end());
  for (size_t i = 1; i < all.size(); ++i)
    if (!(all[i - 1] < all[i]))
      return invalid_argument(message("sequences ", all[i - 1].sequence, " and ", all[i].sequence,
                                      " both append a key to k[", all[i].element, "][", all[i].row,
                                      "]; no two sequences may write one row"));
  return {};
}

}  // namespace

Status check_cache_places(const Problem& p) {
  if (p.append.given)
    FLASH3_CHECK(check_lengths_of(p.append.sequences, p.batch, "cu_seqlens_k_new", "", "k_new"));
  for (int64_t b = 0; b < p.batch; ++b) {
    FLASH3_CHECK(check_padding(p, b));
    if (p.cache.batch_idx)
      FLASH3_CHECK(check_index(p.cache.batch_idx[b], p.cache.elements,
                               message("cache_batch_idx[", b, "]"), "the elements of k and v"));
    if (p.append.given) FLASH3_CHECK(check_new_tokens(p, b));
    if (p.cache.paged) FLASH3_CHECK(check_pages(p, b));
  }
  return p.append.given ? check_distinct(p) : Status();
}

// ---- the fields of the problem ----

void fill_pages(const Params& p, Problem* problem) {
  KvCache& cache = problem->cache;
  const auto data = [](const flash3_tensor& t) { return static_cast<const int*>(t.data); };
  if (is_given(p.page_table)) {
    cache.paged = true;
    cache.page_table = data(p.page_table);
    cache.stride_table = p.page_table.shape[0] > 1 ? p.page_table.stride[0] : 0;
    cache.max_pages = p.page_table.shape[1];
    cache.page_size = p.k.shape[1];
    cache.pages = p.k.shape[0];
    Sequences& keys = problem->sequences_k;
    keys.rows = cache.max_pages * cache.page_size;
    keys.max_length = p.max_seqlen_k > 0 ? std::min<Index>(p.max_seqlen_k, keys.rows) : keys.rows;
  }
  cache.has_batch_idx = is_given(p.cache_batch_idx);
  cache.batch_idx = data(p.cache_batch_idx);
  cache.elements = cache.has_batch_idx ? p.k.shape[0] : 0;
  cache.has_leftpad = is_given(p.leftpad_k);
  cache.leftpad = data(p.leftpad_k);
}

void fill_append(const Params& p, Problem* problem) {
  if (!is_given(p.k_new)) return;
  Append& append = problem->append;
  append.given = true;
  append.dtype = p.k_new.dtype;
  Sequences& s = append.sequences;
  s.packed = is_given(p.cu_seqlens_k_new);
  s.cu = static_cast<const int*>(p.cu_seqlens_k_new.data);
  s.rows = s.max_length = p.k_new.shape[s.packed ? 0 : 1];
  s.bounded = !s.packed;
  const auto view_of = [&](const flash3_tensor& t) {
    return s.packed ? packed_view(t, problem->batch, s.max_length) : view(t);
  };
  append.k = view_of(p.k_new);
  append.has_v = is_given(p.v_new);
  if (append.has_v) append.v = view_of(p.v_new);
  if (!is_given(p.rotary_cos)) return;
  append.rotary = rotary_view(p.rotary_cos, p.rotary_sin, p.rotary_interleaved != 0);
  append.rotary_offsets = static_cast<const int*>(p.rotary_offsets.data);
}

}  // namespace flash3
