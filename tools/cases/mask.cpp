// SPDX-License-Identifier: Apache-2.0
#include "cases/mask.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "cases/case_mask.hpp"
#include "cases/id_text.hpp"
#include "cases/split_mix.hpp"

namespace flash3::cases {
namespace {

constexpr std::pair<const char*, CaseMaskSource> kSources[] = {
    {"band", CaseMaskSource::kBand},          {"documents", CaseMaskSource::kDocuments},
    {"dense", CaseMaskSource::kDense},        {"ranges", CaseMaskSource::kRanges},
    {"blocks", CaseMaskSource::kBlocks},      {"bits", CaseMaskSource::kBits},
    {"bitblocks", CaseMaskSource::kBitBlocks}};

constexpr int64_t kMostBlocks = 6;    // that a row of blocks of a case lists
constexpr int64_t kBlocksOfBits = 5;  // that a case has bits of

// "<rows>x<keys>"
bool block_sizes(std::string_view text, CaseMask* mask) {
  const size_t x = text.find('x');
  return x != std::string_view::npos && number(text.substr(0, x), &mask->block_rows) &&
         number(text.substr(x + 1), &mask->block_keys);
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(mix(seed)) {}
  int64_t below(int64_t n) {
    return static_cast<int64_t>(next_bits(&state_) %
                                static_cast<uint64_t>(std::max<int64_t>(n, 1)));
  }
  uint64_t bits() { return next_bits(&state_); }

 private:
  uint64_t state_;
};

GuardedTensor contiguous(flash3_dtype dtype, std::initializer_list<int64_t> shape) {
  flash3_tensor view{nullptr, dtype, static_cast<int32_t>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t stride = 1;
  for (int d = view.ndim; d-- > 0;) view.stride[d] = stride, stride *= view.shape[d];
  return guard(view, 0);
}

int64_t count_of(const flash3_tensor& t) {
  int64_t count = 1;
  for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
  return count;
}

int32_t nonsense(Draw& d) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const int32_t all[] = {-1, -1000, -kMost - 1, kMost, kMost - 1, 1 << 30};
  return all[d.below(std::size(all))];
}

// Rows of queries that begin together have the same bounds, but for a step from row to row.
void fill_ranges(const Case& c, Draw& d, const flash3_tensor& t) {
  auto* const bounds = static_cast<int32_t*>(t.data);
  const int64_t columns = t.shape[3], pairs = count_of(t) / std::max<int64_t>(2 * columns, 1);
  for (int64_t pair = 0; columns > 0 && pair < pairs; ++pair) {
    int32_t* const begins = bounds + pair * 2 * columns;
    for (int64_t i = 0; i < columns;) {
      const int64_t end = std::min(columns, i + 1 + d.below(300));
      const int64_t a = d.below(c.seq_k + 1), b = d.below(c.seq_k + 1), kind = d.below(10);
      for (const int64_t first = i; i < end; ++i) {
        const int64_t step = kind < 4 ? i - first : 0;
        begins[i] = static_cast<int32_t>(kind == 9 ? a : std::min(a, b) + (kind % 2) * step);
        begins[columns + i] = static_cast<int32_t>(std::max(a, b) + step);
        if (kind == 8) begins[i + columns * d.below(2)] = nonsense(d);
      }
    }
  }
}

void fill_documents(Draw& d, const flash3_tensor& t) {
  auto* const numbers = static_cast<int32_t*>(t.data);
  const int64_t keys = t.shape[1];
  for (int64_t b = 0; b < t.shape[0]; ++b)
    for (int64_t j = 0; j < keys;) {
      const int64_t end = std::min(keys, j + 1 + d.below(1 + keys / (1 + d.below(5))));
      const int32_t number = d.below(8) == 0 ? nonsense(d) : static_cast<int32_t>(d.below(4));
      while (j < end) numbers[b * keys + j++] = number;
    }
}

// Squares of 64 that are seen, hidden, or a bit for each pair.
void fill_dense(Draw& d, const flash3_tensor& t) {
  const int64_t rows = t.shape[2], keys = t.shape[3];
  auto* bytes = static_cast<uint8_t*>(t.data);
  for (int64_t pair = 0; pair < t.shape[0] * t.shape[1]; ++pair, bytes += rows * keys)
    for (int64_t r = 0; r < rows; r += 64)
      for (int64_t k = 0; k < keys; k += 64) {
        const int64_t kind = d.below(6);
        for (int64_t i = r; i < std::min(r + 64, rows); ++i)
          for (int64_t j = k; j < std::min(k + 64, keys); ++j)
            bytes[i * keys + j] = kind < 2   ? 0
                                  : kind < 4 ? static_cast<uint8_t>(1 + d.below(255))
                                             : static_cast<uint8_t>(d.bits() & d.bits() & 9);
      }
}

void fill_blocks(const Case& c, Draw& d, const flash3_tensor& counts,
                 const flash3_tensor& indices) {
  const int64_t most = indices.shape[3], blocks = ceil_div(c.seq_k, c.mask.block_keys);
  auto* const count = static_cast<int32_t*>(counts.data);
  auto* const index = static_cast<int32_t*>(indices.data);
  for (int64_t row = 0; row < count_of(counts); ++row) {
    count[row] = d.below(12) == 0 ? nonsense(d) : static_cast<int32_t>(d.below(most + 1));
    for (int64_t n = 0; n < most; ++n)
      index[row * most + n] =
          d.below(12) == 0 ? nonsense(d) : static_cast<int32_t>(d.below(blocks + 1));
  }
}

// Bytes that are seen, hidden, or a bit for each pair, in runs; bits after the last key too.
void fill_bits(Draw& d, const flash3_tensor& t) {
  auto* const bytes = static_cast<uint8_t*>(t.data);
  for (int64_t n = 0, count = count_of(t); n < count;) {
    const int64_t end = std::min(count, n + 1 + d.below(40)), kind = d.below(5);
    for (; n < end; ++n)
      bytes[n] = kind < 2 ? 0 : kind < 4 ? uint8_t{255} : static_cast<uint8_t>(d.bits() & d.bits());
  }
}

void fill_bit_blocks(Draw& d, const flash3_tensor& t, int64_t blocks) {
  auto* const which = static_cast<int32_t*>(t.data);
  for (int64_t n = 0; n < count_of(t); ++n) switch (d.below(6)) {
      case 0: which[n] = FLASH3_MASK_ALL_SEEN; break;
      case 1: which[n] = FLASH3_MASK_ALL_SEEN - 1; break;
      case 2: which[n] = nonsense(d); break;
      default: which[n] = static_cast<int32_t>(d.below(blocks + 1));
    }
}

void check(flash3_status status, const Case& c) {
  if (status != FLASH3_OK)
    throw std::logic_error("the mask of " + to_id(c) + ": " + flash3_last_error());
}

}  // namespace

std::optional<CaseMask> parse_mask(std::string_view text) {
  CaseMask mask;
  while (text.size() > 2 && text[text.size() - 2] == '.') {
    if (text.back() == 'b' && !mask.of_batch)
      mask.of_batch = true;
    else if (text.back() == 'h' && !mask.of_heads)
      mask.of_heads = true;
    else
      return std::nullopt;
    text.remove_suffix(2);
  }
  for (const auto& [name, source] : kSources) {
    if (!eat(name, &text)) continue;
    mask.source = source;
    if (source == CaseMaskSource::kRanges && !number(text, &mask.ranges)) return std::nullopt;
    if (source == CaseMaskSource::kBlocks && !block_sizes(text, &mask)) return std::nullopt;
    const bool has_numbers = source == CaseMaskSource::kRanges || source == CaseMaskSource::kBlocks;
    const bool shared = source == CaseMaskSource::kBand;
    const bool headless = shared || source == CaseMaskSource::kDocuments;
    if ((!has_numbers && !text.empty()) || (shared && mask.of_batch) || (headless && mask.of_heads))
      return std::nullopt;
    return mask;
  }
  return std::nullopt;
}

std::string to_text(const CaseMask& mask) {
  std::string text = name_in(kSources, mask.source);
  if (mask.source == CaseMaskSource::kRanges) text += std::to_string(mask.ranges);
  if (mask.source == CaseMaskSource::kBlocks)
    text += std::to_string(mask.block_rows) + "x" + std::to_string(mask.block_keys);
  return text + (mask.of_batch ? ".b" : "") + (mask.of_heads ? ".h" : "");
}

MaskSources make_mask_sources(const Case& c) {
  MaskSources s;
  Draw d(c.seed + 9000);
  const int64_t batch = c.mask.of_batch ? c.batch : 1, heads = c.mask.of_heads ? c.heads_q : 1;
  switch (c.mask.source) {
    case CaseMaskSource::kNone:
    case CaseMaskSource::kBand: break;
    case CaseMaskSource::kRanges:
      s.ranges = contiguous(FLASH3_INT32, {batch, heads, 2 * c.mask.ranges, c.seq_q});
      fill_ranges(c, d, s.ranges.view);
      break;
    case CaseMaskSource::kDocuments:
      s.documents = contiguous(FLASH3_INT32, {batch, c.seq_k});
      fill_documents(d, s.documents.view);
      break;
    case CaseMaskSource::kDense:
      s.dense = contiguous(FLASH3_UINT8, {batch, heads, c.seq_q, c.seq_k});
      fill_dense(d, s.dense.view);
      break;
    case CaseMaskSource::kBlocks: {
      const int64_t rows = ceil_div(c.seq_q, std::max<int64_t>(c.mask.block_rows, 1));
      s.block_counts = contiguous(FLASH3_INT32, {batch, heads, rows});
      s.block_indices = contiguous(FLASH3_INT32, {batch, heads, rows, kMostBlocks});
      fill_blocks(c, d, s.block_counts.view, s.block_indices.view);
      break;
    }
    case CaseMaskSource::kBits:
      s.bits = contiguous(FLASH3_UINT8, {batch, heads, c.seq_q, ceil_div(c.seq_k, int64_t{8})});
      fill_bits(d, s.bits.view);
      break;
    case CaseMaskSource::kBitBlocks: {
      constexpr int64_t kBlock = FLASH3_MASK_BLOCK;
      s.bits = contiguous(FLASH3_UINT8, {kBlocksOfBits, kBlock, kBlock / 8});
      s.bit_blocks = contiguous(
          FLASH3_INT32, {batch, heads, ceil_div(c.seq_q, kBlock), ceil_div(c.seq_k, kBlock)});
      fill_bits(d, s.bits.view);
      fill_bit_blocks(d, s.bit_blocks.view, kBlocksOfBits);
      break;
    }
  }
  return s;
}

flash3_mask_params MaskSources::params(const Case& c) const {
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  p.batch = c.batch, p.heads_q = c.heads_q, p.seq_q = c.seq_q, p.seq_k = c.seq_k;
  p.causal = c.causal, p.window = c.window;
  p.window_left = c.window_left, p.window_right = c.window_right, p.chunk = c.chunk;
  p.mask_alignment = static_cast<int32_t>(c.added["mask_alignment"]);
  visit([&](const char*, const GuardedTensor& tensor, auto field) { p.*field = tensor.view; });
  p.block_rows = static_cast<int32_t>(c.mask.block_rows);
  p.block_keys = static_cast<int32_t>(c.mask.block_keys);
  return p;
}

std::shared_ptr<const HostMask> make_host_mask(const Case& c) {
  if (!c.mask.given()) return nullptr;
  auto made = std::make_shared<HostMask>();
  made->sources = make_mask_sources(c);
  flash3_mask_params p = made->sources.params(c);
  p.backend = FLASH3_BACKEND_CPU;
  check(flash3_mask_size(&p, &made->mask.size), c);
  constexpr size_t kAlignment = FLASH3_WORKSPACE_ALIGNMENT;
  made->memory = {std::aligned_alloc(kAlignment, round_up(made->mask.size, kAlignment)), std::free};
  if (!made->memory) throw std::bad_alloc();
  made->mask.data = made->memory.get();
  check(flash3_mask_make(&p, &made->mask), c);
  made->pairs = mask_pairs(p);
  return made;
}

const flash3_mask* question_mask(const Case& c) {
  if (!c.mask.given()) return nullptr;
  static std::mutex mutex;
  static std::map<std::string, flash3_mask> masks;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = masks.try_emplace(to_id(c));
  if (is_new) {
    at->second = make_host_mask(c)->mask;
    at->second.data = nullptr, at->second.size = 0, at->second.key = 0;
  }
  return &at->second;
}

}  // namespace flash3::cases
