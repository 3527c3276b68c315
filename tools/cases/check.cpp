// SPDX-License-Identifier: Apache-2.0
#include "cases/check.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string_view>

#include "cases/internals.hpp"

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

struct Place {
  std::array<int64_t, 4> at{};
  int ndim = 4;
  std::string text() const {
    std::string s = "[";
    for (int i = 0; i < ndim; ++i) s += (i > 0 ? ", " : "") + std::to_string(at[size_t(i)]);
    return s + "]";
  }
};

std::string describe(const std::string& what, const Place& place, double got, double ref) {
  char numbers[96];
  std::snprintf(numbers, sizeof numbers, ": got %.9g, ref %.9g", got, ref);
  return what + place.text() + numbers;
}

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

// The shapes of q, k, v, out and their gradients, and of lse.
Rules rules_of(const flash3_tensor& t, const std::vector<RowRule>& rules) {
  return t.ndim == 4 ? Rules{rules, 0, 1} : Rules{rules, -1, 0};
}
Rules rules_of_lse(const flash3_tensor& t, const std::vector<RowRule>& rules) {
  return t.ndim == 3 ? Rules{rules, 0, 2} : Rules{rules, -1, 1};
}

// What a tensor is compared with.
struct Expected {
  const std::vector<double>& ref;
  const std::vector<float>& bound;
  flash3_tensor naive{};    // without data: not there
  bool nan_is_any = false;  // where ref is NaN, any value is right
};

// How the errors of a tensor are held to its bounds: each, or those of a block of rows together.
struct Blocks {
  int seq_dim = -1, head_dim = -1;  // of the tensor; −1: each by itself
  double times_naive = 0;           // see check.hpp
};

class Checker {
 public:
  Checker(const char* name, const flash3_tensor& got, const Expected& expected, const Rules& rules,
          const Blocks& blocks)
      : name_(name), got_(got), expected_(expected), rules_(rules), blocks_(blocks) {
    std::copy_n(got.shape, got.ndim, shape_.begin());
    place_.ndim = worst_.ndim = got.ndim;
    if (blocks.seq_dim >= 0) sums_.resize(size_t(batch() * heads() * blocks_of_head()));
  }

  TensorCheck run() {
    // An element's place, and its numbers in got and naive.
    const auto stride = [](const flash3_tensor& t, int i) { return i < t.ndim ? t.stride[i] : 0; };
    const flash3_tensor& naive = expected_.naive;
    size_t next = 0;
    auto& [a, b, c, d] = place_.at;
    for (a = 0; a < shape_[0]; ++a)
      for (b = 0; b < shape_[1]; ++b)
        for (c = 0; c < shape_[2]; ++c)
          for (d = 0; d < shape_[3]; ++d, ++next) {
            const RowRule rule = rules_.at(place_.at, shape_);
            if (rule == RowRule::kAnything) continue;
            int64_t at = 0, at_naive = 0;
            for (int i = 0; i < 4; ++i) {
              at += place_.at[size_t(i)] * stride(got_, i);
              at_naive += place_.at[size_t(i)] * stride(naive, i);
            }
            const double of_naive = naive.data ? load_float(naive.data, naive.dtype, at_naive) : 0;
            if (!check_element(next, at, rule, bound_of(next, of_naive))) return finish();
            if (naive.data) add_naive(expected_.ref[next], of_naive);
          }
    return finish();
  }

 private:
  bool check_filled(double got, double ref) {
    const double filled =
        std::string_view(name_) == "lse" ? -std::numeric_limits<double>::infinity() : 0;
    if (got == filled) return true;
    result_.failure = describe(std::string(name_) + " was not filled: ", place_, got, ref);
    return false;
  }

  double bound_of(size_t i, double naive) const {
    const double bound = expected_.bound[i], error = std::abs(naive - expected_.ref[i]);
    if (!sums_.empty() || blocks_.times_naive == 0 || !std::isfinite(error)) return bound;
    return 3 * bound + blocks_.times_naive * error;
  }

  // False if there is no need to look further.
  bool check_element(size_t i, int64_t at, RowRule rule, double bound) {
    const double ref = expected_.ref[i];
    const double got = load_float(got_.data, got_.dtype, at);
    const double error = std::abs(got - ref);
    if (std::isnan(got) && is_poison(got_, at)) {
      result_.failure = describe(std::string(name_) + " was not written: ", place_, got, ref);
      return false;
    }
    if (rule == RowRule::kFilled) return check_filled(got, ref);
    if (rule == RowRule::kZeros && got != 0) {
      result_.failure = describe(std::string(name_) + " must be exactly 0: ", place_, got, ref);
      return false;
    }
    if (!std::isfinite(error)) {
      if (std::isnan(ref) && expected_.nan_is_any) return true;
      if (kind_of(got) != kind_of(ref) && result_.failure.empty())
        result_.failure = describe(name_, place_, got, ref);
      return true;
    }
    ++finite_;
    squares_ += error * error;
    result_.error = std::max(result_.error, error);
    if (!sums_.empty()) {
      BlockSums& sums = sums_[block()];
      ++sums.count, sums.error += error * error, sums.bound += bound * bound;
    } else if (!(error <= result_.fraction * bound)) {
      worst_ = place_, worst_got_ = got, worst_ref_ = ref, worst_bound_ = bound;
      result_.fraction = std::isfinite(bound) ? error / bound : kInfinity;
    }
    return true;
  }

