// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include "cases/added_tensors.hpp"
#include "cases/sequences.hpp"
#include "cases/table.hpp"
#include "core/kept.hpp"

namespace flash3::cases {
namespace {

// Integers alone, so that a draw does not depend on a machine's floating point.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t index) : state_(mix(mix(seed) ^ index)) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(next_bits(&state_) % uint64_t(n)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool percent(int64_t chance) { return below(100) < chance; }
  template <class T, size_t N>
  T of(const T (&list)[N]) {
    return list[below(N)];
  }
  // Small numbers as often as large ones: each power of two has the same share.
  int64_t spread(int64_t least, int64_t most) {
    const auto width = [](int64_t n) { return static_cast<int64_t>(std::bit_width(uint64_t(n))); };
    const int64_t bits = between(width(least), width(most));
    if (bits == 0) return 0;
    const int64_t low = int64_t{1} << (bits - 1);
    return std::clamp(low + below(low), least, most);
  }

 private:
  uint64_t state_;
};

constexpr int64_t kTiles[] = {64, 80, 96, 112, 128, 144, 192, 256};  // rows of kernels' tiles

int64_t draw_length(Draw& d, int64_t longest) {
  const int64_t kind = d.below(20);
  if (kind == 0) return d.below(3);
  if (kind > 9) return d.spread(1, longest);
  const int64_t tile = d.of(kTiles);
  return std::min(longest,
                  tile * d.between(1, std::max<int64_t>(1, longest / tile)) + d.between(-1, 1));
}

void draw_dims(Draw& d, Case* c) {
  constexpr int64_t kNative[] = {64, 96, 128, 192, 256};
  const auto dim = [&] {
    const int64_t kind = d.below(10);
    return kind < 4 ? d.of(kNative) : kind < 7 ? 8 * d.between(1, 32) : d.between(1, 256);
  };
  c->head_dim = dim();
  c->head_dim_v = d.percent(65) ? c->head_dim : dim();
}

void draw_heads(Draw& d, Case* c) {
  constexpr int64_t kRatios[] = {1, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 32, 64, 128};
  c->heads_k = d.percent(50) ? 1 : d.between(1, 5);
  c->heads_q = c->heads_k * d.of(kRatios);
  if (!d.percent(1)) return;
  c->heads_q = 0;
  if (d.percent(50)) c->heads_k = 0;
}

void draw_lengths(Draw& d, Case* c) {
  const int64_t kind = d.below(100);
  const int64_t longest = kind < 3 ? 2100 : kind < 15 ? 800 : 300;
  c->seq_q = d.percent(10) ? d.between(1, 4) : draw_length(d, longest);
  c->seq_k = d.percent(35) ? c->seq_q : draw_length(d, longest);
  c->batch = d.percent(1) ? 0 : d.percent(45) ? 1 : d.spread(2, 12);
}

void draw_ragged(Draw& d, Case* c) {
  constexpr Lengths kLengths[] = {Lengths::kRandom, Lengths::kRandom, Lengths::kRandom,
                                  Lengths::kEdges,  Lengths::kEdges,  Lengths::kGiant,
                                  Lengths::kAll,    Lengths::kEmpty,  Lengths::kLogNormal};
  while (!c->is_ragged()) {
    c->packed_q = d.percent(60), c->packed_k = d.percent(c->packed_q ? 85 : 20);
    c->used_q = d.percent(30), c->used_k = d.percent(45);
  }
  c->lengths = d.of(kLengths);
  if (c->packed_q || c->packed_k) {
    c->max_known = d.percent(70);
    if (d.percent(15)) c->front = d.spread(1, 200);
  }
  if (c->batch > 0) c->batch = d.spread(1, 40);
  if (d.percent(25)) {  // short ones may share tiles
    c->seq_q = d.between(1, 64);
    c->seq_k = d.percent(50) ? c->seq_q : d.between(1, 64);
    c->batch = d.spread(1, 300);
  }
  if (c->lengths == Lengths::kLogNormal)
    c->tokens = d.spread(1, 20 * (c->seq_q + 1)), c->draw = d.between(1, 1000);
}

// About what the oracle computes, and what it takes to fill and compare the tensors.
double cost(const Case& c) { return flops(c) / 2 + 8 * tensor_bytes(c); }

// Takes sequences away, or heads; false if there is one of each.
bool take_sequences_or_heads(Case* c) {
  if (c->batch > 1) {
    c->batch /= 2;
  } else if (c->heads_k > 1) {
    c->heads_q /= c->heads_k, c->heads_k = 1;
  } else if (c->heads_q > 1) {
    c->heads_q /= 2;
  } else {
    return false;
  }
  return true;
}

// Fewer sequences first, then heads, then shorter ones: lengths at the edge of a tile are worth
// keeping.
void shrink(Draw& d, double most, Case* c) {
  while (cost(*c) > most) {
    if (take_sequences_or_heads(c)) continue;
    int64_t& longer = c->seq_q > c->seq_k ? c->seq_q : c->seq_k;
    const bool same = c->seq_q == c->seq_k;
    longer = draw_length(d, std::max<int64_t>(1, longer / 2));
    if (same) c->seq_q = c->seq_k = longer;
  }
}

// Rows that FP8 sums up in two levels (cuda/sm90/forward/plan.cpp): fewer of them, for the same
// cost.
void draw_long_rows(Draw& d, Case* c) {
  c->seq_k = d.between(2049, 5000);
  const auto cost_without_mask = [&] {
    Case whole = *c;
    whole.causal = whole.window = false, whole.chunk = 0;
    return cost(whole);
  };
  while (cost_without_mask() > 1.5e8)
    if (!take_sequences_or_heads(c)) c->seq_q /= 2;
}

void draw_mask(Draw& d, Case* c) {
  constexpr int64_t kEdge = std::numeric_limits<int64_t>::max();
  const int64_t longest = std::max<int64_t>(1, std::max(c->seq_q, c->seq_k));
  const auto side = [&] {
    const int64_t kind = d.below(20);
    if (kind == 0) return d.of({kEdge, kEdge - 1, int64_t{1} << 31, int64_t{1} << 33});
    if (kind < 4) return d.below(3);
    return kind < 8 ? draw_length(d, longest) : d.spread(1, 2 * longest);
  };
  const int64_t kind = d.below(20);
  c->causal = kind >= 6 && kind < 15;
  c->window = kind >= 12;
  if (c->window && d.percent(75)) c->window_left = side();
  if (c->window && d.percent(c->causal ? 30 : 65)) c->window_right = side();
  if (d.percent(12)) c->chunk = d.percent(40) ? d.of(kTiles) : d.spread(1, 2 * longest);
}

void draw_scores(Draw& d, Case* c) {
  if (d.percent(25)) c->sink = d.percent(60) ? Sink::kFloat32 : Sink::k16;
  if (d.percent(15)) c->softcap = static_cast<float>(d.between(2, 50));
  if (d.percent(30)) c->softmax_scale = static_cast<float>(d.spread(1, 400)) / 1000;
  // Large scores of many dimensions leave weights of 0 and 1 alone; under a cap they do not.
  if (c->softcap == 0 && c->head_dim > 16) c->softmax_scale = std::min(c->softmax_scale, 0.2f);
}

TensorLayout draw_layout(Draw& d, bool is_input) {
  TensorLayout l;
  l.layout = d.of({Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded, Layout::kOdd});
  if (d.percent(40)) l.offset = d.of({1, 2, 3, 4, 5, 7, 8, 16, 24, 64});
  if (d.percent(30)) l.gap = d.of({1, 2, 3, 4, 7, 8, 16, 40, 64, 100});
  l.wild = d.percent(15);
  if (!is_input) return l;
  l.one_batch = d.percent(12), l.one_row = d.percent(6), l.one_head = d.percent(12);
  return l;
}

bool is_input(TensorName name) {
  switch (name) {
    case TensorName::kQ:
    case TensorName::kK:
    case TensorName::kV:
    case TensorName::kDout:
    case TensorName::kDlse: return true;
    default: return false;  // what a call writes, or a backward reads as a forward has written it
  }
}

void draw_layouts(Draw& d, Case* c) {
  if (d.percent(60))
    c->layout = d.of({Layout::kBatchSeq, Layout::kHeadsFirst, Layout::kPadded, Layout::kOdd});
  if (d.percent(40)) return;
  for (size_t i = 0; i < kTensorNames; ++i) {
    const auto name = static_cast<TensorName>(i);
    const bool gradient = name >= TensorName::kDout;
    const bool result = name == TensorName::kOut || name == TensorName::kDout;
    if (c->quantize ? result || name == TensorName::kDlse : gradient && !c->backward) continue;
    if (!d.percent(35)) continue;
    TensorLayout l = draw_layout(d, is_input(name));
    if (name == TensorName::kDlse) l.one_row = false;  // its last dimension is contiguous
    c->own_layouts[i] = l;
  }
}

constexpr Scales kGiven[] = {Scales::kTensor, Scales::kHead, Scales::kBlock};

void draw_forward(Draw& d, Case* c) {
  constexpr flash3_dtype kOuts[] = {FLASH3_DTYPE_NONE, FLASH3_DTYPE_NONE, FLASH3_BFLOAT16,
                                    FLASH3_FLOAT16,    FLASH3_FLOAT16,    FLASH3_FLOAT32};
  const int64_t kind = d.below(20);
  c->dtype = kind < 4    ? FLASH3_FLOAT8_E4M3
             : kind < 12 ? FLASH3_BFLOAT16
             : kind < 18 ? FLASH3_FLOAT16
                         : FLASH3_FLOAT32;
  c->fp8 = kind >= 4 && d.percent(16);
  c->want_lse = d.percent(80);
  if (c->dtype != FLASH3_FLOAT8_E4M3 && !c->fp8) {
    if (c->dtype != FLASH3_FLOAT32 && d.percent(15)) c->out_dtype = FLASH3_FLOAT32;
    return;
  }
  c->out_dtype = d.of(kOuts);
  if (c->fp8) return;
  c->scales = d.percent(15) ? Scales::kNone : d.of(kGiven);
  for (auto& own : c->own_scales)
    if (d.percent(20)) own = d.percent(25) ? Scales::kNone : d.of(kGiven);
}

constexpr flash3_dtype kDtypes[] = {FLASH3_BFLOAT16, FLASH3_BFLOAT16, FLASH3_BFLOAT16,
                                    FLASH3_FLOAT16,  FLASH3_FLOAT16,  FLASH3_FLOAT16,
                                    FLASH3_FLOAT32};

void draw_backward(Draw& d, Case* c) {
  c->backward = true;
  c->dtype = d.of(kDtypes);
  c->want_dlse = d.percent(35);
  c->deterministic = d.percent(40);
  c->want_dsink = c->sink == Sink::kNone || d.percent(80);
  c->want_dadded = d.percent(50);
  c->float32_gradients = c->dtype != FLASH3_FLOAT32 && d.percent(20);
}

void draw_quantize(Draw& d, Case* c) {
  c->quantize = true;
  c->dtype = d.of(kDtypes);
  c->scales = d.of(kGiven);
  for (auto& own : c->own_scales)
    if (d.percent(20)) own = d.of(kGiven);
  c->rotate = d.percent(50);
  if (d.percent(20)) c->left_out[static_cast<size_t>(d.below(3))] = true;
  if (d.percent(10)) c->left_out[static_cast<size_t>(d.below(3))] = true;
  const bool has_rotary = !c->is_left_out(TensorName::kQ) || !c->is_left_out(TensorName::kK);
  if (has_rotary && c->head_dim > 1 && d.percent(50))
    c->rotary = d.percent(50) ? Rotary::kHalves : Rotary::kInterleaved;
}

// A forward whose keys lie in a cache. The lengths of k are used ones then.
void draw_cache(Draw& d, Case* c) {
  c->packed_k = false, c->used_k = true;
  if (c->lengths == Lengths::kAll && d.percent(70)) c->lengths = Lengths::kRandom;
  if (d.percent(60)) c->page_size = d.percent(60) ? int64_t{1} << d.below(9) : d.between(1, 300);
  c->batch_idx = c->page_size == 0 && d.percent(50);
  c->leftpad = d.percent(30);
  if (!c->has_cache() || d.percent(60)) c->append = d.percent(50) ? 1 : d.spread(1, 100);
  c->append_packed = c->append > 0 && d.percent(30);
  if (c->append > 0 && c->head_dim > 1 && d.percent(50))
    c->rotary = d.percent(50) ? Rotary::kHalves : Rotary::kInterleaved;
  c->rotary_offsets = c->rotary != Rotary::kNone && d.percent(30);
  if (d.percent(40)) c->seq_q = d.between(1, 8);
  // Rows of a cache have one layout, and none that share memory where they are written.
  for (const TensorName name : {TensorName::kK, TensorName::kV})
    c->own_layouts[static_cast<size_t>(name)].reset();
}

// So few queries with so many keys that blocks share these (cuda/device/key_splits.hpp).
void draw_shared_keys(Draw& d, Case* c) {
  c->seq_q = d.between(17, 60), c->seq_k = d.between(7168, 16000);
  // The cache has all rows, however few of them count.
  const auto elements = [&] {
    return c->batch * c->seq_k * c->heads_k * (c->head_dim + c->head_dim_v);
  };
  while (cost(*c) > 1.5e8 || elements() > 30'000'000)
    if (!take_sequences_or_heads(c)) break;
}

// k and v in FP8, under a q that is or is not, mostly in a cache.
void draw_fp8_keys(Draw& d, Case* c) {
  c->kv8 = c->dtype != FLASH3_FLOAT8_E4M3;
  if (c->kv8) c->scales = d.percent(15) ? Scales::kNone : d.of(kGiven);
  if (c->append > 0 && d.percent(40))
    c->new_dtype = c->kv8 ? FLASH3_FLOAT8_E4M3 : d.percent(50) ? FLASH3_FLOAT16 : FLASH3_BFLOAT16;
  const bool embeds = c->kv8 && c->dtype_of_new() != FLASH3_FLOAT8_E4M3;
  if (!embeds) c->rotary = Rotary::kNone, c->rotary_offsets = false;
}

// Multi-head latent attention: v is a part of k, or q has two parts.
void draw_latent(Draw& d, Case* c) {
  c->latent = d.percent(50), c->qv = !c->latent;
  c->head_dim = c->qv ? 64 : 576, c->head_dim_v = 512;
  if (c->heads_k > 1) c->heads_q /= c->heads_k, c->heads_k = 1;
  if (c->heads_q > 0 && d.percent(60)) c->heads_q = d.of({16, 32, 64, 128});
  if (c->softcap == 0) c->softmax_scale = std::min(c->softmax_scale, 0.1f);
  if (c->latent) c->rotary = Rotary::kNone, c->rotary_offsets = false;
  c->own_layouts[static_cast<size_t>(TensorName::kV)].reset();
  while (cost(*c) > 5e7)
    if (!take_sequences_or_heads(c)) c->seq_q /= 2, c->seq_k /= 2;
  if (c->tree && c->seq_q == 0) c->seq_q = 1;  // a tree has drafts
}

// A tree of drafts for the mask.
void draw_tree(Draw& d, Case* c) {
  c->tree = true;
  c->causal = c->window = c->rotary_offsets = false;
  c->window_left = c->window_right = -1, c->chunk = 0;
  c->rotary = Rotary::kNone;
  c->seq_q = d.percent(60) ? d.between(1, 16) : d.between(17, 64);
  c->max_known = true;
}

// A mask as data, of which the band that has been drawn is a part.
void draw_data_mask(Draw& d, Case* c) {
  constexpr int64_t kBlocks[] = {8, 16, 24, 64, 64, 128, 128, 128, 256};
  c->mask.source =
      d.of({CaseMaskSource::kBand, CaseMaskSource::kRanges, CaseMaskSource::kRanges,
            CaseMaskSource::kDocuments, CaseMaskSource::kDense, CaseMaskSource::kBlocks,
            CaseMaskSource::kBits, CaseMaskSource::kBitBlocks});
  if (c->mask.source == CaseMaskSource::kBand) return;
  c->mask.of_batch = d.percent(50);
  if (c->mask.source != CaseMaskSource::kDocuments) c->mask.of_heads = d.percent(50);
  if (c->mask.source == CaseMaskSource::kRanges) c->mask.ranges = d.between(1, 8);
  if (c->mask.source == CaseMaskSource::kBlocks)
    c->mask.block_rows = d.of(kBlocks), c->mask.block_keys = d.of(kBlocks);
}

// Whether the lists of a mask are no larger than a test can hold. Where the caller knows no longest
// sequence, they have room for one that is as long as all together.
bool fits_data_mask(const Case& c) {
  if (!c.is_ragged() || c.max_known) return true;
  const int64_t rows_q = c.packed_q ? c.batch * c.seq_q : c.seq_q;
  const int64_t rows_k = c.packed_k ? c.batch * c.seq_k : c.seq_k;
  return c.batch * c.heads_q * rows_q * rows_k <= int64_t{1} << 22;
}

// A field's own draw, so that a new field changes no other's.
Draw draw_of(const ParamField& field, uint64_t seed) {
  Hash name;
  for (const char c : field.name) name.add(static_cast<unsigned char>(c));
  return {seed, name.key()};
}

// Options and tensors without a member of a case: flags, values of enums, shapes. A tree is a mask
// of its own.
void draw_added(Draw& d, Case* c) {
  if (c->quantize) return;
  const auto first = static_cast<uint64_t>(d.below(int64_t{1} << 62));
  AddedOptions::visit(c->added, [&](const ParamField& field, int64_t& value) {
    Draw own = draw_of(field, first);
    if (c->tree && field.kind != FieldKind::kTensor) return;
    if (field.kind == FieldKind::kTensor && !goes_with(*c, field)) return;
    if (c->backward && !find_field<flash3_backward_params>(field.name)) return;
    const int64_t values = count_values(field);
    if (values > 1 && own.percent(30)) value = own.between(1, values - 1);
  });
}

// Of what dropout goes with, where zeros are no more than zeros. The least part that can be kept is
// multiplied by 65536, which float16 does not hold.
void draw_dropout(Draw& d, Case* c) {
  const bool has_fp8 = c->fp8 || c->dtype_of_kv() == FLASH3_FLOAT8_E4M3;
  if (c->quantize || has_fp8 || c->qv || c->tree || c->distribution == Distribution::kSpecial)
    return;
  if (!d.percent(20)) return;
  const int64_t dropped = d.of({1, 1000, 6554, 32768, 60000, 65535});
  const int64_t most = c->dtype == FLASH3_FLOAT16 ? 60000 : 65535;
  c->dropout = static_cast<float>(std::min(dropped, most)) / 65536;
}

// Whether q, and what a call appends to k, can be rotated.
bool may_rotate(const Case& c) {
  const bool appends_fp8 = c.append > 0 && c.dtype_of_new() == FLASH3_FLOAT8_E4M3;
  return c.dtype != FLASH3_FLOAT8_E4M3 && !appends_fp8 && !c.latent;
}

// Where it is known what an infinity or a NaN leads to (make_forward_tensors, make_backward_tensors
// and flash3.h say where).
bool may_be_special(const Case& c) {
  if (c.is_ragged() || c.own_layouts != Case{}.own_layouts) return false;
  if (c.quantize) return true;
  if (c.fp8 || c.chunk > 0 || c.softcap > 0 || c.sink != Sink::kNone || c.softmax_scale > 0)
    return false;
  // Weights of 0 times infinity: of long rows, and where scores have few terms or P few bits.
  if (c.head_dim < 32 || c.seq_k < 8 || c.seq_k > 300 || c.dtype == FLASH3_FLOAT8_E4M3)
    return false;
  return !c.backward || (!c.causal && !c.window);
}

}  // namespace

