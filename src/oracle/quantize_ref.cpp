// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/convert.hpp"
#include "oracle/definition.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The values of codes 0 … 126, from the definition of the format.
const std::array<double, 127>& positive_values() {
  static const auto table = [] {
    std::array<double, 127> values{};
    for (int code = 0; code < 127; ++code) {
      const int exponent = code / 8, mantissa = code % 8;
      values[static_cast<size_t>(code)] =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    }
    return values;
  }();
  return table;
}

struct Side {
  const QuantizePart& part;
  const Sequences& sequences;
  bool has_positions;  // q and k: their rotary embedding
  int64_t offset;
};

Side side_of(const QuantizeProblem& p, QuantizeWhich which) {
  switch (which) {
    case QuantizeWhich::kQ: return {p.q, p.sequences_q, true, p.rotary_offset_q};
    case QuantizeWhich::kK: return {p.k, p.sequences_k, true, p.rotary_offset_k};
    case QuantizeWhich::kV: break;
  }
  return {p.v, p.sequences_k, false, 0};
}

void apply_rope(const RotaryView& r, int64_t position, double* x) {
  for (int i = 0; i < r.dim / 2; ++i) {
    double& a = x[r.interleaved ? 2 * i : i];
    double& b = x[r.interleaved ? 2 * i + 1 : i + r.dim / 2];
    const double cos = load_float(r.cos, r.dtype, position * r.stride_cos + i);
    const double sin = load_float(r.sin, r.dtype, position * r.stride_sin + i);
    const double old = a;
    a = old * cos - b * sin;
    b = old * sin + b * cos;
  }
}

// Whether D's sign of dimension i is −: bit i % 64 of output i / 64 of SplitMix64 started at seed.
bool sign_is_minus(uint64_t seed, int i) {
  uint64_t state = seed, output = 0;
  for (int n = 0; n <= i / 64; ++n) {
    state += 0x9E3779B97F4A7C15u;
    output = state;
    output = (output ^ (output >> 30)) * 0xBF58476D1CE4E5B9u;
    output = (output ^ (output >> 27)) * 0x94D049BB133111EBu;
    output ^= output >> 31;
  }
  return (output >> (i % 64) & 1) != 0;
}

// x·D·H/√n, one column of H after the other.
void rotate(uint64_t seed, int dim, double* x) {
  std::array<double, kMaxHeadDim> out{};
  for (int begin = 0; begin < dim;) {
    const int n = static_cast<int>(std::bit_floor(static_cast<unsigned>(dim - begin)));
    for (int i = 0; i < n; ++i)
      if (sign_is_minus(seed, begin + i)) x[begin + i] = -x[begin + i];
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int i = 0; i < n; ++i)
        sum += std::popcount(static_cast<unsigned>(i & j)) % 2 ? -x[begin + i] : x[begin + i];
      out[static_cast<size_t>(begin + j)] = sum / std::sqrt(double(n));
    }
    begin += n;
  }
  std::copy_n(out.begin(), dim, x);
}

// Calls each(batch, head, row of the sequence, its rows) for all tokens that count.
template <class Each>
void for_each_token(const Side& side, const Each& each) {
  for (int64_t b = 0; b < side.part.in.batch; ++b) {
    const RowRange rows = rows_of(side.sequences, b);
    for (int64_t i = 0; i < rows.length; ++i)
      for (int64_t h = 0; h < side.part.in.heads; ++h) each(b, h, i, rows);
  }
}

int64_t offset_of(const TensorView& t, int64_t b, int64_t h, int64_t i, const RowRange& rows) {
  return b * t.stride_batch + (rows.first + i) * t.stride_seq + h * t.stride_head;
}

int64_t scale_offset(const Side& side, int64_t b, int64_t h, int64_t i, const RowRange& rows) {
  return side.part.scale.offset(b, h, scale_block(side.sequences, rows, b, i));
}

size_t value_offset(const Side& side, int64_t b, int64_t h, int64_t i) {
  return static_cast<size_t>((row_in_batch(side.sequences, b, i) * side.part.in.heads + h) *
                             side.part.in.dim);
}

}  // namespace

