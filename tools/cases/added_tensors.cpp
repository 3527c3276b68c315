// SPDX-License-Identifier: Apache-2.0
#include "cases/added_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/cache_tensors.hpp"
#include "cases/internals.hpp"
#include "cases/sequences.hpp"

namespace flash3::cases {
namespace {

// By the seed, but for the usual one: not all tensors of a call have one dtype.
flash3_dtype dtype_of(const Case& c, const ParamField& field) {
  if (field.dtype != FLASH3_DTYPE_NONE) return field.dtype;
  const ParamField* const like = find_field<flash3_forward_params>(field.like);
  if (like) return c.seed % 2 == 1 ? dtype_of(c, *like) : FLASH3_FLOAT32;
  if (c.seed % 3 == 2) return FLASH3_FLOAT32;
  if (c.seed % 3 == 0)
    return c.dtype_of_out() == FLASH3_BFLOAT16 ? FLASH3_FLOAT16 : FLASH3_BFLOAT16;
  return c.dtype_of_out();
}

// D of a table: 128, as T5 has it, or by the seed less than the lengths or more.
int64_t distance_of(const Case& c) {
  return c.seed == 1
             ? 128
             : static_cast<int64_t>(mix(c.seed) % static_cast<uint64_t>(c.seq_q + c.seq_k + 2));
}

// Keys that a sequence may have.
int64_t most_keys(const Case& c, const SequenceLengths& keys) {
  return c.packed_k && c.max_known && c.seq_k > 0 ? c.seq_k : keys.rows;  // 0: not known
}

// Forbids elements of rows and keys that no sequence has in use.
void forbid_unused_pairs(const CaseSequences& sequences, const Case& c, GuardedTensor* tensor) {
  const flash3_tensor& t = tensor->view;
  const Sequences q = sequences.q.view();
  std::vector<int64_t> used(static_cast<size_t>(t.shape[0] * t.shape[2]));  // keys of each row
  for (int64_t b = 0; b < c.batch; ++b) {
    const SeqInfo s = sequences[b];
    for (int64_t i = 0; i < s.q.length; ++i) {
      const int64_t row = t.shape[2] == 1 ? 0 : (q.packed ? s.q.first : 0) + i;
      int64_t& most = used[static_cast<size_t>((t.shape[0] == 1 ? 0 : b) * t.shape[2] + row)];
      most = std::max<int64_t>(most, s.k.length);
    }
  }
  for (int64_t b = 0; b < t.shape[0]; ++b)
    for (int64_t h = 0; h < t.shape[1]; ++h)
      for (int64_t i = 0; i < t.shape[2]; ++i) {
        const int64_t first = b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
        const int64_t most = used[static_cast<size_t>(b * t.shape[2] + i)];
        if (most < t.shape[3]) tensor->forbidden.push_back({first + most, first + t.shape[3]});
      }
  tensor->fill_forbidden();
}

void fill_input(std::string_view shape, uint64_t seed, const flash3_tensor& t) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  if (shape == "state") {
    for (int i = 0; i < 2; ++i)
      static_cast<int64_t*>(t.data)[i] = static_cast<int64_t>(mix(mix(seed) + uint64_t(i)));
    return;
  }
  const bool may_hide = is_of_pairs(shape) || is_of_distances(shape);
  const int64_t width = t.shape[t.ndim - 1];
  uint64_t i = 0;
  for_each_row(t, [&](int64_t row) {
    // One row of pairs in 16 hides all of its keys, if it has queries of its own.
    const bool hides = is_of_pairs(shape) && has_dim(shape, 'q') && mix(seed ^ ~i) % 16 == 0;
    for (int64_t d = 0; d < width; ++d, ++i) {
      const uint64_t draw = mix(seed ^ i);
      const float x = std::ldexp(normal_value(seed, i), -static_cast<int>(draw % 8));
      store_float(t.data, t.dtype, row + d,
                  hides || (may_hide && (draw >> 8) % 32 == 0) ? kHidden : x);
    }
  });
}

}  // namespace

