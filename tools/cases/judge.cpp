#include "cases/judge.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/convert.hpp"

namespace flash3::cases {
namespace {

enum class Kind { kFinite, kNaN, kPlusInfinity, kMinusInfinity };

Kind kind_of(double x) {
  if (std::isnan(x)) return Kind::kNaN;
  if (std::isinf(x)) return x > 0 ? Kind::kPlusInfinity : Kind::kMinusInfinity;
  return Kind::kFinite;
}

// No computation makes this NaN: hardware and compilers give others.
bool is_poison(const flash3_tensor& t, int64_t element) {
  if (t.dtype == FLASH3_FLOAT32) {
    uint32_t bits;
    std::memcpy(&bits, static_cast<const float*>(t.data) + element, sizeof bits);
    return bits == 0xFFFFFFFFu;
  }
  return static_cast<const uint16_t*>(t.data)[element] == 0xFFFFu;
}

// u of the dtype: the relative error of one rounding to nearest.
double unit_roundoff(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16: return 0x1p-11;
    case FLASH3_BFLOAT16: return 0x1p-8;
    default: return 0x1p-23;  // twice u: the order of summation is free
  }
}

struct Place {
  std::array<int64_t, 4> at{};
  int ndim = 4;
  std::string text() const {
    std::string s = "[";
    for (int i = 0; i < ndim; ++i) s += (i > 0 ? ", " : "") + std::to_string(at[size_t(i)]);
    return s + "]";
  }
};

std::string describe(const char* what, const Place& place, double got, double ref, double naive) {
  char numbers[128];
  std::snprintf(numbers, sizeof numbers, ": got %.9g, ref %.9g, naive %.9g", got, ref, naive);
  return what + place.text() + numbers;
}

Score judge(const char* name, const flash3_tensor& got, const flash3_tensor& naive,
            const std::vector<double>& ref, double roundoff, double floor_of_largest) {
  Score score;
  Place place, worst;
  place.ndim = worst.ndim = got.ndim;
  double squares = 0, naive_squares = 0;
  int64_t finite = 0;
  double largest = floor_of_largest, worst_got = 0, worst_ref = 0, worst_naive = 0;
  score.error = -1;  // so that the first finite element is the worst until another one is
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  std::copy_n(got.shape, got.ndim, shape.begin());

  size_t next = 0;
  auto& [a, b, c, d] = place.at;
  for (a = 0; a < shape[0]; ++a)
    for (b = 0; b < shape[1]; ++b)
      for (c = 0; c < shape[2]; ++c)
        for (d = 0; d < shape[3]; ++d) {
          int64_t at_got = 0, at_naive = 0;
          for (int i = 0; i < got.ndim; ++i) {
            at_got += place.at[size_t(i)] * got.stride[i];
            at_naive += place.at[size_t(i)] * naive.stride[i];
          }
          const double r = ref[next++];
          const double g = load_float(got.data, got.dtype, at_got);
          const double n = load_float(naive.data, naive.dtype, at_naive);
          if (is_poison(got, at_got)) {
            score.failure =
                describe((std::string(name) + " was not written: ").c_str(), place, g, r, n);
            return score;
          }
          if (kind_of(g) != kind_of(r)) {
            if (score.failure.empty()) score.failure = describe(name, place, g, r, n);
            continue;
          }
          if (!std::isfinite(r)) continue;
          largest = std::max(largest, std::abs(r));
          ++finite;
          squares += (g - r) * (g - r);
          if (std::isfinite(n)) {
            score.naive = std::max(score.naive, std::abs(n - r));
            naive_squares += (n - r) * (n - r);
          }
          if (std::abs(g - r) > score.error) {
            score.error = std::abs(g - r);
            worst = place, worst_got = g, worst_ref = r, worst_naive = n;
          }
        }

  score.error = std::max(score.error, 0.0);
  if (finite > 0) {
    score.rmse = std::sqrt(squares / static_cast<double>(finite));
    score.naive_rmse = std::sqrt(naive_squares / static_cast<double>(finite));
  }
  score.allowed = 2 * score.naive + roundoff * largest;
  if (score.failure.empty() && !(score.error <= score.allowed)) {
    char errors[128];
    std::snprintf(errors, sizeof errors, "; error %.3g > allowed %.3g (naive %.3g)", score.error,
                  score.allowed, score.naive);
    score.failure = describe(name, worst, worst_got, worst_ref, worst_naive) + errors;
  }
  return score;
}

}  // namespace

Score judge_out(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref) {
  double largest_lse = 0;
  for (const double x : ref.lse)
    if (std::isfinite(x)) largest_lse = std::max(largest_lse, std::abs(x));
  return judge("out", got, naive, ref.out, unit_roundoff(got.dtype) + 0x1p-24 * largest_lse, 0);
}

Score judge_lse(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref) {
  return judge("lse", got, naive, ref.lse, 0x1p-17, 1);
}

}  // namespace flash3::cases