  void add_naive(double ref, double naive) {
    const double error = naive - ref;
    if (!std::isfinite(error)) return;
    naive_squares_ += error * error;
    if (!sums_.empty()) sums_[block()].naive += error * error;
  }

  TensorCheck finish() {
    if (finite_ > 0) {
      result_.rmse = std::sqrt(squares_ / double(finite_));
      result_.naive_rmse = std::sqrt(naive_squares_ / double(finite_));
    }
    for (size_t i = 0; i < sums_.size(); ++i) check_block(i);
    if (sums_.empty() && !(result_.fraction <= 1) && result_.failure.empty()) {
      char text[96];
      std::snprintf(text, sizeof text, "; error %.3g is %.3g of its bound %.3g",
                    std::abs(worst_got_ - worst_ref_), result_.fraction, worst_bound_);
      result_.failure = describe(name_, worst_, worst_got_, worst_ref_) + text;
    }
    return result_;
  }

  void check_block(size_t i) {
    const BlockSums& sums = sums_[i];
    if (sums.count == 0) return;
    const double n = double(sums.count);
    const double rmse = std::sqrt(sums.error / n), naive = std::sqrt(sums.naive / n);
    const double allowed =
        (1 + 2 / std::sqrt(n)) * std::sqrt(sums.bound / n) + blocks_.times_naive * naive;
    const double fraction = std::isfinite(allowed) ? rmse / allowed : kInfinity;
    result_.fraction = std::max(result_.fraction, fraction);
    if (fraction <= 1 || !result_.failure.empty()) return;
    const auto head = int64_t(i) / blocks_of_head();
    char text[192];
    std::snprintf(
        text, sizeof text,
        "%s: RMSE %.3g of %lld elements is %.3g of its bound %.3g: batch %lld, head %lld, "
        "rows from %lld",
        name_, rmse, static_cast<long long>(sums.count), fraction, allowed,
        static_cast<long long>(head / heads()), static_cast<long long>(head % heads()),
        static_cast<long long>(int64_t(i) % blocks_of_head() * kBlockRows));
    result_.failure = text;
  }

  static constexpr int64_t kBlockRows = 128;
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  struct BlockSums {
    int64_t count = 0;
    double error = 0, bound = 0, naive = 0;  // of squares
  };
  int64_t batch() const { return got_.ndim == 4 || blocks_.seq_dim == 2 ? shape_[0] : 1; }
  int64_t heads() const { return shape_[size_t(blocks_.head_dim)]; }
  int64_t blocks_of_head() const { return ceil_div(shape_[size_t(blocks_.seq_dim)], kBlockRows); }
  size_t block() const {
    const int64_t b = batch() > 1 ? place_.at[0] : 0;
    return size_t((b * heads() + place_.at[size_t(blocks_.head_dim)]) * blocks_of_head() +
                  place_.at[size_t(blocks_.seq_dim)] / kBlockRows);
  }

  const char* const name_;
  const flash3_tensor& got_;
  const Expected& expected_;
  const Rules& rules_;
  const Blocks blocks_;
  std::array<int64_t, 4> shape_{1, 1, 1, 1};
  Place place_, worst_;
  double worst_got_ = 0, worst_ref_ = 0, worst_bound_ = 0;
  double squares_ = 0, naive_squares_ = 0;
  int64_t finite_ = 0;
  std::vector<BlockSums> sums_;
  TensorCheck result_;
};

TensorCheck check(const char* name, const flash3_tensor& got, const Expected& expected,
                  const Rules& rules, const Blocks& blocks = {}) {
  return Checker(name, got, expected, rules, blocks).run();
}

bool is_fp8(const Case& c) { return c.fp8 || c.dtype == FLASH3_FLOAT8_E4M3; }

constexpr double kTimesNaive = 1.5;

// By the use of each row.
std::vector<RowRule> rules_by_use(const SequenceLengths& rows, int64_t batch, RowRule unused,
                                  RowRule outside) {
  std::vector<RowRule> rules;
  for (const RowUse use : row_uses(rows, batch))
    rules.push_back(use == RowUse::kCounts   ? RowRule::kValues
                    : use == RowUse::kUnused ? unused
                                             : outside);
  return rules;
}

struct GradientRules {
  std::vector<RowRule> q, k;
};