flash3_tensor added_view(const Case& c, const ParamField& field, const CaseSequences& sequences) {
  const ParamField* const like = find_field<flash3_forward_params>(field.like);
  const std::string_view shape = c.added.shape_of(like ? *like : field);
  if (shape.empty()) return {};
  flash3_tensor view{};
  if (shape == "heads") view = vector_view({}, c.heads_q);
  if (shape == "batch_heads") view = {{}, {}, 2, {c.batch, c.heads_q}, {c.heads_q, 1}};
  if (shape == "state") view = vector_view({}, 2);
  if (shape == "rows") view = rows_lse_view(c, TensorName::kLse, sequences.q);
  if (is_of_distances(shape)) {
    const int64_t heads = has_dim(shape, 'h') ? c.heads_q : 1, entries = 2 * distance_of(c) + 1;
    view = {{}, {}, 2, {heads, entries}, {entries, 1}};
  }
  if (is_of_pairs(shape))
    view = view_of({}, has_dim(shape, 'b') && !c.packed_q ? c.batch : 1,
                   has_dim(shape, 'h') ? c.heads_q : 1, has_dim(shape, 'q') ? sequences.q.rows : 1,
                   most_keys(c, sequences.k), c.layout_of(TensorName::kLse));
  view.dtype = dtype_of(c, field);
  return view;
}

void add_added(const Case& c, const CaseSequences& sequences, ExtraTensors* tensors) {
  uint64_t seed = c.seed + (uint64_t{1} << 45);
  ExtraTensors::visit(
      [&](const ParamField& field, GuardedTensor& to) {
        const flash3_tensor view = added_view(c, field, sequences);
        if (view.ndim == 0) return;
        const std::string_view shape = c.added.shape_of(field);
        to = guard(view, c.layout_of(TensorName::kLse).offset);
        if (!field.is_written) fill_input(shape, seed++, to.view);
        if (!c.is_ragged()) return;
        if (is_of_pairs(shape)) forbid_unused_pairs(sequences, c, &to);
        if (shape == "rows" && !(field.is_written && c.fill))
          forbid_rows(&to, sequences.q, c.batch, {RowUse::kUnused, RowUse::kOutside},
                      /*is_lse=*/true);
      },
      *tensors);
}

bool goes_with(const Case& c, const ParamField& tensor) {
  if (!tensor.is_written && c.distribution == Distribution::kSpecial) return false;
  if (c.has_cache() && is_of_pairs(tensor.shapes)) return false;  // make_cache_extra() has none
  if (tensor.without.empty()) return true;
  const flash3_forward_params p = make_question(c);
  for (int64_t i = 0; i < count_words(tensor.without); ++i) {
    const ParamField* other = find_field<flash3_forward_params>(word_at(tensor.without, i));
    if (other && other->kind == FieldKind::kTensor && other->tensor(&p)->ndim > 0) return false;
  }
  return true;
}

bool takes_added_tensors(flash3_backend backend, const Case& c) {
  if (backend == FLASH3_BACKEND_CPU) return true;
  bool takes = true, is_biased = c.dropout > 0;
  AddedOptions::visit(c.added, [&](const ParamField& field, int64_t value) {
    if (value == 0) return;
    if (field.is_cpu_alone) takes = false;
    if (field.name != "max_logits") is_biased = true;
  });
  // Kernels of FP8 add what depends on the distance alone; those that widen keys add nothing, nor
  // do those of latent attention.
  const bool has_fp8_keys = c.fp8 || c.dtype_of_kv() == FLASH3_FLOAT8_E4M3;
  if (has_fp8_keys && (c.added["max_logits"] != 0 || c.added["bias"] != 0)) return false;
  if (!is_biased || !takes) return takes;
  if ((has_fp8_keys && !c.fp8 && c.dtype != FLASH3_FLOAT8_E4M3) || c.latent || c.qv) return false;
  return !c.has_cache() || takes_cache_by_tma(backend, c);
}

}  // namespace flash3::cases
