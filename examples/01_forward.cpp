// SPDX-License-Identifier: Apache-2.0
// Attention on host memory in C++. README.md shows the part between the two marks.
#include <cmath>
#include <cstdio>
#include <flash3/flash3.hpp>
#include <string>
#include <vector>

// README: begin
// Causal attention, 16 query heads on 4 KV heads. Throws flash3::Error.
std::string attend(float* q, float* k, float* v, float* out) {
  const flash3::Forward call{
      .q = flash3::tensor(q, FLASH3_FLOAT32, {2, 512, 16, 64}),  // [batch, seq, heads, dim]
      .k = flash3::tensor(k, FLASH3_FLOAT32, {2, 512, 4, 64}),
      .v = flash3::tensor(v, FLASH3_FLOAT32, {2, 512, 4, 64}),
      .out = flash3::tensor(out, FLASH3_FLOAT32, {2, 512, 16, 64}),
      .causal = true,
  };
  flash3::forward(call);
  return flash3::explain(call);  // which kernel ran, and why
}
// README: end

int main() {
  constexpr int64_t kBatch = 2, kSeq = 512, kHeads = 16, kKvHeads = 4, kDim = 64;
  std::vector<float> q(kBatch * kSeq * kHeads * kDim), out(q.size());
  std::vector<float> k(kBatch * kSeq * kKvHeads * kDim), v(k.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.1f * static_cast<float>(i));
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::cos(0.3f * static_cast<float>(i));
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(0.7f * static_cast<float>(i));

  try {
    std::printf("%s", attend(q.data(), k.data(), v.data(), out.data()).c_str());
  } catch (const flash3::Error& error) {
    std::fprintf(stderr, "flash3: %s\n", error.what());
    return 1;
  }

  // Under the causal mask the first query sees the first key alone, so its output is the first V.
  for (int64_t d = 0; d < kDim; ++d) {
    if (std::abs(out[d] - v[d]) > 1e-6f) {
      std::fprintf(stderr, "out is wrong\n");
      return 1;
    }
  }
  std::printf("out[0, 0, 0, :3] = %.4f %.4f %.4f\n", out[0], out[1], out[2]);
}
