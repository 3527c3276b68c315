// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "cases/internals.hpp"
#include "cli/suites.hpp"

namespace flash3::cli {
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

}  // namespace flash3::cli