double scale_ref(double amax) {
  if (amax == 0) return 1;
  if (!std::isfinite(amax)) return std::numeric_limits<double>::quiet_NaN();
  int exponent = -126;
  while (std::ldexp(448, exponent) < amax) ++exponent;
  return std::ldexp(1, exponent);
}

unsigned char e4m3_code_ref(double x) {
  if (std::isnan(x)) return 0x7F;
  const auto& values = positive_values();
  const double size = std::abs(x);
  const auto above = std::lower_bound(values.begin(), values.end(), size);
  auto nearest = above == values.end() ? above - 1 : above;
  if (above != values.end() && above != values.begin()) {
    const double up = *above - size, down = size - *(above - 1);
    const bool is_odd = (above - values.begin()) % 2 != 0;
    if (down < up || (down == up && is_odd)) --nearest;
  }
  return static_cast<unsigned char>((nearest - values.begin()) | (std::signbit(x) ? 0x80 : 0));
}

double e4m3_half_step(double x) {
  if (std::abs(x) < 0x1p-6) return 0x1p-10;
  if (!std::isfinite(x)) return 0x1p4;
  return std::ldexp(1, std::min(std::ilogb(x), 8) - 4);
}

ReferenceQuantized quantize_values_ref(const QuantizeProblem& p, QuantizeWhich which) {
  const Side side = side_of(p, which);
  const QuantizePart& part = side.part;
  ReferenceQuantized made;
  if (!part.given) return made;
  const int64_t dim = part.in.dim;
  made.values.resize(
      static_cast<size_t>(rows_in_batch(side.sequences, part.in.batch) * part.in.heads * dim));
  const auto amax_at = [&](int64_t offset) -> double& {
    if (static_cast<size_t>(offset) >= made.amax.size())
      made.amax.resize(static_cast<size_t>(offset) + 1, -1);
    return made.amax[static_cast<size_t>(offset)];
  };
  // A scale of more than a block is written even if no token counts.
  if (part.scale.kind == ScaleKind::kTensor) amax_at(0) = 0;
  if (part.scale.kind == ScaleKind::kHead)
    for (int64_t b = 0; b < part.in.batch; ++b)
      for (int64_t h = 0; h < part.in.heads; ++h) amax_at(part.scale.offset(b, h, 0)) = 0;

  for_each_token(side, [&](int64_t b, int64_t h, int64_t i, const RowRange& rows) {
    double* x = &made.values[value_offset(side, b, h, i)];
    const int64_t from = offset_of(part.in, b, h, i, rows);
    for (int64_t d = 0; d < dim; ++d) x[d] = load_float(part.in.data, p.dtype, from + d);
    if (side.has_positions && p.rotary.given) apply_rope(p.rotary, side.offset + i, x);
    if (side.has_positions && p.rotates) rotate(p.rotation_seed, static_cast<int>(dim), x);
    double& amax = amax_at(scale_offset(side, b, h, i, rows));
    amax = std::max(amax, 0.0);
    for (int64_t d = 0; d < dim; ++d)
      amax = std::isfinite(x[d]) ? std::max(amax, std::abs(x[d])) : kInfinity;
  });
  return made;
}

void quantize_ref(const QuantizeProblem& p) {
  for (const QuantizeWhich which : {QuantizeWhich::kQ, QuantizeWhich::kK, QuantizeWhich::kV}) {
    const Side side = side_of(p, which);
    const ReferenceQuantized ref = quantize_values_ref(p, which);
    for (size_t i = 0; i < ref.amax.size(); ++i)
      if (ref.amax[i] >= 0) side.part.scale.data[i] = static_cast<float>(scale_ref(ref.amax[i]));
    if (!side.part.given) continue;
    for_each_token(side, [&](int64_t b, int64_t h, int64_t i, const RowRange& rows) {
      const double* x = &ref.values[value_offset(side, b, h, i)];
      const double scale =
          scale_ref(ref.amax[static_cast<size_t>(scale_offset(side, b, h, i, rows))]);
      auto* codes =
          static_cast<unsigned char*>(side.part.out.data) + offset_of(side.part.out, b, h, i, rows);
      for (int64_t d = 0; d < side.part.out.dim; ++d) codes[d] = e4m3_code_ref(x[d] / scale);
    });
  }
}

}  // namespace flash3
