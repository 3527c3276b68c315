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
  double times_naive = 2;
};

// What each row must hold; rows are numbered [batch, seq], where a tensor has these dimensions.
struct Rules {
  const std::vector<RowRule>& of_rows;  // empty: values
  int batch_dim = -1, seq_dim = -1;     // -1: none

  RowRule at(const std::array<int64_t, 4>& place, const std::array<int64_t, 4>& shape) const {
    if (of_rows.empty()) return RowRule::kValues;
    const int64_t row = place[size_t(seq_dim)];
    return of_rows[size_t(batch_dim < 0 ? row
                                        : place[size_t(batch_dim)] * shape[size_t(seq_dim)] + row)];
  }
};

// Of q, k, v, out and their gradients; of lse.
Rules rules_of(const flash3_tensor& t, const std::vector<RowRule>& rules) {
  return t.ndim == 4 ? Rules{rules, 0, 1} : Rules{rules, -1, 0};
}
Rules rules_of_lse(const flash3_tensor& t, const std::vector<RowRule>& rules) {
  return t.ndim == 3 ? Rules{rules, 0, 2} : Rules{rules, -1, 1};
}

Score judge(const char* name, const flash3_tensor& got, const flash3_tensor& naive,
            const std::vector<double>& ref, const Allowance& allowance, const Rules& rules) {
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
          const RowRule rule = rules.at(place.at, shape);
          if (rule == RowRule::kAnything) continue;
          const double g = load_float(got.data, got.dtype, at_got);
          const double n = load_float(naive.data, naive.dtype, at_naive);
          if (is_poison(got, at_got)) {
            score.failure =
                describe((std::string(name) + " was not written: ").c_str(), place, g, r, n);
            return score;
          }
          if (rule == RowRule::kZeros && g != 0) {
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
  score.allowed =
      allowance.times_naive * score.naive + allowance.roundoff * largest + allowance.absolute;
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

double largest_finite_lse(const flash3_tensor& lse, const std::vector<RowRule>& rules) {
  double largest = 0;
  const auto* data = static_cast<const float*>(lse.data);
  const bool packed = lse.ndim == 2;
  const int64_t batch = packed ? 1 : lse.shape[0], stride_batch = packed ? 0 : lse.stride[0];
  const int64_t heads = lse.shape[lse.ndim - 2], rows = lse.shape[lse.ndim - 1];
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows; ++i) {
        if (rules[size_t(b * rows + i)] != RowRule::kValues) continue;
        const double x = data[b * stride_batch + h * lse.stride[lse.ndim - 2] + i];
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
      }
  return largest;
}

// By the use of each row.
std::vector<RowRule> rules_by_use(const SequenceRows& rows, int64_t batch, RowRule unused) {
  std::vector<RowRule> rules;
  for (const RowUse use : row_uses(rows, batch))
    rules.push_back(use == RowUse::kCounts   ? RowRule::kValues
                    : use == RowUse::kUnused ? unused
                                             : RowRule::kAnything);
  return rules;
}

struct GradientRules {
  std::vector<RowRule> q, k;
};

// Zeros too for rows that see no key, and for keys that no row sees.
GradientRules gradient_rules(const Case& c) {
  const CaseSequences sequences = make_sequences(c);
  GradientRules rules{rules_by_use(sequences.q, c.batch, RowRule::kZeros),
                      rules_by_use(sequences.k, c.batch, RowRule::kZeros)};
  const auto first_row = [](const SequenceRows& rows, int64_t b) {
    return (rows.cu.empty() ? b * rows.rows : 0) + rows_of(rows.view(), b).first;
  };
  for (int64_t b = 0; b < c.batch; ++b) {
    const SeqInfo s = sequences[b];
    const Mask mask = mask_of(c, s.q.length, s.k.length);
    const auto q = rules.q.begin() + first_row(sequences.q, b);
    const auto k = rules.k.begin() + first_row(sequences.k, b);
    std::vector<bool> unseen(static_cast<size_t>(s.k.length), true);
    for (int64_t i = 0; i < s.q.length; ++i) {
      const Range keys = mask.keys({i, i + 1}, s.k.length);
      if (keys.empty()) q[i] = RowRule::kZeros;
      for (int64_t j = keys.begin; j < keys.end; ++j) unseen[size_t(j)] = false;
    }
    for (int64_t j = 0; j < s.k.length; ++j)
      if (unseen[size_t(j)] || c.heads_q == 0) k[j] = RowRule::kZeros;
  }
  return rules;
}

}  // namespace

