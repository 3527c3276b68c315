// SPDX-License-Identifier: Apache-2.0
#include "cli/suites.hpp"

#include <algorithm>
#include <cmath>

#include "cases/printable.hpp"
#include "cases/sequences.hpp"
#include "cli/commands.hpp"

namespace flash3::cli {
namespace {

cases::Case self_attention(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t hidden,
                           int64_t head_dim, bool causal) {
  cases::Case c;
  c.dtype = dtype;
  c.batch = batch;
  c.seq_q = c.seq_k = seq;
  c.heads_q = c.heads_k = hidden / head_dim;
  c.head_dim = c.head_dim_v = head_dim;
  c.causal = causal;
  return c;
}

std::vector<cases::Case> sweep(flash3_dtype dtype, int64_t tokens, int64_t hidden, int64_t first,
                               int64_t last) {
  std::vector<cases::Case> suite;
  for (const int64_t head_dim : {64, 128, 256})
    for (const bool causal : {false, true})
      for (int64_t seq = first; seq <= last; seq *= 2)
        suite.push_back(self_attention(dtype, tokens / seq, seq, hidden, head_dim, causal));
  return suite;
}

std::vector<cases::Case> windows(flash3_dtype dtype, int64_t tokens, int64_t hidden) {
  std::vector<cases::Case> suite;
  for (const int64_t head_dim : {64, 128}) {
    cases::Case c = self_attention(dtype, 1, tokens, hidden, head_dim, true);
    for (int64_t left = 128; left < tokens; left *= 2) {
      c.window = true, c.window_left = left;
      suite.push_back(c);
    }
    c.window = false, c.window_left = -1;
    suite.push_back(c);
  }
  return suite;
}

// (a) Equal lengths as ragged.
void add_equal(const std::vector<cases::Case>& dense, std::vector<BenchPoint>* suite) {
  for (const cases::Case& c : dense) {
    BenchPoint point{c, c};
    point.c.packed_q = point.c.packed_k = true;
    suite->push_back(point);
  }
}

// (b) Long-tailed lengths.
void add_log_normal(flash3_dtype dtype, int64_t tokens, int64_t hidden,
                    std::vector<BenchPoint>* suite) {
  constexpr int64_t kDraws = 20;
  for (const int64_t head_dim : {64, 128})
    for (int64_t draw = 1; draw <= kDraws; ++draw) {
      const std::vector<int64_t> lengths = cases::log_normal_lengths(tokens, draw);
      cases::Case c =
          self_attention(dtype, static_cast<int64_t>(lengths.size()),
                         *std::max_element(lengths.begin(), lengths.end()), hidden, head_dim, true);
      c.lengths = cases::Lengths::kLogNormal;
      c.tokens = tokens, c.draw = draw;
      c.packed_q = c.packed_k = true;
      const int64_t seq = std::llround(cost_per_token(c));
      const int64_t batch = std::max<int64_t>(1, (tokens + seq / 2) / seq);
      suite->push_back({c, self_attention(dtype, batch, seq, hidden, head_dim, true)});
    }
}

// (c) Short sequences: so many times `tokens` in all.
void add_short(flash3_dtype dtype, int64_t tokens, int64_t hidden, std::vector<BenchPoint>* suite) {
  for (const int64_t seq : {16, 64}) {
    cases::Case c = self_attention(dtype, tokens / seq, seq, hidden, 128, false);
    c.packed_q = c.packed_k = true;
    suite->push_back({c, {}});
  }
}

// (d) What models put into the scores, and gpt-oss's window.
void add_models(flash3_dtype dtype, int64_t tokens, int64_t hidden,
                std::vector<BenchPoint>* suite) {
  constexpr float kSoftcap = 50;  // Gemma's
  for (const int64_t head_dim : {64, 128, 256}) {
    const cases::Case plain = self_attention(dtype, 1, tokens, hidden, head_dim, true);
    cases::Case sink = plain, softcap = plain;
    sink.sink = cases::Sink::kFloat32;
    softcap.softcap = kSoftcap;
    suite->insert(suite->end(), {{plain, {}}, {sink, plain}, {softcap, plain}});
  }
  cases::Case window = self_attention(dtype, 1, tokens, 2 * hidden, 64, true);
  window.heads_k = window.heads_q / 8;
  window.window = true, window.window_left = 128;
  suite->push_back({window, {}});
}

std::vector<BenchPoint> alone(const std::vector<cases::Case>& list) {
  std::vector<BenchPoint> suite;
  for (const cases::Case& c : list) suite.push_back({c, {}});
  return suite;
}

}  // namespace

std::vector<BenchPoint> bench_suite(const std::string& name, flash3_backend backend,
                                    flash3_dtype dtype) {
  const bool gpu = backend == FLASH3_BACKEND_HOPPER;
  const int64_t tokens = gpu ? 16384 : 4096;
  const int64_t hidden = gpu ? 2048 : 512;
  if (name == "quick") return alone(sweep(dtype, tokens, hidden, tokens / 4, tokens / 4));
  if (name == "forward") return alone(sweep(dtype, tokens, hidden, 512, tokens));
  if (name == "fp8") {
    std::vector<BenchPoint> suite;
    for (const cases::Case& c : sweep(dtype, tokens, hidden, 512, tokens)) {
      BenchPoint point{c, c};
      point.c.dtype = FLASH3_FLOAT8_E4M3;
      point.c.out_dtype = dtype == FLASH3_BFLOAT16 ? FLASH3_DTYPE_NONE : dtype;
      point.c.scales = cases::Scales::kBlock;
      suite.push_back(point);
    }
    return suite;
  }
  if (name == "backward") {
    std::vector<cases::Case> suite = sweep(dtype, tokens, hidden, 512, tokens);
    for (cases::Case& c : suite) c.backward = true;
    return alone(suite);
  }
  if (name == "window")
    return alone(gpu ? windows(dtype, 32768, hidden) : windows(dtype, 2048, 128));
  if (name == "ragged") {
    std::vector<BenchPoint> suite;
    add_equal(sweep(dtype, tokens, hidden, 512, tokens), &suite);
    add_log_normal(dtype, 4 * tokens, hidden, &suite);
    add_short(dtype, 4 * tokens, hidden, &suite);
    add_models(dtype, tokens, hidden, &suite);
    return suite;
  }
  if (name == "masks") return mask_suite(gpu, dtype);
  if (name == "decode") return decode_suite(gpu, dtype);
  throw UsageError("suite " + cases::in_quotes(name) +
                   " is not one of quick, forward, backward, window, ragged, fp8, masks, decode");
}

}  // namespace flash3::cli
