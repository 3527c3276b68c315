#include "cases/tensors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <thread>

#include "core/band.hpp"
#include "core/convert.hpp"

namespace flash3::cases {
namespace {

constexpr std::byte kPoison{0xFF};
constexpr size_t kGuardBytes = 512;  // a multiple of every alignment that TMA asks for

struct Strides {
  int64_t batch, seq, head;
};

Strides strides_of(Layout layout, int64_t seq, int64_t heads, int64_t dim) {
  switch (layout) {
    case Layout::kHeadsFirst: return {heads * seq * dim, dim, seq * dim};
    case Layout::kPadded: {
      const int64_t head = (dim + 7) / 8 * 8 + 8;  // whole 16-byte units, also for 2-byte elements
      const int64_t row = heads * head + 16;
      return {seq * row + 64, row, head};
    }
    case Layout::kOdd: {
      const int64_t head = dim + 3 + dim % 2 * 2;
      const int64_t row = heads * head + 1 + heads * head % 2;
      return {seq * row + 5, row, head};
    }
    case Layout::kBatchSeq: break;
  }
  return {seq * heads * dim, heads * dim, dim};
}

GuardedTensor guard(flash3_tensor view, bool misaligned) {
  GuardedTensor g;
  const size_t size = static_cast<size_t>(element_size(view.dtype));
  g.offset = kGuardBytes + (misaligned ? size : 0);
  g.bytes.assign(g.offset + static_cast<size_t>(span_of(view)) * size + kGuardBytes, kPoison);
  g.view = view;
  g.view.data = g.bytes.data() + g.offset;
  return g;
}

// Calls row(offset in elements) for each run of the last dimension.
template <class Row>
void for_each_row(const flash3_tensor& t, Row row) {
  const bool lse = t.ndim == 3;
  const int64_t inner = lse ? 1 : t.shape[2];
  for (int64_t a = 0; a < t.shape[0]; ++a)
    for (int64_t b = 0; b < t.shape[1]; ++b)
      for (int64_t c = 0; c < inner; ++c)
        row(a * t.stride[0] + b * t.stride[1] + (lse ? 0 : c * t.stride[2]));
}

// Steele and Vigna's SplitMix64: a bijection that turns a counter into random bits.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Box–Muller: two values from 64 random bits.
std::array<float, 2> normal_pair(uint64_t seed, uint64_t pair) {
  const uint64_t bits = mix(mix(seed) ^ pair);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float angle =
      static_cast<float>(bits & 0xFFFFFF) * (0x1p-24f * 2 * std::numbers::pi_v<float>);
  const float radius = std::sqrt(-2 * std::log(u));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

float value_at(Distribution distribution, uint64_t seed, uint64_t i) {
  const float x = normal_value(seed, i);
  if (distribution != Distribution::kOutliers) return x;
  const uint64_t coin = mix(mix(~seed) ^ i);
  const bool outlier = static_cast<double>(coin >> 11) * 0x1p-53 < 0.001;
  return outlier ? x + 10 * normal_value(seed ^ 0x5EED, i) : x;
}

void set(const flash3_tensor& t, int64_t b, int64_t s, int64_t h, int64_t d, float x) {
  store_float(t.data, t.dtype, b * t.stride[0] + s * t.stride[1] + h * t.stride[2] + d, x);
}

// A NaN in q poisons one row; an infinite k sends one key's scores to ±∞ in one KV head; infinities
// and a NaN in v reach single output columns. A key that some rows do not see gets no special v: 0
// · ∞ is NaN in every implementation that multiplies a masked tile, the naive one too.
void place_specials(const Case& c, const ForwardTensors& t) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  if (c.batch == 0 || c.seq_q == 0 || c.seq_k < 8 || c.heads_q == 0 || c.heads_k == 0) return;
  const int64_t b = c.batch - 1;
  set(t.q.view, 0, c.seq_q / 2, 0, 0, kNaN);
  set(t.k.view, b, c.seq_k / 3, c.heads_k - 1, c.head_dim - 1, kInf);

  const Band band = band_of(c);
  const int64_t first = std::max<int64_t>(0, c.seq_q - 1 + band.lo);  // seen by the last row
  const int64_t last = std::min<int64_t>(c.seq_k - 1, band.hi);       // seen by the first row
  if (first > last) return;
  set(t.v.view, 0, first, 0, 0, kInf);
  set(t.v.view, 0, last, 0, c.head_dim_v / 2, -kInf);
  set(t.v.view, b, first, c.heads_k - 1, c.head_dim_v - 1, kNaN);
}

}  // namespace

int64_t element_size(flash3_dtype dtype) { return dtype == FLASH3_FLOAT32 ? 4 : 2; }

int64_t span_of(const flash3_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return last + 1;
}

flash3_tensor GuardedTensor::at(void* base) const {
  flash3_tensor moved = view;
  moved.data = static_cast<std::byte*>(base) + offset;
  return moved;
}

void GuardedTensor::poison() { std::fill(bytes.begin(), bytes.end(), kPoison); }

std::string GuardedTensor::damage() const {
  std::vector<bool> owned(bytes.size(), false);
  const size_t size = static_cast<size_t>(element_size(view.dtype));
  const size_t row_bytes = static_cast<size_t>(view.shape[view.ndim - 1]) * size;
  for_each_row(view, [&](int64_t element) {
    const auto begin =
        owned.begin() + static_cast<ptrdiff_t>(offset + static_cast<size_t>(element) * size);
    std::fill(begin, begin + static_cast<ptrdiff_t>(row_bytes), true);
  });
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (owned[i] || bytes[i] == kPoison) continue;
    const auto at = static_cast<int64_t>(i) - static_cast<int64_t>(offset);
    return "byte " + std::to_string(at) + " from its start was overwritten, outside its elements";
  }
  return "";
}

