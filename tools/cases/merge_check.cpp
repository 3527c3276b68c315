// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>

#include "cases/internals.hpp"
#include "cases/runner.hpp"
#include "cases/tensors.hpp"

namespace flash3::cases {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A tensor whose rows of heads lie `gap` elements apart, in host memory.
struct GappedRows {
  std::vector<std::byte> bytes;
  int64_t first, stride;  // elements
  int size;               // of an element

  GappedRows(int64_t count, int64_t dim, int element_bytes, bool odd)
      : first(odd ? 1 : 0), stride(dim + (odd ? 3 : 0)), size(element_bytes) {
    bytes.assign(static_cast<size_t>((first + count * stride) * size), kFillPattern);
  }
  int64_t at(int64_t row, int64_t d) const { return first + row * stride + d; }
};

// What a case merges, and what the result must be.
class MergeData {
 public:
  explicit MergeData(const MergeCase& c)
      : c_(c),
        parts(c.parts * c.rows * c.heads, c.dim, 4, c.odd),
        out(c.rows * c.heads, c.dim, static_cast<int>(element_size(c.dtype)), c.odd),
        lse_parts(static_cast<size_t>(c.parts * c.heads * c.rows)),
        sink(static_cast<size_t>(c.heads)) {
    for (int64_t s = 0; s < c.parts; ++s)
      for (int64_t i = 0; i < c.rows; ++i)
        for (int64_t h = 0; h < c.heads; ++h) fill(s, i, h);
    for (int64_t h = 0; h < c.heads; ++h)
      sink[static_cast<size_t>(h)] = h == 1 ? -kInfinity : normal_value(3, uint64_t(h));
  }

  // The result for row i of head h, and its sum of weights.
  double expected(int64_t i, int64_t h, std::vector<double>* row) const {
    double sum = c_.sink ? std::exp(double{sink[static_cast<size_t>(h)]}) : 0;
    row->assign(static_cast<size_t>(c_.dim), 0);
    for (int64_t s = 0; s < c_.parts; ++s) {
      const float lse = lse_parts[lse_at(s, i, h)];
      if (lse == -kInfinity) continue;
      const double weight = std::exp(double{lse});
      sum += weight;
      for (int64_t d = 0; d < c_.dim; ++d)
        (*row)[static_cast<size_t>(d)] +=
            weight * double{load_float(parts.bytes.data(), FLASH3_FLOAT32, part_at(s, i, h, d))};
    }
    for (double& x : *row) x = sum == 0 ? 0 : x / sum;
    return sum;
  }

  flash3_merge_params params(std::byte* parts_at, void* lses_at, std::byte* out_at, void* lse_at,
                             void* sink_at) const {
    const int64_t n = parts.stride;
    flash3_merge_params p{};
    p.struct_size = sizeof p;
    p.out_parts = {parts_at + parts.first * 4,
                   FLASH3_FLOAT32,
                   4,
                   {c_.parts, c_.rows, c_.heads, c_.dim},
                   {c_.rows * c_.heads * n, c_.heads * n, n, 1}};
    p.lse_parts = {lses_at,
                   FLASH3_FLOAT32,
                   3,
                   {c_.parts, c_.heads, c_.rows},
                   {c_.heads * c_.rows, c_.rows, 1}};
    p.out = {out_at + out.first * out.size,
             c_.dtype,
             3,
             {c_.rows, c_.heads, c_.dim},
             {c_.heads * out.stride, out.stride, 1}};
    if (c_.lse) p.lse = {lse_at, FLASH3_FLOAT32, 2, {c_.heads, c_.rows}, {c_.rows, 1}};
    if (c_.sink) p.sink = {sink_at, FLASH3_FLOAT32, 1, {c_.heads}, {1}};
    return p;
  }

 private:
  // Part s of row i of head h saw no key where their sum is divisible; row 0 saw none at all.
  void fill(int64_t s, int64_t i, int64_t h) {
    const bool unseen = i == 0 || (s + h + i) % 4 == 0;
    const size_t at = lse_at(s, i, h);
    lse_parts[at] = unseen ? -kInfinity : 20 * normal_value(2, at);
    for (int64_t d = 0; d < c_.dim; ++d) {
      const int64_t to = part_at(s, i, h, d);
      store_float(parts.bytes.data(), FLASH3_FLOAT32, to,
                  unseen ? kNan : normal_value(1, uint64_t(to)));
    }
  }

  MergeCase c_;

 public:
  GappedRows parts, out;
  std::vector<float> lse_parts, sink;

