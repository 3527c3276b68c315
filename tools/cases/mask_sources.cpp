// SPDX-License-Identifier: Apache-2.0
// What the masks of cases are made from.
#include <algorithm>
#include <cstdlib>
#include <limits>

#include "cases/cache_tensors.hpp"
#include "cases/mask.hpp"
#include "cases/sequences.hpp"

namespace flash3::cases {
namespace {

constexpr int64_t kMostBlocks = 6;    // that a row of blocks of a case lists
constexpr int64_t kBlocksOfBits = 5;  // that a case has bits of
constexpr int64_t kBlock = FLASH3_MASK_BLOCK;

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

// Of the first sequence; 0 where there are none.
int64_t count_documents(const flash3_tensor& t) {
  const auto* const numbers = static_cast<const int32_t*>(t.data);
  int64_t count = 0;
  for (int64_t j = 0; t.ndim > 0 && t.shape[0] > 0 && j < t.shape[1]; ++j)
    count += j == 0 || numbers[j] != numbers[j - 1];
  return count;
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

// ---- what calls are timed with: a mask that people use ----

// Calls range(i, i') of each query and writes what it gives.
template <class RangeOf>
void fill_own_ranges(const Case& c, const flash3_tensor& t, int64_t which, const RangeOf& range) {
  auto* const begins = static_cast<int32_t*>(t.data) + 2 * which * c.seq_q;
  for (int64_t i = 0; i < c.seq_q; ++i) {
    const auto [begin, end] = range(i + c.seq_k - c.seq_q);
    begins[i] = static_cast<int32_t>(std::clamp<int64_t>(begin, 0, c.seq_k));
    begins[c.seq_q + i] = static_cast<int32_t>(std::clamp<int64_t>(end, 0, c.seq_k));
  }
}

void fill_lengths(const Case& c, const flash3_tensor& t) {
  auto* to = static_cast<int32_t*>(t.data);
  int32_t number = 0;
  for (const int64_t length : log_normal_lengths(c.seq_k, c.mask.n))
    to = std::fill_n(to, length, number++);
}

int64_t share_of(const Case& c, int64_t blocks) {
  return std::min(blocks,
                  std::max<int64_t>(1, (blocks * std::min<int64_t>(c.mask.n, 100) + 50) / 100));
}

// So many different blocks of each row, in ascending order.
void fill_share(const Case& c, Draw& d, const flash3_tensor& counts, const flash3_tensor& indices) {
  const int64_t blocks = ceil_div(c.seq_k, c.mask.block_keys), kept = indices.shape[3];
  std::vector<int32_t> all(static_cast<size_t>(blocks));
  auto* to = static_cast<int32_t*>(indices.data);
  for (int64_t row = 0; row < count_of(counts); ++row, to += kept) {
    for (size_t n = 0; n < all.size(); ++n) all[n] = static_cast<int32_t>(n);
    for (int64_t n = 0; n < kept; ++n)
      std::swap(all[static_cast<size_t>(n)], all[static_cast<size_t>(n + d.below(blocks - n))]);
    std::copy_n(all.begin(), kept, to);
    std::sort(to, to + kept);
    static_cast<int32_t*>(counts.data)[row] = static_cast<int32_t>(kept);
  }
}

void fill_coins(Draw& d, const flash3_tensor& t) {
  auto* const bytes = static_cast<uint8_t*>(t.data);
  for (int64_t n = 0; n < count_of(t); ++n) bytes[n] = static_cast<uint8_t>(d.bits());
}

// ---- all sources ----

flash3_tensor shape_of(flash3_dtype dtype, std::initializer_list<int64_t> shape) {
  flash3_tensor view{nullptr, dtype, static_cast<int32_t>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t stride = 1;
  for (int d = view.ndim; d-- > 0;) view.stride[d] = stride, stride *= view.shape[d];
  return view;
}

int32_t as_int32(int64_t n) {
  return static_cast<int32_t>(std::clamp<int64_t>(n, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}

// The lengths, and the sizes that go with them; tensors without memory.
void add_lengths(const Case& c, const CaseSequences& sequences, flash3_mask_params* p) {
  p->batch = c.batch, p->heads_q = c.heads_q;
  const auto longest = [&](const SequenceLengths& s) {
    const bool known = s.cu.empty() || (c.max_known && s.max_length > 0);  // a maximum of 0 is none
    return known ? std::min(s.max_length, s.rows) : s.rows;
  };
  p->seq_q = longest(sequences.q), p->seq_k = longest(sequences.k);
  if (c.has_cache()) {
    const CachePlan plan = make_cache_plan(c);
    p->seq_k = plan.max_pages > 0 ? plan.max_pages * plan.rows : plan.rows;
  }
  const auto index = [](const std::vector<int32_t>& values) {
    return values.empty() ? flash3_tensor{}
                          : shape_of(FLASH3_INT32, {static_cast<int64_t>(values.size())});
  };
  p->cu_seqlens_q = index(sequences.q.cu), p->cu_seqlens_k = index(sequences.k.cu);
  p->seqused_q = index(sequences.q.used), p->seqused_k = index(sequences.k.used);
  // Those of a cache without sequences are given too.
  if (c.has_cache() && c.used_k && c.batch == 0) p->seqused_k = shape_of(FLASH3_INT32, {0});
}

// The tensors of the source, without memory.
void add_sources(const Case& c, const CaseSequences& sequences, flash3_mask_params* p) {
  const int64_t batch = c.mask.of_batch ? c.batch : 1, heads = c.mask.of_heads ? c.heads_q : 1;
  const int64_t seq_q = p->seq_q, seq_k = p->seq_k;
  const auto ranges = [&](int64_t n) {
    p->ranges =
        shape_of(FLASH3_INT32, {c.packed_q ? 1 : batch, heads, 2 * std::min<int64_t>(n, kBlock),
                                c.packed_q ? sequences.q.rows : seq_q});
  };
  const auto blocks = [&](const auto& kept) {
    p->block_rows = as_int32(c.mask.block_rows), p->block_keys = as_int32(c.mask.block_keys);
    const int64_t rows = ceil_div(seq_q, std::max<int64_t>(p->block_rows, 1));
    const int64_t keys = ceil_div(seq_k, std::max<int64_t>(p->block_keys, 1));
    p->block_counts = shape_of(FLASH3_INT32, {batch, heads, rows});
    p->block_indices = shape_of(FLASH3_INT32, {batch, heads, rows, kept(keys)});
  };
  switch (c.mask.source) {
    case CaseMaskSource::kNone:
    case CaseMaskSource::kBand: break;
    case CaseMaskSource::kRanges: ranges(c.mask.ranges); break;
    case CaseMaskSource::kCausal:
    case CaseMaskSource::kPrefix: ranges(1); break;
    case CaseMaskSource::kSinks: ranges(2); break;
    case CaseMaskSource::kDocuments:
    case CaseMaskSource::kLogNormal:
      p->documents =
          shape_of(FLASH3_INT32, {c.packed_k ? 1 : batch, c.packed_k ? sequences.k.rows : seq_k});
      break;
    case CaseMaskSource::kDense:
      p->dense = shape_of(FLASH3_UINT8, {batch, heads, seq_q, seq_k});
      break;
    case CaseMaskSource::kBlocks: blocks([](int64_t) { return kMostBlocks; }); break;
    case CaseMaskSource::kShare: blocks([&](int64_t all) { return share_of(c, all); }); break;
    case CaseMaskSource::kBits:
    case CaseMaskSource::kCoins:
      p->bits = shape_of(FLASH3_UINT8, {batch, heads, seq_q, ceil_div(seq_k, int64_t{8})});
      break;
    case CaseMaskSource::kBitBlocks:
      p->bits = shape_of(FLASH3_UINT8, {kBlocksOfBits, kBlock, kBlock / 8});
      p->bit_blocks =
          shape_of(FLASH3_INT32, {batch, heads, ceil_div(seq_q, kBlock), ceil_div(seq_k, kBlock)});
      break;
  }
}

void fill_sources(const Case& c, const MaskSources& s) {
  Draw d(c.seed + 9000);
  const auto range = [&](int64_t which, const auto& of) {
    fill_own_ranges(c, s.ranges.view, which, of);
  };
  switch (c.mask.source) {
    case CaseMaskSource::kNone:
    case CaseMaskSource::kBand: break;
    case CaseMaskSource::kRanges: fill_ranges(c, d, s.ranges.view); break;
    case CaseMaskSource::kCausal:
      range(0, [](int64_t own) { return std::pair<int64_t, int64_t>(0, own + 1); });
      break;
    case CaseMaskSource::kPrefix:
      range(0, [&](int64_t own) {
        return std::pair<int64_t, int64_t>(0, std::max(c.mask.n, own + 1));
      });
      break;
    case CaseMaskSource::kSinks:
      range(0, [&](int64_t own) {
        return std::pair<int64_t, int64_t>(0, std::min(c.mask.n, own + 1));
      });
      range(1, [&](int64_t own) {
        return std::pair(own + 1 - std::min(c.mask.newest, c.seq_k), own + 1);
      });
      break;
    case CaseMaskSource::kDocuments: fill_documents(d, s.documents.view); break;
    case CaseMaskSource::kLogNormal: fill_lengths(c, s.documents.view); break;
    case CaseMaskSource::kDense: fill_dense(d, s.dense.view); break;
    case CaseMaskSource::kBlocks:
      fill_blocks(c, d, s.block_counts.view, s.block_indices.view);
      break;
    case CaseMaskSource::kShare: fill_share(c, d, s.block_counts.view, s.block_indices.view); break;
    case CaseMaskSource::kBits: fill_bits(d, s.bits.view); break;
    case CaseMaskSource::kCoins: fill_coins(d, s.bits.view); break;
    case CaseMaskSource::kBitBlocks:
      fill_bits(d, s.bits.view);
      fill_bit_blocks(d, s.bit_blocks.view, kBlocksOfBits);
      break;
  }
}

}  // namespace

flash3_mask_params mask_params_without_memory(const Case& c) {
  flash3_mask_params p{};
  p.struct_size = sizeof p;
  const CaseSequences sequences = make_sequences(c);
  add_lengths(c, sequences, &p);
  p.causal = c.causal, p.window = c.window;
  p.window_left = c.window_left, p.window_right = c.window_right, p.chunk = c.chunk;
  p.mask_alignment = static_cast<int32_t>(c.added["mask_alignment"]);
  add_sources(c, sequences, &p);
  return p;
}

MaskSources make_mask_sources(const Case& c) {
  const flash3_mask_params p = mask_params_without_memory(c);
  MaskSources s;
  s.visit([&](const char*, GuardedTensor& tensor, auto field) {
    if ((p.*field).ndim > 0) tensor = guard(p.*field, 0);
  });
  fill_sources(c, s);
  const CaseSequences sequences = make_sequences(c);
  const auto fill = [](const std::vector<int32_t>& from, const GuardedTensor& to) {
    std::copy(from.begin(), from.end(), static_cast<int32_t*>(to.view.data));
  };
  fill(sequences.q.cu, s.cu_seqlens_q), fill(sequences.k.cu, s.cu_seqlens_k);
  fill(sequences.q.used, s.seqused_q), fill(sequences.k.used, s.seqused_k);
  return s;
}

flash3_mask_params MaskSources::params(const Case& c) const {
  flash3_mask_params p = mask_params_without_memory(c);
  visit([&](const char*, const GuardedTensor& tensor, auto field) { p.*field = tensor.view; });
  p.max_documents = count_documents(p.documents);
  return p;
}

}  // namespace flash3::cases
