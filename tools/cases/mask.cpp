// SPDX-License-Identifier: Apache-2.0
#include "cases/mask.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "cases/case_mask.hpp"
#include "cases/internals.hpp"
#include "cases/text.hpp"

namespace flash3::cases {
namespace {

constexpr std::pair<const char*, CaseMaskSource> kSources[] = {
    {"band", CaseMaskSource::kBand},           {"documents", CaseMaskSource::kDocuments},
    {"dense", CaseMaskSource::kDense},         {"ranges", CaseMaskSource::kRanges},
    {"blocks", CaseMaskSource::kBlocks},       {"bits", CaseMaskSource::kBits},
    {"bitblocks", CaseMaskSource::kBitBlocks}, {"causal", CaseMaskSource::kCausal},
    {"prefix", CaseMaskSource::kPrefix},       {"sinks", CaseMaskSource::kSinks},
    {"lognormal", CaseMaskSource::kLogNormal}, {"share", CaseMaskSource::kShare},
    {"coins", CaseMaskSource::kCoins}};

// "<a>x<b>"
bool two_numbers(std::string_view text, int64_t* a, int64_t* b) {
  const size_t x = text.find('x');
  return x != std::string_view::npos && number(text.substr(0, x), a) &&
         number(text.substr(x + 1), b);
}

// What comes after the source's name.
bool parse_numbers(std::string_view text, CaseMask* mask) {
  switch (mask->source) {
    case CaseMaskSource::kRanges: return number(text, &mask->ranges);
    case CaseMaskSource::kBlocks: return two_numbers(text, &mask->block_rows, &mask->block_keys);
    case CaseMaskSource::kPrefix:
    case CaseMaskSource::kLogNormal: return number(text, &mask->n);
    case CaseMaskSource::kSinks: return two_numbers(text, &mask->n, &mask->newest);
    case CaseMaskSource::kShare: {
      const size_t of = text.find("of");
      return of != std::string_view::npos && number(text.substr(0, of), &mask->n) &&
             two_numbers(text.substr(of + 2), &mask->block_rows, &mask->block_keys);
    }
    default: return text.empty();
  }
}
std::string numbers_of(const CaseMask& mask) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  switch (mask.source) {
    case CaseMaskSource::kRanges: return text(mask.ranges);
    case CaseMaskSource::kBlocks: return text(mask.block_rows) + "x" + text(mask.block_keys);
    case CaseMaskSource::kPrefix:
    case CaseMaskSource::kLogNormal: return text(mask.n);
    case CaseMaskSource::kSinks: return text(mask.n) + "x" + text(mask.newest);
    case CaseMaskSource::kShare:
      return text(mask.n) + "of" + text(mask.block_rows) + "x" + text(mask.block_keys);
    default: return "";
  }
}

// Whether heads, and sequences, may have a mask of their own.
bool may_have_heads(CaseMaskSource source) {
  switch (source) {
    case CaseMaskSource::kRanges:
    case CaseMaskSource::kDense:
    case CaseMaskSource::kBlocks:
    case CaseMaskSource::kBits:
    case CaseMaskSource::kBitBlocks:
    case CaseMaskSource::kShare:
    case CaseMaskSource::kCoins: return true;
    default: return false;
  }
}
bool may_have_sequences(CaseMaskSource source) {
  return source == CaseMaskSource::kDocuments || may_have_heads(source);
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
    if (!parse_numbers(text, &mask) || (mask.of_batch && !may_have_sequences(source)) ||
        (mask.of_heads && !may_have_heads(source)))
      return std::nullopt;
    return mask;
  }
  return std::nullopt;
}

std::string to_text(const CaseMask& mask) {
  const std::string text = name_in(kSources, mask.source) + numbers_of(mask);
  return text + (mask.of_batch ? ".b" : "") + (mask.of_heads ? ".h" : "");
}

std::string mask_objection(const Case& c) {
  if (!c.mask.given()) return "";
  if (c.is_ragged() && is_usual(c.mask.source))
    return "masks that calls are timed with are of sequences of one length";
  const flash3_mask_params p = mask_params_without_memory(c);
  size_t bytes = 0;
  return flash3_mask_size(&p, &bytes) == FLASH3_OK ? "" : flash3_last_error();
}

const MaskPairs& HostMask::pairs() const {
  std::call_once(found_, [&] { pairs_ = mask_pairs(params); });
  return pairs_;
}