Case random_case(uint64_t seed, uint64_t index) {
  Draw d(seed, index);
  Case c;
  draw_dims(d, &c);
  draw_heads(d, &c);
  draw_lengths(d, &c);
  if (d.percent(35)) draw_ragged(d, &c);
  const int64_t kind = d.below(20);
  c.backward = kind >= 12 && kind < 18;
  // Every power of two from 2^16 to 2^25 multiplications, and now and then more.
  shrink(d, d.percent(4) ? 1.5e8 : static_cast<double>(d.spread(1 << 16, 1 << 25)), &c);
  if (kind < 18) {
    draw_mask(d, &c);
    draw_scores(d, &c);
  }
  if (kind < 12)
    draw_forward(d, &c);
  else if (kind < 18)
    draw_backward(d, &c);
  else
    draw_quantize(d, &c);
  draw_layouts(d, &c);
  const bool special = d.percent(12);
  if (d.percent(15)) c.distribution = Distribution::kOutliers;
  if (special && may_be_special(c)) c.distribution = Distribution::kSpecial;
  c.seed = static_cast<uint64_t>(d.between(1, 1'000'000));
  const bool is_fp8 = c.dtype == FLASH3_FLOAT8_E4M3 || c.fp8;
  if (is_fp8 && d.percent(6)) draw_long_rows(d, &c);
  const bool may_be_cache = kind < 12 && !c.fp8 && c.distribution != Distribution::kSpecial;
  if (may_be_cache && d.percent(is_fp8 ? 12 : 20)) draw_cache(d, &c);
  if (c.has_cache() && !is_fp8 && d.percent(6)) draw_shared_keys(d, &c);
  const bool is_fp8_cache = is_fp8 && (c.has_cache() || c.append > 0);
  if (may_be_cache && c.dtype != FLASH3_FLOAT32 && (is_fp8_cache || (!is_fp8 && d.percent(10))))
    draw_fp8_keys(d, &c);
  if (may_be_cache && d.percent(c.has_cache() ? 25 : 5)) draw_tree(d, &c);
  if (may_be_cache && !is_fp8 && !c.kv8 && d.percent(6)) draw_latent(d, &c);
  if (is_fp8 && d.percent(15)) c.sums = static_cast<int>(d.between(1, 2));
  if (may_be_cache && may_rotate(c)) c.rotate = d.percent(c.has_cache() || c.kv8 ? 25 : 4);
  if (!c.quantize && c.is_ragged()) c.fill = d.percent(30);
  draw_added(d, &c);
  const bool may_have_mask = !c.quantize && !c.leftpad && c.append == 0 && !c.qv && !c.latent &&
                             !c.tree && !c.fp8 && c.distribution != Distribution::kSpecial &&
                             fits_data_mask(c);
  if (may_have_mask && d.percent(25)) draw_data_mask(d, &c);
  draw_dropout(d, &c);
  return c;
}

}  // namespace flash3::cases
