// SPDX-License-Identifier: Apache-2.0
#include "core/sequence_checks.hpp"

#include "core/cache_checks.hpp"
#include "core/message.hpp"

namespace flash3 {
namespace {

// One element for each query head, side by side.
Status check_head_field(const Field& f, const Field& q, Pointers pointers) {
  FLASH3_CHECK(check_sizes(f));
  FLASH3_CHECK(check_same({f, 0}, {q, q.ndim - 2}, "heads_q"));
  FLASH3_CHECK(check_strides(f));
  return check_data(f, pointers);
}

}  // namespace

Status check_index_field(const Field& f, int64_t least, const char* why, Pointers pointers) {
  const flash3_tensor& t = f.tensor;
  if (t.dtype != FLASH3_INT32)
    return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 4 (int32); ", f.name,
                                    " that is not given is all zero"));
  FLASH3_CHECK(check_sizes(f));
  if (t.shape[0] < least)
    return invalid_argument(
        message(f.part("shape", 0), " = ", t.shape[0], " but it must be at least ", least, why));
  FLASH3_CHECK(check_strides(f));
  return check_data(f, pointers);
}

Status check_sequence_fields(const SequenceFields& fields, Pointers pointers) {
  if (fields.packed())
    FLASH3_CHECK(check_index_field(fields.cu, 1, ", one more than there are sequences", pointers));
  if (fields.has_used()) FLASH3_CHECK(check_index_field(fields.used, 0, "", pointers));
  if (fields.max_length < 0)
    return invalid_argument(message(fields.max_name, " = ", fields.max_length,
                                    " but it must be at least 0 (0: not known)"));
  if (fields.max_length > 0 && !fields.packed() && !fields.paged)
    return invalid_argument(message(fields.max_name, " = ", fields.max_length, " but ",
                                    fields.cu.name, " is all zero; a maximum goes with packed ",
                                    "sequences alone"));
  return {};
}

Status check_used(const SequenceFields& fields, const Extent& batch) {
  return fields.has_used() ? check_same({fields.used, 0}, batch, "batch size") : Status();
}

Status check_sink(const Field& sink, const Field& q, const Field& out, Pointers pointers) {
  const flash3_dtype dtype = sink.tensor.dtype;
  if (dtype != FLASH3_FLOAT32 && dtype != out.tensor.dtype)
    return invalid_argument(message(sink.name, ".dtype = ", static_cast<int32_t>(dtype), " but ",
                                    out.name, ".dtype = ", static_cast<int32_t>(out.tensor.dtype),
                                    "; a sink must be 3 (float32) or have the dtype of out, and ",
                                    "one that is not wanted is all zero"));
  return check_head_field(sink, q, pointers);
}

Status check_dsink(const Field& dsink, const Field& sink, const Field& q, Pointers pointers) {
  if (!is_given(sink.tensor))
    return invalid_argument(message(dsink.name, " is given but ", sink.name,
                                    " is all zero; a gradient needs the sink that it belongs to"));
  if (dsink.tensor.dtype != sink.tensor.dtype)
    return invalid_argument(
        message(dsink.name, ".dtype = ", static_cast<int32_t>(dsink.tensor.dtype), " but ",
                sink.name, ".dtype = ", static_cast<int32_t>(sink.tensor.dtype), "; ", sink.name,
                " and ", dsink.name, " must have the same dtype"));
  return check_head_field(dsink, q, pointers);
}

Status check_lengths_of(const Sequences& s, int64_t batch, const char* cu, const char* used,
                        const char* max_name) {
  for (int64_t b = 0; s.cu && b <= batch; ++b) {
    const int64_t begin = b > 0 ? s.cu[b - 1] : 0, end = s.cu[b];
    if (end < begin && b > 0)
      return invalid_argument(message(cu, "[", b, "] = ", end, " but ", cu, "[", b - 1,
                                      "] = ", begin, "; ", cu, " must not decrease"));
    if (end < 0 || end > s.rows)
      return invalid_argument(message(cu, "[", b, "] = ", end, " but it must be from 0 to ", s.rows,
                                      ", the rows of the packed tensors"));
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t capacity = s.cu ? s.cu[b + 1] - s.cu[b] : s.rows;
    if (s.used && (s.used[b] < 0 || s.used[b] > capacity))
      return invalid_argument(message(used, "[", b, "] = ", s.used[b], " but it must be from 0 to ",
                                      capacity, ", the rows of that sequence"));
    const int64_t length = s.used ? s.used[b] : capacity;
    if (length > s.max_length)
      return invalid_argument(message(max_name, " = ", s.max_length, " but sequence ", b, " has ",
                                      length, " tokens; no sequence may be longer"));
  }
  return {};
}

template <class P>
static Status check_lengths_of_call(const P& p) {
  FLASH3_CHECK(
      check_lengths_of(p.sequences_q, p.batch, "cu_seqlens_q", "seqused_q", "max_seqlen_q"));
  return check_lengths_of(p.sequences_k, p.batch, "cu_seqlens_k", "seqused_k", "max_seqlen_k");
}

Status check_lengths(const Problem& p) {
  FLASH3_CHECK(check_lengths_of_call(p));
  return p.has_cache() ? check_cache_places(p) : Status();
}
Status check_lengths(const QuantizeProblem& p) { return check_lengths_of_call(p); }

}  // namespace flash3
