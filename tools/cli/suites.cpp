// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cases/internals.hpp"
#include "cases/sequences.hpp"
#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/workbench.hpp"

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

namespace {

using cases::Case;

struct Shape {
  int64_t batch, context;
};
struct Heads {
  int64_t q, k;
};

constexpr int64_t kThousand = 1024, kPrompt = 512;
constexpr Heads kUsual{32, 8};
// One short batch, a long one, and ones that fill a GPU.
constexpr Shape kSome[] = {{1, 16 * kThousand}, {16, 4 * kThousand}, {64, 4 * kThousand}};
constexpr Shape kDrafts[] = {{1, 4 * kThousand},  {1, 16 * kThousand},  {1, 128 * kThousand},
                             {16, 4 * kThousand}, {16, 16 * kThousand}, {64, 4 * kThousand}};

class DecodeSuite {
 public:
  DecodeSuite(bool gpu, flash3_dtype dtype) : gpu_(gpu), dtype_(dtype) {}

  std::vector<BenchPoint> make() {
    add_contexts();
    add_pages();
    add_heads_and_dims();
    add_queries();
    add_few_tiles();
    add_lengths();
    add_latent();
    if (dtype_ != FLASH3_FLOAT32) add_fp8_keys();
    return std::move(suite_);
  }

 private:
  Case decode(const Shape& shape, const Heads& heads = kUsual, int64_t head_dim = 128) const {
    const int64_t shorter = gpu_ ? 1 : 64, fewer = gpu_ ? 1 : 4;
    Case c;
    c.dtype = dtype_;
    c.batch = shape.batch, c.seq_k = shape.context / shorter;
    c.heads_k = ceil_div(heads.k, fewer);
    c.heads_q = heads.q / heads.k * c.heads_k;
    c.head_dim = c.head_dim_v = head_dim;
    c.causal = c.used_k = true;
    return c;
  }
  int64_t prompt() const { return gpu_ ? kPrompt : kPrompt / 16; }

  void add(const Case& c, std::optional<Case> beside = {}) { suite_.push_back({c, beside}); }

  void add_contexts() {
    const struct {
      int64_t batch;
      std::vector<int64_t> thousands;
    } all[] = {{1, {1, 4, 16, 64, 128}},
               {4, {4, 64}},
               {16, {1, 4, 16, 128}},
               {64, {4, 64}},
               {256, {1, 4, 16}}};
    for (const auto& [batch, thousands] : all)
      for (const int64_t n : thousands) add(decode({batch, n * kThousand}));
  }

  void add_paged(const Case& dense, int64_t page_size) {
    Case paged = dense;
    paged.page_size = page_size;
    add(paged, dense);
  }

  void add_pages() {
    for (const Shape& shape : {kSome[0], kSome[1], kSome[2], Shape{16, 16 * kThousand}})
      for (const int64_t page_size : {64, 16, 1}) add_paged(decode(shape), page_size);
  }

  void add_heads_and_dims() {
    for (const Shape& shape : {kSome[0], kSome[1]}) {
      for (const Heads& heads : {Heads{8, 1}, {16, 16}, {64, 8}, {128, 8}})
        add(decode(shape, heads));
      for (const int64_t head_dim : {64, 256}) add(decode(shape, kUsual, head_dim));
    }
  }

  // Drafts, in a row and in a tree, beside one query; and parts of a prompt.
  void add_queries() {
    for (const Shape& shape : kDrafts)
      for (const int64_t queries : {2, 4, 8, 16}) {
        Case few = decode(shape);
        few.seq_q = queries;
        add(few, decode(shape));
      }
    for (const Shape& shape : kSome)
      for (const int64_t queries : {2, 4, 8, 16, 32}) {
        Case drafts = decode(shape);
        drafts.seq_q = queries;
        drafts.causal = false, drafts.tree = true;
        add(drafts, decode(shape));
      }
    Case part = decode({4, 16 * kThousand});
    part.seq_q = prompt();
    add(part);
    add_paged(part, 64);
  }

  // Parts of a prompt whose query tiles do not fill a GPU, beside ones that do.
  void add_few_tiles() {
    for (const Heads& heads : {Heads{8, 1}, kUsual})
      for (const int64_t queries : {kPrompt, 4 * kPrompt})
        for (const int64_t thousands : {16, 64, 128}) {
          Case part = decode({1, thousands * kThousand}, heads);
          part.seq_q = gpu_ ? queries : queries / 16;
          add(part);
          add_paged(part, 64);
        }
  }

  void add_lengths() {
    for (const Shape& shape : {kSome[1], kSome[2]}) {
      Case mixed = decode(shape);
      mixed.seq_q = prompt();
      mixed.lengths = cases::Lengths::kMixed, mixed.packed_q = true;
      add(mixed);
    }
    for (const Shape& shape : {Shape{16, 16 * kThousand}, {64, 64 * kThousand}}) {
      Case ragged = decode(shape);
      ragged.lengths = cases::Lengths::kLogUniform;
      Case equal = decode(shape);
      equal.seq_k = std::llround(cost_per_token(ragged));
      add(ragged, equal);
    }
  }

  // Multi-head latent attention as DeepSeek-V3 decodes with it, on all heads of a layer or on those
  // of one GPU of eight; q in two parts beside q in one.
  void add_latent() {
    for (const int64_t heads : {128, 16})
      for (const int64_t batch : {1, 16, 64, 128})
        for (const int64_t thousands : {4, 16}) {
          Case whole = decode({batch, thousands * kThousand}, {heads, 1}, 576);
          whole.head_dim_v = 512, whole.latent = true, whole.page_size = 64;
          add(whole);
          if (thousands != 4 || batch == 16) continue;
          Case parts = whole;
          parts.head_dim = 64, parts.latent = false, parts.qv = true;
          add(parts, whole);
        }
  }

  // Beside the same cache in 16 bits.
  void add_fp8_keys() {
    const auto add_one = [&](const Case& wide, cases::Scales scales) {
      Case narrow = wide;
      narrow.kv8 = true, narrow.scales = scales;
      add(narrow, wide);
    };
    for (const Shape& shape : {Shape{1, 4}, {1, 16}, {1, 64}, {16, 4}, {16, 16}, {64, 4}})
      add_one(decode({shape.batch, shape.context * kThousand}), cases::Scales::kHead);
    Case paged = decode({16, 16 * kThousand});
    paged.page_size = 64;
    add_one(paged, cases::Scales::kBlock);
    for (const int64_t head_dim : {64, 256})
      add_one(decode({16, 16 * kThousand}, kUsual, head_dim), cases::Scales::kHead);
  }

  const bool gpu_;
  const flash3_dtype dtype_;
  std::vector<BenchPoint> suite_;
};

}  // namespace

std::vector<BenchPoint> decode_suite(bool gpu, flash3_dtype dtype) {
  return DecodeSuite(gpu, dtype).make();
}

namespace {

// flash3 bench --suite masks.

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
