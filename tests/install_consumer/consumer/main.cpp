// SPDX-License-Identifier: Apache-2.0
// A C++ program that uses the installed library: equal scores, so the output is the mean of the
// values.
#include <flash3/flash3.hpp>
#include <iostream>
#include <vector>

int main() {
  constexpr int64_t kSeq = 2, kDim = 8;
  std::vector<float> q(kSeq * kDim, 0.f), k(kSeq * kDim, 1.f), v(kSeq * kDim), out(kSeq * kDim);
  for (int64_t i = 0; i < kDim; ++i) v[i] = 1.f, v[kDim + i] = 3.f;
  const auto view = [](std::vector<float>& x) {
    return flash3::tensor(x.data(), FLASH3_FLOAT32, {1, kSeq, 1, kDim});
  };
  try {
    flash3::forward({.q = view(q),
                     .k = view(k),
                     .v = view(v),
                     .out = view(out),
                     .backend = FLASH3_BACKEND_CPU});
  } catch (const flash3::Error& error) {
    std::cerr << "flash3::forward: " << error.what() << '\n';
    return 1;
  }
  for (const float x : out) {
    if (x < 1.9999f || x > 2.0001f) {
      std::cerr << "out = " << x << ", not 2\n";
      return 1;
    }
  }
  std::cout << "C++, flash3 " << flash3_version() << '\n';
}
