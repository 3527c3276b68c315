// SPDX-License-Identifier: Apache-2.0
#include "cpu/append.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu/parallel.hpp"
#include "cpu/row_transforms.hpp"
#include "cpu/sequence.hpp"

namespace flash3::cpu {
namespace {

constexpr Index kTokensAtOnce = 16;

// All tokens of these sequences that count.
std::vector<Tokens> tokens_of(const Sequences& sequences, Index batch) {
  std::vector<Tokens> tasks;
  for (Index b = 0; b < batch; ++b) {
    const Index count = rows_of(sequences, b).length;
    for (Index i = 0; i < count; i += kTokensAtOnce)
      tasks.push_back({b, i, std::min(i + kTokensAtOnce, count)});
  }
  return tasks;
}

// Calls each(batch, token) for all of them, on as many threads as they are worth. A token has so
// many elements.
template <class Each>
void for_each_token(const std::vector<Tokens>& tasks, Index elements, int num_threads,
                    const Each& each) {
  constexpr double kWorkOfElement = 8;  // in multiply-adds
  double tokens = 0;
  for (const Tokens& task : tasks) tokens += static_cast<double>(task.end - task.begin);
  const auto size = static_cast<Index>(tasks.size());
  const int threads =
      threads_for(tokens * kWorkOfElement * static_cast<double>(elements), num_threads);
  std::atomic<Index> next{0};
  run_workers(static_cast<int>(std::clamp<Index>(size, 1, threads)), [&](int) {
    for (Index i; (i = next.fetch_add(1)) < size;) {
      const Tokens& task = tasks[static_cast<size_t>(i)];
      for (Index token = task.begin; token < task.end; ++token) each(task.batch, token);
    }
  });
}

const std::byte* element_at(const TensorView& t, flash3_dtype dtype, Index offset) {
  return static_cast<const std::byte*>(t.data) + offset * dtype_size(dtype);
}

// One row as it is.
void copy_row(const TensorView& from, Index from_offset, const TensorView& to, Index to_offset,
              flash3_dtype dtype) {
  std::memcpy(static_cast<std::byte*>(to.data) + to_offset * dtype_size(dtype),
              element_at(from, dtype, from_offset),
              static_cast<size_t>(from.dim * dtype_size(dtype)));
}

// What rows of q and k get on their way: an embedding, then the rotation; of either, if it is
// there.
struct Transform {
  const RotaryView* rotary = nullptr;
  const Rotation* rotation = nullptr;

  // The dimensions that it changes: so many from the first.
  Index dims(Index dim) const { return rotation ? dim : rotary ? rotary->dim : 0; }
  void apply(Index position, float* row) const {
    if (rotary) apply_rope(*rotary, position, row);
    if (rotation) rotation->apply(row);
  }
};

// The transform of a call's q and k_new.
class CallTransform {
 public:
  explicit CallTransform(const ForwardProblem& p) {
    if (p.append.rotary.given) transform_.rotary = &p.append.rotary;
    if (p.rotates) transform_.rotation = &rotation_.emplace(p.rotation_seed, p.head_dim);
  }
  CallTransform(const CallTransform&) = delete;
  CallTransform& operator=(const CallTransform&) = delete;

  const Transform& get() const { return transform_; }

