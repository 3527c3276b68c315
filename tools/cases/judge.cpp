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

// What may differ from ref besides 2 · naive: roundoff · max(|ref|, floor) + absolute.
struct Allowance {
  double roundoff = 0, floor = 0, absolute = 0;
};

// must_be_zero: whether all elements [·, i, ·, ·] must be exactly 0, for each i; empty: none.
Score judge(const char* name, const flash3_tensor& got, const flash3_tensor& naive,
            const std::vector<double>& ref, const Allowance& allowance,
            const std::vector<bool>& must_be_zero = {}) {
  Score score;
  Place place, worst;
  place.ndim = worst.ndim = got.ndim;
  double squares = 0, naive_squares = 0;
  int64_t finite = 0;
  double largest = allowance.floor, worst_got = 0, worst_ref = 0, worst_naive = 0;
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
          if (!must_be_zero.empty() && must_be_zero[size_t(b)] && g != 0) {
            score.failure =
                describe((std::string(name) + " must be exactly 0: ").c_str(), place, g, r, n);
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
  score.allowed = 2 * score.naive + allowance.roundoff * largest + allowance.absolute;
  if (score.failure.empty() && !(score.error <= score.allowed)) {
    char errors[128];
    std::snprintf(errors, sizeof errors, "; error %.3g > allowed %.3g (naive %.3g)", score.error,
                  score.allowed, score.naive);
    score.failure = describe(name, worst, worst_got, worst_ref, worst_naive) + errors;
  }
  return score;
}

double largest_finite(const std::vector<double>& values) {
  double largest = 0;
  for (const double x : values)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  return largest;
}

double largest_finite_lse(const flash3_tensor& lse) {
  double largest = 0;
  const auto* data = static_cast<const float*>(lse.data);
  for (int64_t a = 0; a < lse.shape[0]; ++a)
    for (int64_t b = 0; b < lse.shape[1]; ++b)
      for (int64_t c = 0; c < lse.shape[2]; ++c)
        if (const double x = data[a * lse.stride[0] + b * lse.stride[1] + c]; std::isfinite(x))
          largest = std::max(largest, std::abs(x));
  return largest;
}

}  // namespace

Score judge_out(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref) {
  return judge("out", got, naive, ref.out,
               {.roundoff = unit_roundoff(got.dtype) + 0x1p-24 * largest_finite(ref.lse)});
}

Score judge_lse(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref) {
  return judge("lse", got, naive, ref.lse, {.roundoff = 0x1p-17, .floor = 1});
}

GradientScores judge_gradients(const Case& c, const BackwardViews& got, const BackwardViews& naive,
                               const ReferenceBackward& ref) {
  const Band band = band_of(c);
  std::vector<bool> blind(static_cast<size_t>(c.seq_q)), unseen(static_cast<size_t>(c.seq_k), true);
  for (int64_t i = 0; i < c.seq_q; ++i) {
    const Range keys = band.keys({i, i + 1}, c.seq_k);
    blind[size_t(i)] = keys.empty();
    for (int64_t j = keys.begin; j < keys.end; ++j) unseen[size_t(j)] = false;
  }
  if (c.heads_q == 0) unseen.assign(unseen.size(), true);

  const double roundoff = unit_roundoff(c.dtype);
  const double of_terms = 0x1p-22 * (1 + largest_finite_lse(got.lse));
  return {judge("dq", got.dq, naive.dq, ref.dq,
                {.roundoff = roundoff, .absolute = of_terms * ref.dq_terms}, blind),
          judge("dk", got.dk, naive.dk, ref.dk,
                {.roundoff = roundoff, .absolute = of_terms * ref.dk_terms}, unseen),
          judge("dv", got.dv, naive.dv, ref.dv,
                {.roundoff = roundoff, .absolute = of_terms * ref.dv_terms}, unseen)};
}

std::string GradientScores::failure() const {
  for (const Score* score : {&dq, &dk, &dv})
    if (!score->failure.empty()) return score->failure;
  return "";
}

}  // namespace flash3::cases
