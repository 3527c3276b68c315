// SPDX-License-Identifier: Apache-2.0
#include "cases/accuracy.hpp"

#include <cstdio>

namespace flash3::cases {

std::vector<Case> accuracy_cases(Level level, const std::vector<int64_t>& lengths) {
  if (lengths.empty()) return accuracy_cases(level, {level == Level::kQuick ? 1024 : 4096});
  std::vector<Case> list;
  for (const int64_t length : lengths)
    for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16})
      for (const int64_t dim : {64, 128, 256})
        for (const bool causal : {false, true}) {
          Case c;
          c.dtype = dtype;
          c.seq_q = c.seq_k = length;
          c.heads_q = c.heads_k = 2;
          c.head_dim = c.head_dim_v = dim;
          c.causal = causal;
          c.distribution = Distribution::kOutliers;
          list.push_back(c);
        }
  return list;
}

std::string accuracy_objection(const Case& c) {
  if (c.backward) return "it is a backward case, but the accuracy experiment is of the forward";
  if (c.dtype == FLASH3_FLOAT32)
    return "dtype = fp32, but the accuracy experiment is for fp16 and bf16: in fp32 the plain "
           "implementation rounds nothing on the way";
  if (c.distribution != Distribution::kOutliers)
    return std::string("data = ") + short_name(c.distribution) +
           ", but the accuracy experiment is for outliers: add /outliers to the case";
  return "";
}

std::string check_accuracy(const TensorCheck& out) {
  if (!(out.naive_rmse > 0))
    return "out: the plain implementation makes no error here, so there is nothing to compare with";
  if (out.rmse <= kAccuracyBar * out.naive_rmse) return "";
  char text[160];
  std::snprintf(text, sizeof text, "out: RMSE %.3g > %.2f x %.3g, the plain implementation's",
                out.rmse, kAccuracyBar, out.naive_rmse);
  return text;
}

}  // namespace flash3::cases
