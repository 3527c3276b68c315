// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "cases/case.hpp"
#include "cases/internals.hpp"
#include "cases/text.hpp"

namespace flash3::cases {
namespace {

constexpr std::pair<const char*, Layout> kLayouts[] = {{"bshd", Layout::kBatchSeq},
                                                       {"bhsd", Layout::kHeadsFirst},
                                                       {"padded", Layout::kPadded},
                                                       {"odd", Layout::kOdd}};

constexpr std::pair<const char*, TensorName> kNames[kTensorNames] = {
    {"q", TensorName::kQ},     {"k", TensorName::kK},       {"v", TensorName::kV},
    {"out", TensorName::kOut}, {"lse", TensorName::kLse},   {"dout", TensorName::kDout},
    {"dq", TensorName::kDq},   {"dlse", TensorName::kDlse}, {"dk", TensorName::kDk},
    {"dv", TensorName::kDv}};

struct Strides {
  int64_t batch, seq, head;
};

Strides strides_of(flash3_dtype dtype, const TensorLayout& l, int64_t seq, int64_t heads,
                   int64_t dim) {
  switch (l.layout) {
    case Layout::kHeadsFirst: {
      const int64_t row = dim + l.gap;
      return {heads * seq * row, row, seq * row};
    }
    case Layout::kPadded: {
      // Whole 16-byte units, also for 2-byte elements.
      const int64_t unit = dtype == FLASH3_FLOAT8_E4M3 ? 16 : 8;
      const int64_t head = round_up(dim, unit) + unit;
      const int64_t row = heads * head + 16 + l.gap;
      return {seq * row + 64, row, head};
    }
    case Layout::kOdd: {
      const int64_t head = dim + 3 + dim % 2 * 2;
      const int64_t row = heads * head + 1 + heads * head % 2 + l.gap;
      return {seq * row + 5, row, head};
    }
    case Layout::kBatchSeq: break;
  }
  const int64_t row = heads * dim + l.gap;
  return {seq * row, row, dim};
}

// What `wild` says of each dimension but the last.
flash3_tensor with_wild_strides(flash3_tensor t, const TensorLayout& layout) {
  constexpr int64_t kNonsense[] = {-7, INT64_MAX, 0};
  if (!layout.wild) return t;
  for (int d = 0; d + 1 < t.ndim; ++d)
    if (t.shape[d] <= 1) t.stride[d] = kNonsense[d];
  return t;
}

}  // namespace

const char* short_name(Layout layout) { return name_in(kLayouts, layout); }
const char* short_name(TensorName name) { return name_in(kNames, name); }
std::optional<Layout> parse_layout(std::string_view name) { return value_in(kLayouts, name); }

std::string to_text(TensorName name, const TensorLayout& l) {
  std::string text = std::string(short_name(name)) + ":" + short_name(l.layout);
  if (l.offset != 0) text += ".at" + std::to_string(l.offset);
  if (l.gap != 0) text += ".gap" + std::to_string(l.gap);
  if (l.one_batch) text += ".batch0";
  if (l.one_row) text += ".rows0";
  if (l.one_head) text += ".heads0";
  if (l.wild) text += ".wild";
  return text;
}

bool parse_layout(std::string_view text, TensorName* name, TensorLayout* layout) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  const auto found = value_in(kNames, text.substr(0, colon));
  if (!found) return false;
  *name = *found, *layout = {};
  bool first = true;
  for (size_t begin = colon + 1; begin <= text.size(); first = false) {
    const size_t end = std::min(text.find('.', begin), text.size());
    std::string_view word = text.substr(begin, end - begin);
    begin = end + 1;
    if (first) {
      const auto value = value_in(kLayouts, word);
      if (!value) return false;
      layout->layout = *value;
    } else if (word == "batch0")
      layout->one_batch = true;
    else if (word == "rows0")
      layout->one_row = true;
    else if (word == "heads0")
      layout->one_head = true;
    else if (word == "wild")
      layout->wild = true;
    else if (eat("at", &word) ? !number(word, &layout->offset)
                              : !eat("gap", &word) || !number(word, &layout->gap))
      return false;
  }
  return true;
}

flash3_tensor view_of(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads, int64_t dim,
                      const TensorLayout& layout) {
  Strides s = strides_of(dtype, layout, seq, heads, dim);
  if (layout.one_batch) s.batch = 0;
  if (layout.one_row) s.seq = 0;
  if (layout.one_head) s.head = 0;
  return with_wild_strides(
      {nullptr, dtype, 4, {batch, seq, heads, dim}, {s.batch, s.seq, s.head, 1}}, layout);
}

flash3_tensor lse_view_of(int64_t batch, int64_t heads, int64_t seq, const TensorLayout& layout) {
  const bool gaps = layout.layout == Layout::kPadded || layout.layout == Layout::kOdd;
  int64_t head = (gaps ? seq + 3 : seq) + layout.gap;
  int64_t whole = heads * head + (gaps ? 5 : 0);
  if (layout.one_head) head = 0;
  if (layout.one_batch) whole = 0;
  return with_wild_strides(
      {nullptr, FLASH3_FLOAT32, 3, {batch, heads, seq, 0}, {whole, head, 1, 0}}, layout);
}

flash3_tensor packed(flash3_tensor t) {
  --t.ndim;
  for (auto* member : {&t.shape, &t.stride}) {
    std::rotate(std::begin(*member), std::begin(*member) + 1, std::end(*member));
    *std::rbegin(*member) = 0;
  }
  return t;
}

}  // namespace flash3::cases
