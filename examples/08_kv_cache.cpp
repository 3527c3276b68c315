// SPDX-License-Identifier: Apache-2.0
// Decoding with a KV cache in pages, as a server does it: each prompt takes pages from one pool as
// it grows and gives them back when it ends. A call appends the newest keys and values with a
// rotary embedding and attends to all keys of its sequence. The prefill, which appends a whole
// prompt, and each step, which appends a token, are the same call. 09_decode_graph.cpp has such
// steps in a captured CUDA graph.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <flash3/flash3.hpp>
#include <stdexcept>
#include <vector>

namespace {

constexpr int64_t kHeads = 8, kKvHeads = 2, kDim = 64, kPageSize = 16, kPages = 24, kMaxPages = 8;
constexpr int64_t kMaxTokens = kPageSize * kMaxPages;

using Floats = std::vector<float>;

// Pages that no sequence has.
class PagePool {
 public:
  PagePool() {
    for (int32_t page = kPages; page-- > 0;) free_.push_back(page);
  }
  int32_t take() {
    if (free_.empty()) throw std::runtime_error("the cache is full");
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(const std::vector<int32_t>& pages) {
    free_.insert(free_.end(), pages.begin(), pages.end());
  }

 private:
  std::vector<int32_t> free_;
};

struct Sequence {
  uint32_t seed = 0;
  int32_t length = 0;  // tokens in the cache
  std::vector<int32_t> pages = {};
};

struct Cache {
  Floats k = Floats(kPages * kPageSize * kKvHeads * kDim), v = k;
  Floats cos = Floats(kMaxTokens * kDim / 2), sin = cos;
  PagePool pool;

  Cache() {
    for (int64_t p = 0; p < kMaxTokens; ++p)
      for (int64_t i = 0; i < kDim / 2; ++i) {
        const float angle = float(p) / std::pow(10000.f, 2 * float(i) / float(kDim));
        cos[size_t(p * kDim / 2 + i)] = std::cos(angle);
        sin[size_t(p * kDim / 2 + i)] = std::sin(angle);
      }
  }
};

// Token n of a sequence, as a model would make it: `which` is 0 for q, 1 for k, 2 for v.
float value(const Sequence& s, int64_t n, int which, int64_t i) {
  return std::sin(0.37f * float(i) + 1.3f * float(n) * float(which + 1) + float(s.seed));
}

// Appends `added` tokens to each of these sequences and returns what their queries get:
// [batch, added, kHeads, kDim].
Floats attend(Cache& cache, std::vector<Sequence*> batch, int64_t added) {
  const auto n = int64_t(batch.size());
  std::vector<int32_t> table(size_t(n * kMaxPages), -1), lengths;
  Floats q, k, v, out(size_t(n * added * kHeads * kDim));
  for (int64_t b = 0; b < n; ++b) {
    Sequence& s = *batch[size_t(b)];
    while (int64_t(s.pages.size()) * kPageSize < s.length + added)
      s.pages.push_back(cache.pool.take());
    std::copy(s.pages.begin(), s.pages.end(), table.begin() + b * kMaxPages);
    lengths.push_back(s.length);
    for (int64_t t = s.length; t < s.length + added; ++t) {
      for (int64_t i = 0; i < kHeads * kDim; ++i) q.push_back(value(s, t, 0, i));
      for (int64_t i = 0; i < kKvHeads * kDim; ++i) k.push_back(value(s, t, 1, i));
      for (int64_t i = 0; i < kKvHeads * kDim; ++i) v.push_back(value(s, t, 2, i));
    }
  }
  const auto pages = [](Floats& x) {
    return flash3::tensor(x.data(), FLASH3_FLOAT32, {kPages, kPageSize, kKvHeads, kDim});
  };
  const auto tokens = [&](Floats& x, int64_t heads) {
    return flash3::tensor(x.data(), FLASH3_FLOAT32, {n, added, heads, kDim});
  };
  flash3::Forward call{.q = tokens(q, kHeads),
                       .k = pages(cache.k),
                       .v = pages(cache.v),
                       .out = tokens(out, kHeads),
                       .causal = true,
                       .seqused_k = flash3::index_tensor(lengths.data(), n),
                       .page_table = flash3::page_table_tensor(table.data(), n, kMaxPages),
                       .k_new = tokens(k, kKvHeads),
                       .v_new = tokens(v, kKvHeads)};
  call.rotary_cos = flash3::rotary_tensor(cache.cos.data(), FLASH3_FLOAT32, kMaxTokens, kDim / 2);
  call.rotary_sin = flash3::rotary_tensor(cache.sin.data(), FLASH3_FLOAT32, kMaxTokens, kDim / 2);

  // q with its embedding lies in the workspace.
  constexpr size_t kAlignment = FLASH3_WORKSPACE_ALIGNMENT;
  const size_t bytes = flash3::workspace(call);
  std::vector<unsigned char> memory(bytes + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  call.workspace = memory.data() + (kAlignment - address % kAlignment) % kAlignment;
  call.workspace_size = bytes;
  flash3::forward(call);
  for (Sequence* s : batch) s->length += int32_t(added);  // seqused_k stays as it is
  return out;
}

// The largest difference of two results' last so many elements.
float difference(const Floats& a, const Floats& b, size_t last) {
  float worst = 0;
  for (size_t i = 1; i <= last; ++i)
    worst = std::max(worst, std::abs(a[a.size() - i] - b[b.size() - i]));
  return worst;
}

}  // namespace

int main() try {
  constexpr size_t kRow = kHeads * kDim;
  Cache cache;
  Sequence first{.seed = 1}, second{.seed = 2}, third{.seed = 3};

  // Two prompts of 20 tokens, then steps in which the batch grows and shrinks.
  attend(cache, {&first, &second}, 20);
  attend(cache, {&first, &second}, 1);
  attend(cache, {&third}, 37);
  Floats out;
  for (int step = 0; step < 30; ++step) out = attend(cache, {&third, &first, &second}, 1);
  cache.pool.give_back(second.pages);  // the second one has ended
  for (int step = 0; step < 40; ++step) out = attend(cache, {&third, &first}, 1);

  // A sequence decoded step by step in a changing batch gets what a single prefill gives it.
  Cache alone;
  Sequence same{.seed = 1};
  const Floats expected = attend(alone, {&same}, first.length);
  const float worst = difference(out, expected, kRow);
  std::printf("%d tokens in %d pages; largest difference to one prefill: %g\n", int(first.length),
              int(first.pages.size()), double(worst));
  return worst < 1e-5f ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
