// Attention on host memory in C++: causal, 16 query heads on 4 KV heads. See README.md.
#include <cmath>
#include <cstdio>
#include <flash3/flash3.hpp>
#include <vector>

int main() {
  constexpr int64_t kBatch = 2, kSeq = 512, kHeads = 16, kKvHeads = 4, kDim = 64;
  std::vector<float> q(kBatch * kSeq * kHeads * kDim), out(q.size());
  std::vector<float> k(kBatch * kSeq * kKvHeads * kDim), v(k.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.1f * static_cast<float>(i));
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::cos(0.3f * static_cast<float>(i));
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(0.7f * static_cast<float>(i));

  const flash3::Forward call{
      .q = flash3::tensor(q.data(), FLASH3_FLOAT32, {kBatch, kSeq, kHeads, kDim}),
      .k = flash3::tensor(k.data(), FLASH3_FLOAT32, {kBatch, kSeq, kKvHeads, kDim}),
      .v = flash3::tensor(v.data(), FLASH3_FLOAT32, {kBatch, kSeq, kKvHeads, kDim}),
      .out = flash3::tensor(out.data(), FLASH3_FLOAT32, {kBatch, kSeq, kHeads, kDim}),
      .causal = true,
  };
  try {
    flash3::forward(call);
    std::printf("%s", flash3::explain(call).c_str());
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
