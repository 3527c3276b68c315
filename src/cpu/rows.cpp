// SPDX-License-Identifier: Apache-2.0
#include "cpu/rows.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/arithmetic.hpp"
#include "core/convert.hpp"
#include "core/interrupt.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Index kRowsAtOnce = 16;

// One row of one head: each part is brought to the largest lse, then they add up.
void merge_row(const MergeProblem& p, Index row, Index head) {
  const float* lse = p.lse_parts.data + head * p.lse_parts.stride_head + row;
  const float sink = p.sink.data ? load_float(p.sink.data, p.sink.dtype, head) : -kInfinity;
  float max = sink;
  for (Index s = 0; s < p.parts; ++s) max = std::max(max, lse[s * p.lse_parts.stride_batch]);
  const float origin = max == -kInfinity ? 0.f : max;

  float out[kMaxMergedDim] = {};
  float sum = std::exp(sink - origin);
  for (Index s = 0; s < p.parts; ++s) {
    const float part = lse[s * p.lse_parts.stride_batch];
    if (part == -kInfinity) continue;  // saw no key: its out may hold anything
    const float weight = std::exp(part - origin);
    const float* of_part = static_cast<const float*>(p.out_parts.data) +
                           s * p.out_parts.stride_batch + row * p.out_parts.stride_seq +
                           head * p.out_parts.stride_head;
    sum += weight;
    for (int d = 0; d < p.head_dim_v; ++d) out[d] += weight * of_part[d];
  }
  const Index at = row * p.out.stride_seq + head * p.out.stride_head;
  for (int d = 0; d < p.head_dim_v; ++d)
    store_float(p.out.data, p.out_dtype, at + d, sum == 0 ? 0.f : out[d] / sum);
  if (p.lse.data)
    p.lse.data[head * p.lse.stride_head + row] = sum == 0 ? -kInfinity : origin + std::log(sum);
}

}  // namespace

MergePlan plan_merge(const MergeProblem& p) {
  const double elements = static_cast<double>(p.rows * p.heads) * (p.head_dim_v + 8);
  return {.threads = threads_for(elements * static_cast<double>(p.parts + 1), p.num_threads)};
}

Status run_merge(const MergeProblem& p, const MergePlan& plan) {
  const Index rows = p.rows * p.heads, blocks = ceil_div(rows, kRowsAtOnce);
  std::atomic<Index> next{0};
  Interrupt interrupt;
  run_workers(
      static_cast<int>(std::min<Index>(plan.threads, std::max<Index>(blocks, 1))), [&](int worker) {
        for (Index block; !interrupt.ends(worker) && (block = next.fetch_add(1)) < blocks;)
          for (Index i = block * kRowsAtOnce; i < std::min((block + 1) * kRowsAtOnce, rows); ++i)
            merge_row(p, i / p.heads, i % p.heads);
      });
  return interrupt.status();
}

namespace {

// A run of elements without gaps.
void fill(char* at, int64_t elements, const PaddedTensor& tensor) {
  if (tensor.bits == 0) {
    std::memset(at, 0, static_cast<size_t>(elements * tensor.element_bytes));
  } else {
    auto* const words = reinterpret_cast<uint32_t*>(at);
    std::fill(words, words + elements, tensor.bits);
  }
}

void fill(const RowGap& gap, const PaddedTensor& tensor) {
  const TensorView& view = tensor.view;
  for (Index row = gap.begin; row < gap.end; ++row)
    for (Index head = 0; head < view.heads; ++head) {
      const Index at =
          gap.element * view.stride_batch + row * view.stride_seq + head * view.stride_head;
      fill(static_cast<char*>(view.data) + at * tensor.element_bytes, view.dim, tensor);
    }
}

}  // namespace

void fill_padding(const Padding& padding) {
  for (int i = 0; i < padding.count; ++i) {
    const PaddedTensor& tensor = padding.tensors[i];
    const Index gaps = gap_count(tensor.sequences, padding.batch);
    for (Index gap = 0; gap < gaps; ++gap)
      fill(row_gap(tensor.sequences, padding.batch, gap), tensor);
  }
}

}  // namespace flash3::cpu
