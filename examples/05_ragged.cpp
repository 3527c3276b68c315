// SPDX-License-Identifier: Apache-2.0
// Sequences of different lengths in one call, packed one after the other, with heads as in gpt-oss:
// causal, under a sliding window, and with a sink.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flash3/flash3.hpp>
#include <vector>

namespace {

constexpr int64_t kHeads = 16, kKvHeads = 4, kDim = 64, kTokens = 12;
const int32_t kBounds[] = {0, 5, 5, 12};  // three sequences of 5, 0 and 7 tokens

// q, k, v and out are [kTokens, heads, kDim], sink is [kHeads]. Throws flash3::Error.
void attend(float* q, float* k, float* v, float* sink, float* out) {
  flash3::forward({
      .q = flash3::packed_tensor(q, FLASH3_FLOAT32, {kTokens, kHeads, kDim}),
      .k = flash3::packed_tensor(k, FLASH3_FLOAT32, {kTokens, kKvHeads, kDim}),
      .v = flash3::packed_tensor(v, FLASH3_FLOAT32, {kTokens, kKvHeads, kDim}),
      .out = flash3::packed_tensor(out, FLASH3_FLOAT32, {kTokens, kHeads, kDim}),
      .causal = true,
      .window_left = 127,
      .sink = flash3::sink_tensor(sink, FLASH3_FLOAT32, kHeads),
      .cu_seqlens_q = flash3::index_tensor(kBounds, 4),
      .cu_seqlens_k = flash3::index_tensor(kBounds, 4),
      .num_threads = 1,  // needs no workspace
  });
}

}  // namespace

int main() {
  std::vector<float> q(kTokens * kHeads * kDim), out(q.size());
  std::vector<float> k(kTokens * kKvHeads * kDim), v(k.size()), sink(kHeads);
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.1f * static_cast<float>(i));
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::cos(0.3f * static_cast<float>(i));
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(0.7f * static_cast<float>(i));
  for (size_t h = 0; h < kHeads; ++h) sink[h] = 0.1f * static_cast<float>(h);

  try {
    attend(q.data(), k.data(), v.data(), sink.data(), out.data());
  } catch (const flash3::Error& error) {
    std::fprintf(stderr, "flash3: %s\n", error.what());
    return 1;
  }

  // The first query of a sequence sees one key and the sink: its output is a part of that key's V.
  for (const int64_t first : {kBounds[0], kBounds[2]})
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t kv_head = h / (kHeads / kKvHeads);
      const float* q_row = &q[(first * kHeads + h) * kDim];
      const float* k_row = &k[(first * kKvHeads + kv_head) * kDim];
      float score = 0;
      for (int64_t d = 0; d < kDim; ++d) score += q_row[d] * k_row[d] / 8;  // 8 = √kDim
      const float weight = 1 / (1 + std::exp(sink[h] - score));
      for (int64_t d = 0; d < kDim; ++d) {
        const float expected = weight * v[(first * kKvHeads + kv_head) * kDim + d];
        if (std::abs(out[(first * kHeads + h) * kDim + d] - expected) > 1e-5f) {
          std::fprintf(stderr, "out is wrong at token %d, head %d\n", int(first), int(h));
          return 1;
        }
      }
    }
  std::printf("out[5, 0, :3] = %.4f %.4f %.4f\n", out[5 * kHeads * kDim],
              out[5 * kHeads * kDim + 1], out[5 * kHeads * kDim + 2]);
}