// Zeros too for rows that see no key, and for keys that no row sees.
GradientRules gradient_rules(const Case& c) {
  const CaseSequences sequences = make_sequences(c);
  const RowRule outside = c.fill ? RowRule::kFilled : RowRule::kAnything;
  GradientRules rules{rules_by_use(sequences.q, c.batch, RowRule::kZeros, outside),
                      rules_by_use(sequences.k, c.batch, RowRule::kZeros, outside)};
  const auto first_row = [](const SequenceLengths& rows, int64_t b) {
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

TensorCheck check_out(const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules, const flash3_tensor& naive) {
  return check("out", got, {ref.out, ref.out_bound, naive}, rules_of(got, rules));
}

TensorCheck check_out(const Case& c, const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules, const flash3_tensor& naive) {
  if (!is_fp8(c)) return check_out(got, ref, rules, naive);
  const int seq_dim = got.ndim - 3;
  return check("out", got, {ref.out, ref.out_bound, naive}, rules_of(got, rules),
               {seq_dim, seq_dim + 1, c.fp8 ? kTimesNaive : 0});
}

TensorCheck check_lse(const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules) {
  return check("lse", got, {ref.lse, ref.lse_bound}, rules_of_lse(got, rules));
}

TensorCheck check_lse(const Case& c, const flash3_tensor& got, const ReferenceForward& ref,
                      const std::vector<RowRule>& rules, const flash3_tensor& naive) {
  if (!is_fp8(c)) return check_lse(got, ref, rules);
  return check("lse", got, {ref.lse, ref.lse_bound, naive}, rules_of_lse(got, rules),
               {got.ndim - 1, got.ndim - 2, kTimesNaive});
}

namespace {

// Checks a result of rows, whose reference has what filled rows hold, or of heads.
TensorCheck check_added(const Case& c, const char* name, const flash3_tensor& got,
                        const ReferenceForward& ref, std::vector<RowRule> rules,
                        const flash3_tensor& naive) {
  const auto found = ref.added.find(name);
  if (found == ref.added.end()) {
    TensorCheck none;
    none.failure = std::string(name) + " is written, but the oracle has no value of it";
    return none;
  }
  std::replace(rules.begin(), rules.end(), RowRule::kFilled, RowRule::kValues);
  const bool of_heads = got.ndim == 1;
  if (of_heads) rules.clear();
  return check(name, got, {found->second.values, found->second.bound, naive, true},
               of_heads ? Rules{rules} : rules_of_lse(got, rules),
               {.times_naive = c.fp8 ? kTimesNaive : 0});
}

}  // namespace

void check_forward(const Case& c,
                   const std::vector<std::pair<std::string_view, const GuardedTensor*>>& got,
                   const ExpectedForward& expected, CheckResult* result) {
  const std::vector<RowRule> rules = output_rules(c, make_sequences(c));
  const ExtraViews naive = expected.naive_extra.views();
  for (const auto& [name, tensor] : got) {
    TensorCheck check;
    if (name == "out") {
      check = result->out =
          check_out(c, tensor->view, expected.ref, rules, expected.naive_out.view);
    } else if (name != "lse") {
      flash3_tensor of_naive{};
      ExtraViews::visit(
          [&, field = name](const ParamField& each, const flash3_tensor& view) {
            if (each.name == field) of_naive = view;
          },
          naive);
      check =
          check_added(c, std::string(name).c_str(), tensor->view, expected.ref, rules, of_naive);
      result->added.emplace_back(name, check);
    } else if (c.want_lse) {
      check = result->lse =
          check_lse(c, tensor->view, expected.ref, rules, expected.naive_lse.view);
    }
    if (result->passed()) result->failure = check.failure;
  }
}

bool needs_naive(const Case& c) { return is_fp8(c); }

std::vector<RowRule> output_rules(const Case& c, const CaseSequences& sequences) {
  const RowRule dead = c.fill ? RowRule::kFilled : RowRule::kAnything;
  return rules_by_use(sequences.q, c.batch, dead, dead);
}

GradientChecks check_gradients(const Case& c, const BackwardViews& got,
                               const ReferenceBackward& ref) {
  const GradientRules rules = gradient_rules(c);
  GradientChecks checks{check("dq", got.dq, {ref.dq, ref.dq_bound}, rules_of(got.dq, rules.q)),
                        check("dk", got.dk, {ref.dk, ref.dk_bound}, rules_of(got.dk, rules.k)),
                        check("dv", got.dv, {ref.dv, ref.dv_bound}, rules_of(got.dv, rules.k)),
                        {},
                        {}};
  if (c.sink != Sink::kNone && c.want_dsink)
    checks.dsink = check("dsink", got.dsink, {ref.dsink, ref.dsink_bound}, {{}});
  got.added.visit(
      [&](const ParamField& field, const flash3_tensor& tensor) {
        if (tensor.ndim == 0) return;
        const std::string name(field.name);
        const ReferenceValues& values = ref.added.at(field.name);
        checks.added.emplace_back(name,
                                  check(name.c_str(), tensor, {values.values, values.bound}, {{}}));
      },
      got.added);
  return checks;
}

std::string GradientChecks::failure() const {
  for (const TensorCheck* part : {&dq, &dk, &dv, &dsink})
    if (!part->failure.empty()) return part->failure;
  for (const auto& [name, part] : added)
    if (!part.failure.empty()) return part.failure;
  return "";
}

}  // namespace flash3::cases
