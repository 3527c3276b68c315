// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward/choices.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/arithmetic.hpp"
#include "cuda/device/key_splits.hpp"
#include "cuda/sm90/forward/estimate.hpp"
#include "cuda/sm90/forward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"
#include "cuda/sm90/host/kernel_list.hpp"
#include "cuda/sm90/host/tensor_map.hpp"

namespace flash3::cuda::sm90 {
namespace {

// A slot has so many rows if it can hold any sequence of the batch, by the caller's max_seqlen;
// otherwise 0. Where a sequence may have keys that none of its queries sees no tile is shared,
// since such keys must reach nobody.
int slot_rows_of(const ForwardProblem& problem) {
  const int64_t longest = std::max(problem.seq_q, problem.seq_k);
  const bool bounded = problem.sequences_q.bounded && problem.sequences_k.bounded;
  if (!problem.is_ragged() || problem.has_cache() || !bounded || longest > HeadPack::kRows ||
      may_hide_keys(problem) || is_biased(problem))
    return 0;
  return std::max(16, int(std::bit_ceil(uint64_t(longest))));
}

// Whether a table tells where a sequence's keys lie. Otherwise they lie in the sequence's own
// element of K and V, or packed one after the other.
bool has_table(const ForwardProblem& problem) {
  return problem.cache.paged || problem.cache.has_batch_idx;
}

// Whether rows of an FP8 K or V have scales in blocks. Then a key tile, which has one scale, must
// lie in one block.
bool has_block_scales(const ForwardProblem& problem) {
  return problem.k_scale.kind == ScaleKind::kBlock || problem.v_scale.kind == ScaleKind::kBlock;
}

// Whether a key tile of an FP8 cache may lie in several blocks of scales, which lie with the rows
// of its pages or elements.
bool scales_change_in_tiles(const ForwardProblem& problem) {
  const KvCache& cache = problem.cache;
  return has_block_scales(problem) &&
         (cache.has_leftpad || (cache.paged && cache.page_size % kScaleBlock != 0));
}

// Whether slots of so many rows fit the kernel's tiles: a work tile's keys are those of its slots.
bool holds_slots(const ForwardConfig& c, int slot_rows) {
  return c.band && c.tile_m() % c.tile_n == 0 && c.tile_n % slot_rows == 0 &&
         c.tile_m() / slot_rows <= kMaxSlots;
}

// Whether a query may see more than kLongRow keys.
bool has_long_rows(const ForwardProblem& problem) {
  const auto& mask = problem.mask_rule;
  int64_t keys = problem.seq_k;
  if (mask.window_left >= 0 && mask.window_right >= 0)
    keys = std::min<int64_t>(keys, std::min<int64_t>(mask.window_left, keys) +
                                       std::min<int64_t>(mask.window_right, keys) + 1);
  if (mask.chunk > 0) keys = std::min<int64_t>(keys, mask.chunk);
  return keys > kLongRow;
}

// Whether another row of the tile table does the same with sums in two levels.
bool has_two_level_rival(const ForwardConfig& c) {
  return !c.two_level && std::ranges::any_of(kForwardConfigs, [&](const ForwardConfig& other) {
    return other.two_level && other.head_dim == c.head_dim && other.head_dim_v == c.head_dim_v &&
           other.band == c.band && other.score == c.score && other.terms == c.terms &&
           other.paged == c.paged;
  });
}

// Whether the row walks lists of blocks that another one suits better: one whose tiles are as many
// keys as its masks tell apart.
bool has_list_rival(const ForwardConfig& c, int granularity) {
  return c.lists && c.tile_n != granularity &&
         std::ranges::any_of(kForwardConfigs, [&](const ForwardConfig& other) {
           return other.lists && other.tile_n == granularity && other.operands == c.operands &&
                  other.head_dim == c.head_dim && other.head_dim_v == c.head_dim_v &&
                  other.score == c.score && other.terms == c.terms && other.paged == c.paged;
         });
}

// Whether the row takes any biased scores where another one has the call's alone.
bool has_terms_rival(const ForwardConfig& c, BiasTerms terms) {
  return c.terms != terms && std::ranges::any_of(kForwardConfigs, [&](const ForwardConfig& other) {
           return other.terms == terms && other.operands == c.operands && other.lists == c.lists &&
                  other.paged == c.paged && other.split == c.split &&
                  other.head_dim == c.head_dim && other.head_dim_v == c.head_dim_v;
         });
}

// Whether the keys are those of a cache: paged kernels find them, with a table and without one.
bool reads_cache(const ForwardProblem& problem) {
  const Sequences &q = problem.sequences_q, &k = problem.sequences_k;
  return problem.has_cache() || (k.has_used && !k.packed && !q.has_used);
}

// Whether some sequence may have too few query tiles to fill a GPU for many keys: those of
// a cache. The choice looks at the most queries that one can have, and never at the batch.
bool has_few_tiles(const ForwardProblem& problem) {
  constexpr int64_t kTileQueries = 128;
  return reads_cache(problem) && problem.sequences_q.bounded && slot_rows_of(problem) == 0 &&
         most_key_splits(problem.heads_q * ceil_div(problem.seq_q, kTileQueries)) > 1;
}

// Whether the call runs in a split kernel. None is wider than the kernel that takes the call
// otherwise. Of FP8 caches there is none for scores with a softcap: three more kernels for calls
// that are few.
bool splits_keys(const ForwardProblem& problem, Element element) {
  if (!has_few_tiles(problem)) return false;
  const bool widened = problem.widens_keys();
  const auto takes = [&](const ForwardConfig& c, bool paged, bool split) {
    return c.holds(element) && c.widened() == widened && takes_scores(c, problem) &&
           c.paged == paged && c.split == split && !c.lists && c.head_dim >= problem.head_dim &&
           c.head_dim_v >= problem.head_dim_v;
  };
  const auto narrowest = [&](bool paged, bool split) {
    return std::ranges::find_if(kForwardConfigs,
                                [&](const ForwardConfig& c) { return takes(c, paged, split); });
  };
  const auto whole = narrowest(widened || has_table(problem), false), split = narrowest(true, true);
  return whole != std::end(kForwardConfigs) && split != std::end(kForwardConfigs) &&
         whole->head_dim == split->head_dim && whole->head_dim_v == split->head_dim_v;
}

}  // namespace

bool takes(flash3_dtype dtype) {
  return dtype == FLASH3_FLOAT16 || dtype == FLASH3_BFLOAT16 || dtype == FLASH3_FLOAT8_E4M3;
}

bool sums_in_two_levels(const ForwardProblem& problem) {
  if (problem.fp8_sums != FLASH3_FP8_SUMS_AUTO)
    return problem.fp8_sums == FLASH3_FP8_SUMS_TWO_LEVELS;
  return has_long_rows(problem);
}

std::span<const ForwardKernel> forward_kernels(Element element) {
  // They lie in the order of elements.
  return std::ranges::equal_range(forward_kernels(), element, {}, &ForwardKernel::element);
}

void for_each_choice(const ForwardProblem& problem,
                     const std::function<void(const ForwardChoice&)>& visit) {
  if (!takes(problem.dtype)) return;
  const Element element = element_type(problem.dtype);
  const BiasTerms terms = terms_of(problem);
  const bool lists = problem.mask_lists.given;
  const bool band = needs_band(problem), split = !lists && splits_keys(problem, element),
             widened = problem.widens_keys(), paged = split || widened || has_table(problem);
  const bool two_levels = sums_in_two_levels(problem);
  // In FP8 paged kernels alone pack heads: where no table leads to the keys they serve for that.
  const bool packs_in_paged = element == Element::kE4m3 && !paged && reads_cache(problem);
  // FP8: the keys of a tile have one scale.
  const int slot_rows = element == Element::kE4m3 || widened ? 0 : slot_rows_of(problem);
  const ForwardConfig* narrowest = nullptr;
  for (const ForwardKernel& kernel : forward_kernels(element)) {
    const ForwardConfig& c = kernel.config;
    const bool serves = c.paged == paged || (c.paged && packs_in_paged);
    if (!takes_scores(c, problem) || !serves || c.split != split || c.lists != lists ||
        has_terms_rival(c, terms) || c.widened() != widened || c.head_dim < problem.head_dim ||
        c.head_dim_v < problem.head_dim_v) {
      continue;
    }
    if (!narrowest) narrowest = &c;
    if (c.head_dim != narrowest->head_dim || c.head_dim_v != narrowest->head_dim_v) continue;
    if (c.fp8() && two_levels && has_two_level_rival(c)) continue;
    if (has_list_rival(c, problem.mask_lists.shape.granularity)) continue;
    if (has_block_scales(problem) && int(kScaleBlock) % c.tile_n != 0) continue;
    if (slot_rows > 0 && holds_slots(c, slot_rows)) visit(ForwardChoice{&kernel, {}, slot_rows});
    if (c.paged ? cache_box_rows(problem.cache, rows_at_once(c)) == 0 : !lists && c.band != band)
      continue;
    if (c.paged == paged) visit(ForwardChoice{&kernel, HeadPack{}});
    if (c.fp8() && !c.row_scales()) continue;              // a warpgroup's rows have one scale
    if (c.lists || c.terms != BiasTerms::kNone) continue;  // a list or a bias is of one head
    const int64_t most = std::min<int64_t>(problem.queries_per_kv_head(), HeadPack::kRows);
    for (int heads = 2; heads <= most; ++heads) {
      if (problem.queries_per_kv_head() % heads == 0)
        visit(ForwardChoice{&kernel, HeadPack::of(heads)});
    }
  }
}

std::span<const ForwardKernel> forward_kernels() {
  static const auto list = list_kernels<kForwardConfigs>(
      [](Element element, const ForwardConfig& c, const void* function) {
        return ForwardKernel{kernel_id("fwd", element, c, c.tile_m()), element, c, function};
      });
  return list;
}

std::vector<ForwardChoice> forward_choices(const ForwardProblem& problem) {
  std::vector<ForwardChoice> choices;
  for_each_choice(problem, [&](const ForwardChoice& choice) { choices.push_back(choice); });
  return choices;
}

std::string why_unreadable(const ForwardProblem& problem) {
  if (!problem.has_cache() && !problem.widens_keys()) return "";
  if (problem.widens_keys() && (!problem.is_ragged() || problem.sequences_k.packed))
    return "k and v are FP8 and no cache, and q is not FP8";
  const int bytes = dtype_size(problem.kv_dtype);
  for (const TensorView& view : {problem.k, problem.v})
    if (!tma_can_address(view, RowIndexing::kRagged, bytes))
      return "TMA needs a 16-byte aligned base, strides of 16 bytes, and elements whole rows apart";
  return scales_change_in_tiles(problem) ? "scales of blocks begin elsewhere than key tiles" : "";
}

std::string why_no_choice(const ForwardProblem& problem) {
  if (problem.widens_keys() && problem.softcap > 0.f)
    return "none caps the scores of FP8 keys under a q of 16 bits";
  return problem.cache.has_leftpad
             ? "padding moves keys across the ends of pages"
             : "pages have too few rows in common with a key tile for TMA to load them at once";
}

}  // namespace flash3::cuda::sm90