namespace {

void make(const Case& c, HostMask* to) {
  flash3_mask_params& p = to->params;
  check(flash3_mask_size(&p, &to->mask.size), c);
  constexpr size_t kAlignment = FLASH3_WORKSPACE_ALIGNMENT;
  to->memory = {std::aligned_alloc(kAlignment, round_up(to->mask.size, kAlignment)), std::free};
  if (!to->memory) throw std::bad_alloc();
  to->mask.data = to->memory.get();
  check(flash3_mask_make(&p, &to->mask), c);
}

// What one counts with the oracle's pairs, from the lists: of all sequences and query heads.
MaskFacts facts_of(const Case& c, const flash3_mask& m) {
  const MaskShape shape{m.batch,  m.heads,  m.seq_q,          m.seq_k,
                        m.ranges, m.blocks, m.partial_blocks, m.granularity};
  const MaskMemory memory = MaskMemory::of(shape, m.data);
  const CaseSequences sequences = make_sequences(c);
  MaskFacts facts;
  facts.all_blocks = shape.all_blocks();
  for (int64_t list = 0; list < shape.lists(); ++list) {
    const int64_t pair = list / shape.q_blocks(), first = list % shape.q_blocks() * kMaskBlock;
    const int64_t rows =
        std::clamp<int64_t>(sequences[pair / shape.heads].q.length - first, 0, kMaskBlock);
    for (int n = 0; n < memory.lists[list].count; ++n) {
      const MaskBlock& block = memory.blocks[memory.lists[list].begin + n];
      const int64_t key = int64_t{block.block()} * kMaskBlock;
      switch (block.kind()) {
        case kMaskFull: ++facts.full, facts.pairs += static_cast<double>(rows * kMaskBlock); break;
        case kMaskQuarters:
          ++facts.quarters;
          for (int half = 0; half < 2; ++half) {
            const int64_t own = std::clamp<int64_t>(rows - half * kMaskQuarter, 0, kMaskQuarter);
            const int seen = block.quarters() & quarters_of_rows(half);
            facts.pairs += static_cast<double>(own * kMaskQuarter *
                                               std::popcount(static_cast<unsigned>(seen)));
          }
          break;
        case kMaskRange:
          ++facts.ranges;
          for (int64_t i = first; i < first + rows; ++i) {
            const MaskRange seen =
                *memory.range(block.data, pair / shape.heads, pair % shape.heads, i);
            const int64_t begin = std::max<int64_t>(seen.begin, key),
                          end = std::min<int64_t>(seen.end, key + kMaskBlock);
            facts.pairs += static_cast<double>(std::max<int64_t>(end - begin, 0));
          }
          break;
        case kMaskBits:
          ++facts.bits;
          for (int w = 0; w < kMaskWords; ++w)
            facts.pairs += std::popcount(memory.words_of(block.data)[w]);
      }
    }
  }
  // Of sequences and heads that share a mask.
  const int64_t copies =
      c.batch / std::max<int64_t>(m.batch, 1) * (c.heads_q / std::max<int64_t>(m.heads, 1));
  facts.pairs *= static_cast<double>(copies);
  return facts;
}

struct Known {
  flash3_mask question;
  MaskFacts facts;
};

// A case of what its mask depends on alone, so that others of the same mask find it.
Case key_of(const Case& c) {
  Case key;
  key.batch = c.batch, key.seq_q = c.seq_q, key.seq_k = c.seq_k;
  key.heads_q = key.heads_k = c.heads_q;
  key.causal = c.causal, key.window = c.window, key.chunk = c.chunk;
  key.window_left = c.window_left, key.window_right = c.window_right;
  *key.added.find("mask_alignment") = c.added["mask_alignment"];
  key.mask = c.mask, key.seed = c.seed;
  key.lengths = c.lengths, key.tokens = c.tokens, key.draw = c.draw, key.front = c.front;
  key.packed_q = c.packed_q, key.packed_k = c.packed_k, key.max_known = c.max_known;
  key.used_q = c.used_q, key.used_k = c.used_k;
  key.page_size = c.page_size, key.batch_idx = c.batch_idx;
  return key;
}

// It lives as long as the program, one for each mask.
const Known& known(const Case& c) {
  static std::mutex mutex;
  static std::map<std::string, Known> all;
  const std::lock_guard lock(mutex);
  const std::string key = to_id(key_of(c));
  if (const auto found = all.find(key); found != all.end()) return found->second;
  const auto made = make_host_mask(c);
  Known of{made->mask, facts_of(c, made->mask)};
  of.question.data = nullptr, of.question.size = 0, of.question.key = 0;
  return all.emplace(key, of).first->second;
}

}  // namespace

std::shared_ptr<const HostMask> make_host_mask(const Case& c) {
  if (!c.mask.given()) return nullptr;
  if (const std::string why = mask_objection(c); !why.empty())
    throw std::logic_error("the mask of " + to_id(c) + ": " + why);
  const auto made = std::make_shared<HostMask>();
  made->sources = make_mask_sources(c);
  made->params = made->sources.params(c);
  made->params.backend = FLASH3_BACKEND_CPU;
  if (is_usual(c.mask.source)) {
    // The room of one that is counted first.
    made->params.max_blocks = made->params.max_partial_blocks = 1;
    make(c, made.get());
    flash3_mask_params& p = made->params;
    int64_t documents = 0;
    check(flash3_mask_used(&made->mask, nullptr, &p.max_blocks, &p.max_partial_blocks, &documents),
          c);
    p.max_blocks = std::max<int64_t>(p.max_blocks, 1);
    p.max_partial_blocks = std::max<int64_t>(p.max_partial_blocks, 1);
    made->mask = {};
  }
  make(c, made.get());
  return made;
}

const flash3_mask* question_mask(const Case& c) {
  return c.mask.given() ? &known(c).question : nullptr;
}

const MaskFacts* mask_facts(const Case& c) { return c.mask.given() ? &known(c).facts : nullptr; }

double seen_pairs(const Case& c) {
  const MaskFacts* const facts = mask_facts(c);
  if (!facts) return static_cast<double>(visible_pairs(c));
  return c.heads_q > 0 ? facts->pairs / static_cast<double>(c.heads_q) : 0;
}

double seen_share(const Case& c) {
  const double all = static_cast<double>(c.batch * c.seq_q) * static_cast<double>(c.seq_k);
  return all > 0 ? seen_pairs(c) / all : 0;
}

double seen_flops(const Case& c) {
  const MaskFacts* const facts = mask_facts(c);
  return facts ? 2 * facts->pairs * static_cast<double>(products_of_pair(c)) : flops(c);
}

}  // namespace flash3::cases