Score judge_out(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules) {
  return judge("out", got, naive, ref.out,
               {.roundoff = unit_roundoff(got.dtype) + 0x1p-24 * largest_finite(ref.lse)},
               rules_of(got, rules));
}

Score judge_out(const Case& c, flash3_backend backend, const flash3_tensor& got,
                const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules) {
  if (backend != FLASH3_BACKEND_HOPPER || (!c.fp8 && c.dtype != FLASH3_FLOAT8_E4M3))
    return judge_out(got, naive, ref, rules);
  constexpr double kWeightRoundoff = 0x1p-4;
  Score score = judge("out", got, naive, ref.out,
                      {.roundoff = kWeightRoundoff + 0x1p-24 * largest_finite(ref.lse)},
                      rules_of(got, rules));
  double squares = 0;
  int64_t finite = 0;
  for (const double x : ref.out)
    if (std::isfinite(x)) squares += x * x, ++finite;
  const double size = finite > 0 ? std::sqrt(squares / double(finite)) : 0;
  const double allowed = 1.5 * score.naive_rmse + 0x1p-6 * size;
  if (score.failure.empty() && !(score.rmse <= allowed)) {
    char text[128];
    std::snprintf(text, sizeof text, "out: RMSE %.3g > allowed %.3g (naive %.3g)", score.rmse,
                  allowed, score.naive_rmse);
    score.failure = text;
  }
  return score;
}

Score judge_lse(const flash3_tensor& got, const flash3_tensor& naive, const ReferenceForward& ref,
                const std::vector<RowRule>& rules) {
  return judge("lse", got, naive, ref.lse, {.roundoff = 0x1p-17, .floor = 1},
               rules_of_lse(got, rules));
}

std::vector<RowRule> output_rules(const CaseSequences& sequences, int64_t batch) {
  return rules_by_use(sequences.q, batch, RowRule::kAnything);
}

GradientScores judge_gradients(const Case& c, const BackwardViews& got, const BackwardViews& naive,
                               const ReferenceBackward& ref) {
  const GradientRules rules = gradient_rules(c);
  const double of_terms =
      0x1p-22 * (1 + largest_finite_lse(got.lse, output_rules(make_sequences(c), c.batch)));
  const auto allowance = [&](flash3_dtype dtype, double terms) {
    return Allowance{.roundoff = unit_roundoff(dtype), .absolute = of_terms * terms};
  };
  GradientScores scores{judge("dq", got.dq, naive.dq, ref.dq, allowance(c.dtype, ref.dq_terms),
                              rules_of(got.dq, rules.q)),
                        judge("dk", got.dk, naive.dk, ref.dk, allowance(c.dtype, ref.dk_terms),
                              rules_of(got.dk, rules.k)),
                        judge("dv", got.dv, naive.dv, ref.dv, allowance(c.dtype, ref.dv_terms),
                              rules_of(got.dv, rules.k)),
                        {}};
  if (c.sink != Sink::kNone && c.want_dsink) {
    // A value a head: the worst of a few says little about how far naive values lie off.
    constexpr int64_t kFew = 16;
    Allowance allowed = allowance(got.dsink.dtype, ref.dsink_terms);
    if (c.heads_q < kFew) allowed.times_naive = 3;
    scores.dsink = judge("dsink", got.dsink, naive.dsink, ref.dsink, allowed, {{}});
  }
  return scores;
}

std::string GradientScores::failure() const {
  for (const Score* score : {&dq, &dk, &dv, &dsink})
    if (!score->failure.empty()) return score->failure;
  return "";
}

}  // namespace flash3::cases
