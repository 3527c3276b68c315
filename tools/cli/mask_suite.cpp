// SPDX-License-Identifier: Apache-2.0
// flash3 bench --suite masks.
#include <algorithm>

#include "cases/sequences.hpp"
#include "cli/suites.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::CaseMask;
using cases::CaseMaskSource;

class MaskSuite {
 public:
  MaskSuite(bool gpu, flash3_dtype dtype) : gpu_(gpu), dtype_(dtype) {}

  std::vector<BenchPoint> points() {
    for (const int64_t seq :
         gpu_ ? std::vector<int64_t>{4096, 16384} : std::vector<int64_t>{512, 2048})
      add({CaseMaskSource::kCausal}, call(seq, 128), causal(seq, 128));
    for (const int64_t dim : {64, 128, 256}) add_documents(dim);
    const int64_t window = gpu_ ? 1024 : 256, sinks = gpu_ ? 64 : 16;
    Case windowed = causal(longest(), 128);
    windowed.window = true, windowed.window_left = window - 1;
    add({.source = CaseMaskSource::kSinks, .n = sinks, .newest = window}, call(longest(), 128),
        windowed);
    const int64_t half = longest() / 2;
    add({.source = CaseMaskSource::kPrefix, .n = half / 4}, call(half, 128), causal(half, 128));
    for (const int64_t size : {128, 64})
      for (const int64_t percent : {10, 25, 50})
        add({.source = CaseMaskSource::kShare,
             .block_rows = size,
             .block_keys = size,
             .n = percent,
             .of_heads = true},
            call(longest(), 128), call(longest(), 128));
    const int64_t quarter = longest() / 4;
    add({CaseMaskSource::kCoins}, call(quarter, 128), call(quarter, 128));
    return std::move(suite_);
  }

 private:
  int64_t longest() const { return gpu_ ? 32768 : 2048; }

  Case call(int64_t seq, int64_t dim) const {
    Case c;
    c.dtype = dtype_;
    c.batch = 1;
    c.seq_q = c.seq_k = seq;
    c.heads_q = c.heads_k = gpu_ ? 16 : 4;
    c.head_dim = c.head_dim_v = dim;
    return c;
  }
  Case causal(int64_t seq, int64_t dim) const {
    Case c = call(seq, dim);
    c.causal = true;
    return c;
  }

  void add(const CaseMask& mask, Case c, const Case& beside) {
    c.mask = mask;
    for (const bool backward : {false, true}) {
      BenchPoint point{c, beside};
      point.c.backward = point.beside->backward = backward;
      suite_.push_back(point);
    }
  }

  // Beside the same documents as a ragged batch.
  void add_documents(int64_t dim) {
    constexpr int64_t kDraw = 1;
    const std::vector<int64_t> lengths = cases::log_normal_lengths(longest(), kDraw);
    Case ragged = causal(*std::max_element(lengths.begin(), lengths.end()), dim);
    ragged.batch = static_cast<int64_t>(lengths.size());
    ragged.lengths = cases::Lengths::kLogNormal;
    ragged.tokens = longest(), ragged.draw = kDraw;
    ragged.packed_q = ragged.packed_k = true;
    add({.source = CaseMaskSource::kLogNormal, .n = kDraw}, causal(longest(), dim), ragged);
  }

  const bool gpu_;
  const flash3_dtype dtype_;
  std::vector<BenchPoint> suite_;
};

}  // namespace

std::vector<BenchPoint> mask_suite(bool gpu, flash3_dtype dtype) {
  return MaskSuite(gpu, dtype).points();
}

}  // namespace flash3::cli