  int64_t part_at(int64_t s, int64_t i, int64_t h, int64_t d) const {
    return parts.at((s * c_.rows + i) * c_.heads + h, d);
  }
  size_t lse_at(int64_t s, int64_t i, int64_t h) const {
    return static_cast<size_t>((s * c_.heads + h) * c_.rows + i);
  }
};

// In the unit of the last place that a result is rounded to.
double step_of(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT32 ? 1e-6 : std::exp2(dtype == FLASH3_BFLOAT16 ? -8 : -11);
}

std::string compare(const MergeCase& c, const MergeData& data, const GappedRows& out,
                    const std::vector<float>& lse) {
  std::vector<std::byte> outside = out.bytes;
  std::vector<double> want;
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t h = 0; h < c.heads; ++h) {
      const auto where = [&] {
        return "row " + std::to_string(i) + " of head " + std::to_string(h);
      };
      const double sum = data.expected(i, h, &want);
      for (int64_t d = 0; d < c.dim; ++d) {
        const int64_t at = out.at(i * c.heads + h, d);
        const double got = load_float(out.bytes.data(), c.dtype, at),
                     exact = want[static_cast<size_t>(d)];
        std::memset(outside.data() + at * out.size, int(kFillPattern), size_t(out.size));
        if (!(std::abs(got - exact) <= step_of(c.dtype) * std::abs(exact) + 1e-5))
          return "out, " + where() + ": " + std::to_string(got) + ", expected " +
                 std::to_string(exact);
      }
      if (!c.lse) continue;
      const float got = lse[static_cast<size_t>(h * c.rows + i)];
      const double exact = std::log(sum);
      if (sum == 0 ? got != -kInfinity : !(std::abs(got - exact) <= 1e-5))
        return "lse, " + where() + ": " + std::to_string(got) + ", expected " +
               std::to_string(exact);
    }
  for (const std::byte byte : outside)
    if (byte != kFillPattern) return "memory beside out is written";
  return "";
}

}  // namespace

std::string to_text(const MergeCase& c) {
  return std::to_string(c.parts) + " parts of " + std::to_string(c.rows) + " rows of " +
         std::to_string(c.heads) + " heads of " + std::to_string(c.dim) + " to " +
         short_name(c.dtype) + (c.sink ? ", with sinks" : "") + (c.lse ? "" : ", without lse") +
         (c.odd ? ", off 16 bytes" : "");
}

std::vector<MergeCase> merge_case_table() {
  std::vector<MergeCase> table;
  for (const flash3_dtype dtype : {FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16})
    for (const bool sink : {false, true})
      for (const bool odd : {false, true}) {
        table.push_back({.dtype = dtype, .sink = sink, .odd = odd});
        table.push_back({.parts = 0, .dtype = dtype, .sink = sink, .odd = odd});
        table.push_back({.parts = 1, .rows = 1, .dtype = dtype, .sink = sink, .odd = odd});
        table.push_back(
            {.parts = 70, .rows = 40, .heads = 3, .dim = 1, .dtype = dtype, .sink = sink});
        table.push_back({.parts = 2,
                         .rows = 3000,
                         .heads = 16,
                         .dim = 128,
                         .dtype = dtype,
                         .sink = sink,
                         .odd = odd});
        table.push_back({.rows = 33,
                         .heads = 9,
                         .dim = 256,
                         .dtype = dtype,
                         .sink = sink,
                         .lse = false,
                         .odd = odd});
      }
  return table;
}

std::string check_merge(const MergeCase& c, Memory& memory, flash3_backend backend) {
  MergeData data(c);
  const auto place = [&](const void* from, size_t bytes) {
    // Also for no elements, and off 16 bytes then, the address must be one of this memory.
    auto to = memory.allocate(std::max<size_t>(bytes, 256));
    if (bytes > 0) memory.copy_in(to.get(), from, bytes);
    return to;
  };
  std::vector<float> lse(static_cast<size_t>(c.heads * c.rows), -7.f);
  const auto parts = place(data.parts.bytes.data(), data.parts.bytes.size()),
             lses = place(data.lse_parts.data(), data.lse_parts.size() * 4),
             out = place(data.out.bytes.data(), data.out.bytes.size()),
             lse_out = place(lse.data(), lse.size() * 4),
             sink = place(data.sink.data(), data.sink.size() * 4);
  flash3_merge_params p =
      data.params(static_cast<std::byte*>(parts.get()), lses.get(),
                  static_cast<std::byte*>(out.get()), lse_out.get(), sink.get());
  p.backend = backend;
  p.stream = memory.stream();
  if (flash3_merge(&p) != FLASH3_OK) return flash3_last_error();
  memory.finish();
  memory.copy_out(data.out.bytes.data(), out.get(), data.out.bytes.size());
  memory.copy_out(lse.data(), lse_out.get(), lse.size() * 4);
  return compare(c, data, data.out, lse);
}

}  // namespace flash3::cases