 private:
  std::optional<Rotation> rotation_;
  Transform transform_;
};

// One row with its transform. The dimensions after those that this changes are copied as they are,
// bit for bit.
void transform_row(const Transform& transform, Index position, const TensorView& from,
                   Index from_offset, const TensorView& to, Index to_offset, flash3_dtype dtype) {
  copy_row(from, from_offset, to, to_offset, dtype);
  const Index dims = transform.dims(from.dim);
  float row[kMaxScoreDim];
  for (Index d = 0; d < dims; ++d) row[d] = load_float(from.data, dtype, from_offset + d);
  transform.apply(position, row);
  for (Index d = 0; d < dims; ++d) store_float(to.data, dtype, to_offset + d, row[d]);
}

// One row with its transform into an FP8 cache: each element over the scale of the row where it
// goes, rounded once.
void quantize_row(const ForwardProblem& p, const Transform& transform, Index position,
                  const TensorView& from, Index from_offset, const TensorView& to, Index to_offset,
                  float scale) {
  float row[kMaxHeadDim];
  for (Index d = 0; d < from.dim; ++d)
    row[d] = load_float(from.data, p.append.dtype, from_offset + d);
  transform.apply(position, row);
  auto* codes = static_cast<unsigned char*>(to.data) + to_offset;
  for (Index d = 0; d < from.dim; ++d) codes[d] = float_to_e4m3(row[d] / scale);
}

// One row of a new token into the cache: of k, with the transform of `position`, or of v, with
// none.
void append_row(const ForwardProblem& p, const Transform& transform, Index position,
                const TensorView& from, Index from_offset, const TensorView& to, Index to_offset,
                float scale) {
  if (p.append.dtype != p.kv_dtype)
    quantize_row(p, transform, position, from, from_offset, to, to_offset, scale);
  else
    transform_row(transform, position, from, from_offset, to, to_offset, p.kv_dtype);
}

// The position of a sequence's first new token.
Index first_position(const ForwardProblem& p, Index b) {
  return p.append.rotary_offsets ? p.append.rotary_offsets[b] : rows_of(p.sequences_k, b).length;
}

Index cache_offset(const TensorView& t, const CacheRow& at, Index head) {
  return at.element * t.stride_batch + at.row * t.stride_seq + head * t.stride_head;
}

}  // namespace

Preparation::Preparation(const ForwardProblem& problem) : p_(problem) {
  if (p_.append.given) new_keys_ = tokens_of(p_.append.sequences, p_.batch);
  if (p_.transforms_q() && p_.has_output()) queries_ = tokens_of(p_.sequences_q, p_.batch);
}

void Preparation::append_keys() const {
  const ForwardProblem& p = p_;
  const Append& append = p.append;
  const CallTransform transform(p);
  const Index elements = p.heads_k * (p.head_dim + p.head_dim_v);
  for_each_token(new_keys_, elements, p.num_threads, [&](Index b, Index n) {
    const RowRange rows = rows_of(append.sequences, b);
    const CacheKeys keys = p.keys_in_cache(b);
    const CacheRow at = cache_row(p.cache, b, keys.first + keys.cached + n);
    for (Index head = 0; head < p.heads_k; ++head) {
      append_row(p, transform.get(), first_position(p, b) + n, append.k,
                 row_offset(append.k, b, rows, n, head), p.k, cache_offset(p.k, at, head),
                 cache_scale(p.k_scale, b, head, at));
      if (!append.has_v) continue;  // it has been written with k
      append_row(p, {}, 0, append.v, row_offset(append.v, b, rows, n, head), p.v,
                 cache_offset(p.v, at, head), cache_scale(p.v_scale, b, head, at));
    }
  });
}

size_t transformed_q_bytes(const ForwardProblem& p) {
  if (!p.transforms_q() || !p.has_output()) return 0;
  return static_cast<size_t>(most_queries(p) * p.heads_q * p.head_dim * dtype_size(p.dtype));
}

TensorView Preparation::transform_q(void* memory) const {
  const ForwardProblem& p = p_;
  const CallTransform transform(p);
  TensorView to = p.q;
  to.data = memory;
  to.stride_head = p.head_dim;
  to.stride_seq = p.heads_q * p.head_dim;
  to.stride_batch = p.sequences_q.packed ? 0 : p.seq_q * to.stride_seq;
  for_each_token(queries_, p.heads_q * p.head_dim, p.num_threads, [&](Index b, Index i) {
    const RowRange rows = rows_of(p.sequences_q, b);
    const Index position = p.append.rotary.given ? p.query_position(first_position(p, b), i) : 0;
    for (Index head = 0; head < p.heads_q; ++head)
      transform_row(transform.get(), position, p.q, row_offset(p.q, b, rows, i, head), to,
                    row_offset(to, b, rows, i, head), p.dtype);
  });
  return to;
}

}  // namespace flash3::cpu