GuardedTensor make_tensor(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads,
                          int64_t dim, Layout layout) {
  const Strides s = strides_of(layout, seq, heads, dim);
  const flash3_tensor view{
      nullptr, dtype, 4, {batch, seq, heads, dim}, {s.batch, s.seq, s.head, 1}};
  return guard(view, layout == Layout::kOdd);
}

GuardedTensor make_lse(int64_t batch, int64_t heads, int64_t seq, Layout layout) {
  const bool gaps = layout == Layout::kPadded || layout == Layout::kOdd;
  const int64_t head = gaps ? seq + 3 : seq;
  const int64_t whole = heads * head + (gaps ? 5 : 0);
  const flash3_tensor view{nullptr, FLASH3_FLOAT32, 3, {batch, heads, seq, 0}, {whole, head, 1, 0}};
  return guard(view, layout == Layout::kOdd);
}

float normal_value(uint64_t seed, uint64_t i) { return normal_pair(seed, i / 2)[i % 2]; }

void fill_random(const flash3_tensor& t, Distribution distribution, uint64_t seed) {
  uint64_t i = 0;
  for_each_row(t, [&](int64_t row) {
    for (int64_t d = 0; d < t.shape[t.ndim - 1]; ++d)
      store_float(t.data, t.dtype, row + d, value_at(distribution, seed, i++));
  });
}

void fill_normal(void* data, flash3_dtype dtype, int64_t count, uint64_t seed) {
  const auto threads = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t share = (count / threads + 2) / 2 * 2;  // even: pairs are never split
  const auto fill = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 2) {
      const auto pair = normal_pair(seed, static_cast<uint64_t>(i) / 2);
      store_float(data, dtype, i, pair[0]);
      if (i + 1 < end) store_float(data, dtype, i + 1, pair[1]);
    }
  };
  std::vector<std::jthread> workers;
  for (int64_t begin = 0; begin < count; begin += share)
    workers.emplace_back(fill, begin, std::min(begin + share, count));
}

ForwardTensors make_forward_tensors(const Case& c) {
  ForwardTensors t;
  t.q = make_tensor(c.dtype, c.batch, c.seq_q, c.heads_q, c.head_dim, c.layout);
  t.k = make_tensor(c.dtype, c.batch, c.seq_k, c.heads_k, c.head_dim, c.layout);
  t.v = make_tensor(c.dtype, c.batch, c.seq_k, c.heads_k, c.head_dim_v, c.layout);
  t.out = make_tensor(c.dtype, c.batch, c.seq_q, c.heads_q, c.head_dim_v, c.layout);
  if (c.want_lse) t.lse = make_lse(c.batch, c.heads_q, c.seq_q, c.layout);
  fill_random(t.q.view, c.distribution, 3 * c.seed);
  fill_random(t.k.view, c.distribution, 3 * c.seed + 1);
  fill_random(t.v.view, c.distribution, 3 * c.seed + 2);
  if (c.distribution == Distribution::kSpecial) place_specials(c, t);
  return t;
}

flash3_forward_params make_params(const Case& c, const flash3_tensor& q, const flash3_tensor& k,
                                  const flash3_tensor& v, const flash3_tensor& out,
                                  const flash3_tensor& lse) {
  flash3_forward_params p{};
  p.struct_size = sizeof p;
  p.q = q, p.k = k, p.v = v, p.out = out, p.lse = lse;
  p.softmax_scale = c.softmax_scale;
  p.causal = c.causal;
  p.window = c.window;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  return p;
}

flash3_forward_params make_question(const Case& c) {
  const auto view = [&](int64_t seq, int64_t heads, int64_t dim) {
    const Strides s = strides_of(c.layout, seq, heads, dim);
    return flash3_tensor{
        nullptr, c.dtype, 4, {c.batch, seq, heads, dim}, {s.batch, s.seq, s.head, 1}};
  };
  flash3_tensor lse{};
  if (c.want_lse) {
    lse = {nullptr,
           FLASH3_FLOAT32,
           3,
           {c.batch, c.heads_q, c.seq_q, 0},
           {c.heads_q * c.seq_q, c.seq_q, 1, 0}};
  }
  return make_params(c, view(c.seq_q, c.heads_q, c.head_dim), view(c.seq_k, c.heads_k, c.head_dim),
                     view(c.seq_k, c.heads_k, c.head_dim_v), view(c.seq_q, c.heads_q, c.head_dim_v),
                     lse);
}

}  // namespace flash3::cases
