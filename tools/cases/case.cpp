// SPDX-License-Identifier: Apache-2.0
#include "cases/case.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>
#include <vector>

#include "cases/cache_tensors.hpp"
#include "cases/internals.hpp"
#include "cases/sequences.hpp"
#include "cases/tensors.hpp"
#include "cases/text.hpp"

namespace flash3::cases {
namespace {

constexpr std::pair<const char*, flash3_dtype> kDtypes[] = {
    {"fp16", FLASH3_FLOAT16},     {"bf16", FLASH3_BFLOAT16},          {"fp32", FLASH3_FLOAT32},
    {"e4m3", FLASH3_FLOAT8_E4M3}, {"float16", FLASH3_FLOAT16},        {"bfloat16", FLASH3_BFLOAT16},
    {"float32", FLASH3_FLOAT32},  {"float8_e4m3", FLASH3_FLOAT8_E4M3}};

constexpr std::pair<const char*, Distribution> kDistributions[] = {
    {"normal", Distribution::kNormal},
    {"outliers", Distribution::kOutliers},
    {"special", Distribution::kSpecial}};

constexpr std::pair<const char*, Lengths> kLengths[] = {
    {"random", Lengths::kRandom}, {"giant", Lengths::kGiant}, {"edges", Lengths::kEdges},
    {"empty", Lengths::kEmpty},   {"mixed", Lengths::kMixed}, {"loguniform", Lengths::kLogUniform}};

constexpr std::pair<const char*, Scales> kScales[] = {
    {"onescale", Scales::kTensor}, {"headscales", Scales::kHead}, {"blockscales", Scales::kBlock}};

constexpr std::pair<const char*, Scales> kOwnScales[] = {{"noscale", Scales::kNone},
                                                         {"onescale", Scales::kTensor},
                                                         {"headscales", Scales::kHead},
                                                         {"blockscales", Scales::kBlock}};

constexpr const char* kLeftOut[] = {"noq", "nok", "nov"};

constexpr std::pair<const char*, Rotary> kRotaries[] = {{"rotary", Rotary::kHalves},
                                                        {"rotary2", Rotary::kInterleaved}};

// "<a>" or "<a>x<b>"; one number stands for both.
bool number_pair(std::string_view text, int64_t* a, int64_t* b) {
  const size_t x = text.find('x');
  if (x == std::string_view::npos) return number(text, a) && (*b = *a, true);
  return number(text.substr(0, x), a) && number(text.substr(x + 1), b);
}

// "<left>:<right>", a missing side is unbounded.
bool window(std::string_view text, Case* c) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  const auto left = text.substr(0, colon), right = text.substr(colon + 1);
  c->window = true;
  return (left.empty() || number(left, &c->window_left)) &&
         (right.empty() || number(right, &c->window_right));
}

bool mask(std::string_view text, Case* c) {
  if (text == "full") return true;
  if (eat("causal", &text)) {
    c->causal = true;
    if (text.empty()) return true;
    if (!eat("+", &text)) return false;
  }
  return eat("w", &text) && window(text, c);
}

// "<word>" for both of q and k, "<word>q" or "<word>k" for one.
bool sides(std::string_view word, std::string_view text, bool* q, bool* k) {
  if (!eat(word, &text)) return false;
  if (!text.empty() && text != "q" && text != "k") return false;
  *q |= text != "k";
  *k |= text != "q";
  return true;
}

// "<tokens>:<draw>", after "lognormal".
bool log_normal(std::string_view text, Case* c) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  c->lengths = Lengths::kLogNormal;
  return number(text.substr(0, colon), &c->tokens) && number(text.substr(colon + 1), &c->draw);
}

bool ragged_option(std::string_view text, Case* c) {
  if (const auto lengths = value_in(kLengths, text)) return c->lengths = *lengths, true;
  if (eat("lognormal", &text)) return log_normal(text, c);
  if (text == "nomax") return c->max_known = false, true;
  if (text == "fill") return c->fill = true;
  if (eat("front", &text)) return number(text, &c->front);
  return sides("packed", text, &c->packed_q, &c->packed_k) ||
         sides("used", text, &c->used_q, &c->used_k);
}

bool cache_option(std::string_view text, Case* c) {
  if (text == "batchidx") return c->batch_idx = true;
  if (text == "leftpad") return c->leftpad = true;
  if (text == "packednew") return c->append_packed = true;
  if (text == "offsets") return c->rotary_offsets = true;
  if (text == "kv8") return c->kv8 = true;
  if (text == "latent") return c->latent = true;
  if (text == "qv") return c->qv = true;
  if (text == "tree") return c->tree = true;
  if (eat("new", &text)) {
    const auto dtype = value_in(kDtypes, text);
    return dtype && (c->new_dtype = *dtype, true);
  }
  if (eat("paged", &text)) return number(text, &c->page_size);
  return eat("append", &text) && number(text, &c->append);
}

bool fp8_option(std::string_view text, Case* c) {
  if (const auto scales = value_in(kScales, text)) return c->scales = *scales, true;
  if (const auto rotary = value_in(kRotaries, text)) return c->rotary = *rotary, true;
  if (text == "fp8") return c->fp8 = true;
  if (text == "sums1" || text == "sums2") return c->sums = text.back() - '0', true;
  if (text == "quantize") return c->quantize = true;
  if (text == "rotate") return c->rotate = true;
  for (size_t i = 0; i < std::size(kLeftOut); ++i)
    if (text == kLeftOut[i]) return c->quantize = c->left_out[i] = true;
  if (!eat("out", &text)) return false;
  const auto dtype = value_in(kDtypes, text);
  return dtype && (c->out_dtype = *dtype, true);
}

// "k:odd.at3" or "k:blockscales".
bool own_option(std::string_view text, Case* c) {
  if (text.size() > 2 && text[1] == ':') {
    const size_t i = std::string_view("qkv").find(text[0]);
    const auto scales = value_in(kOwnScales, text.substr(2));
    if (i != std::string_view::npos && scales) return c->own_scales[i] = scales, true;
  }
  TensorName name;
  TensorLayout layout;
  if (!parse_layout(text, &name, &layout)) return false;
  c->own_layouts[static_cast<size_t>(name)] = layout;
  return true;
}

bool data_mask(std::string_view text, Case* c) {
  if (!eat("mask:", &text)) return false;
  const auto mask = parse_mask(text);
  return mask && (c->mask = *mask, true);
}

bool option(std::string_view text, Case* c) {
  if (const auto layout = parse_layout(text)) return c->layout = *layout, true;
  if (own_option(text, c) || parse_added(text, &c->added) || data_mask(text, c)) return true;
  if (const auto inputs = value_in(kDistributions, text)) return c->distribution = *inputs, true;
  if (text == "nolse") return c->want_lse = false, true;
  if (text == "bwd") return c->backward = true;
  if (text == "dlse") return c->backward = c->want_dlse = true;
  if (text == "deterministic") return c->backward = c->deterministic = true;
  if (text == "nodsink") return c->backward = true, c->want_dsink = false, true;
  if (text == "dadded") return c->backward = c->want_dadded = true;
  if (text == "gradfp32") return c->backward = c->float32_gradients = true;
  if (text == "sink") return c->sink = Sink::kFloat32, true;
  if (text == "sink16") return c->sink = Sink::k16, true;
  if (cache_option(text, c)) return true;
  if (ragged_option(text, c) || fp8_option(text, c)) return true;
  if (eat("softcap", &text)) return number(text, &c->softcap);
  if (eat("dropout", &text)) return number(text, &c->dropout);
  if (eat("chunk", &text)) return number(text, &c->chunk);
  if (eat("scale", &text)) return number(text, &c->softmax_scale);
  if (eat("seed", &text)) return number(text, &c->seed);
  return false;
}

std::string mask_name(const Case& c) {
  if (!c.window) return c.causal ? "causal" : "full";
  const auto side = [](int64_t n) { return n < 0 ? std::string() : std::to_string(n); };
  return (c.causal ? "causal+w" : "w") + side(c.window_left) + ":" + side(c.window_right);
}

std::string pair_name(int64_t a, int64_t b) {
  return a == b ? std::to_string(a) : std::to_string(a) + "x" + std::to_string(b);
}

// Shortest text that reads back as the same float.
std::string float_name(float x) {
  char text[32];
  const auto [end, code] = std::to_chars(text, text + sizeof text, x);
  return code == std::errc() ? std::string(text, end) : std::string("?");
}

}  // namespace

const char* short_name(flash3_dtype dtype) { return name_in(kDtypes, dtype); }
const char* short_name(Distribution d) { return name_in(kDistributions, d); }
std::optional<flash3_dtype> parse_dtype(std::string_view name) { return value_in(kDtypes, name); }

std::string to_id(const Case& c) {
  std::string id = short_name(c.dtype);
  id += "/b" + std::to_string(c.batch);
  id += "/q" + std::to_string(c.seq_q) + "/k" + std::to_string(c.seq_k);
  id.append("/h").append(pair_name(c.heads_q, c.heads_k));
  id.append("/d").append(pair_name(c.head_dim, c.head_dim_v));
  id.append("/").append(mask_name(c));
  const Case defaults;
  if (c.layout != defaults.layout) id += std::string("/") + short_name(c.layout);
  for (size_t i = 0; i < kTensorNames; ++i)
    if (c.own_layouts[i])
      id.append("/").append(to_text(static_cast<TensorName>(i), *c.own_layouts[i]));
  if (c.distribution != defaults.distribution) id += std::string("/") + short_name(c.distribution);
  if (!c.want_lse) id += "/nolse";
  if (c.softmax_scale != 0.f) id.append("/scale").append(float_name(c.softmax_scale));
  if (c.seed != defaults.seed) id += "/seed" + std::to_string(c.seed);
  const auto add_sides = [&](const char* word, bool q, bool k) {
    if (q || k) id += std::string("/") + word + (q && k ? "" : q ? "q" : "k");
  };
  if (c.lengths == Lengths::kLogNormal)
    id += "/lognormal" + std::to_string(c.tokens) + ":" + std::to_string(c.draw);
  else if (c.lengths != Lengths::kAll)
    id += std::string("/") + name_in(kLengths, c.lengths);
  add_sides("packed", c.packed_q, c.packed_k);
  add_sides("used", c.used_q, c.used_k);
  if (!c.max_known) id += "/nomax";
  if (c.front != 0) id += "/front" + std::to_string(c.front);
  if (c.fill) id += "/fill";
  if (c.page_size != 0) id += "/paged" + std::to_string(c.page_size);
  if (c.batch_idx) id += "/batchidx";
  if (c.leftpad) id += "/leftpad";
  if (c.append != 0) id += "/append" + std::to_string(c.append);
  if (c.append_packed) id += "/packednew";
  if (c.rotary_offsets) id += "/offsets";
  if (c.new_dtype != FLASH3_DTYPE_NONE) id += std::string("/new") + short_name(c.new_dtype);
  if (c.kv8) id += "/kv8";
  if (c.latent) id += "/latent";
  if (c.qv) id += "/qv";
  if (c.tree) id += "/tree";
  if (c.sink != Sink::kNone) id += c.sink == Sink::kFloat32 ? "/sink" : "/sink16";
  if (c.softcap != 0.f) id.append("/softcap").append(float_name(c.softcap));
  if (c.chunk != 0) id += "/chunk" + std::to_string(c.chunk);
  if (c.dropout != 0.f) id.append("/dropout").append(float_name(c.dropout));
  id += to_text(c.added);
  if (c.mask.given()) id.append("/mask:").append(to_text(c.mask));
  if (c.scales != Scales::kNone) id += std::string("/") + name_in(kScales, c.scales);
  for (size_t i = 0; i < c.own_scales.size(); ++i)
    if (c.own_scales[i])
      id += std::string("/") + "qkv"[i] + ":" + name_in(kOwnScales, *c.own_scales[i]);
  if (c.out_dtype != FLASH3_DTYPE_NONE) id += std::string("/out") + short_name(c.out_dtype);
  if (c.fp8) id += "/fp8";
  if (c.sums != 0) id += "/sums" + std::to_string(c.sums);
  if (c.quantize) id += "/quantize";
  for (size_t i = 0; i < c.left_out.size(); ++i)
    if (c.left_out[i]) id += std::string("/") + kLeftOut[i];
  if (c.rotate) id += "/rotate";
  if (c.rotary != Rotary::kNone) id += std::string("/") + name_in(kRotaries, c.rotary);
  if (c.backward) id += "/bwd";
  if (c.want_dlse) id += "/dlse";
  if (c.deterministic) id += "/deterministic";
  if (!c.want_dsink) id += "/nodsink";
  if (c.want_dadded) id += "/dadded";
  if (c.float32_gradients) id += "/gradfp32";
  return id;
}

std::optional<Case> parse_id(std::string_view id, std::string* error) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= id.size();) {
    const size_t end = std::min(id.find('/', begin), id.size());
    parts.push_back(id.substr(begin, end - begin));
    begin = end + 1;
  }

  static constexpr const char* kWhat[] = {
      "the dtype (fp16, bf16, fp32 or e4m3)",
      "the batch (b2)",
      "the query length (q129)",
      "the key length (k1000)",
      "the heads (h4, or h4x2 for 4 query heads on 2 KV heads)",
      "the head dim (d128, or d192x128 for q, k and v)",
      "the mask (full, causal, w<left>:<right> or causal+w<left>:)",
      "an option (bshd, bhsd, padded, odd, normal, outliers, special, nolse, scale<x>, seed<n>, "
      "random, giant, edges, empty, mixed, loguniform, lognormal<tokens>:<draw>, packed, packedq, "
      "packedk, used, usedq, usedk, nomax, front<n>, fill, paged<n>, batchidx, leftpad, append<n>, "
      "packednew, offsets, new<dtype>, kv8, latent, qv, tree, sink, sink16, softcap<x>, chunk<n>, "
      "dropout<p>, "
      "mask:band, mask:documents, mask:dense, mask:ranges<n>, mask:blocks<n>x<n>, mask:bits, "
      "mask:bitblocks, mask:causal, mask:prefix<n>, mask:sinks<n>x<n>, mask:lognormal<draw>, "
      "mask:share<percent>of<n>x<n>, mask:coins, onescale, "
      "headscales, blockscales, out<dtype>, fp8, sums1, sums2, quantize, noq, nok, nov, rotate, "
      "rotary, "
      "rotary2, bwd, dlse, "
      "deterministic, nodsink, dadded, gradfp32, "
      "<tensor>:<layout>[.at<n>][.gap<n>][.batch0][.rows0][.heads0][.wild], "
      "<q, k or v>:<scales>, <option>=<n>, <tensor>=<heads or rows>)"};
  constexpr size_t kRequired = 7;

  Case c;
  for (size_t i = 0; i < std::max(parts.size(), kRequired); ++i) {
    std::string_view text = i < parts.size() ? parts[i] : std::string_view();
    bool good = false;
    switch (i) {
      case 0:
        if (const auto dtype = parse_dtype(text)) c.dtype = *dtype, good = true;
        break;
      case 1: good = eat("b", &text) && number(text, &c.batch); break;
      case 2: good = eat("q", &text) && number(text, &c.seq_q); break;
      case 3: good = eat("k", &text) && number(text, &c.seq_k); break;
      case 4: good = eat("h", &text) && number_pair(text, &c.heads_q, &c.heads_k); break;
      case 5: good = eat("d", &text) && number_pair(text, &c.head_dim, &c.head_dim_v); break;
      case 6: good = mask(text, &c); break;
      default: good = option(text, &c); break;
    }
    if (good) continue;
    if (error != nullptr) {
      const std::string found = i < parts.size() ? in_quotes(parts[i]) : "its end";
      constexpr size_t kMost = 200;
      *error = "case " + in_quotes(id, kMost) + ": expected " + kWhat[std::min(i, kRequired)] +
               ", found " + found;
    }
    return std::nullopt;
  }
  if (c.has_cache()) c.packed_k = false, c.used_k = true;  // a cache tells its lengths so
  if (c.lengths != Lengths::kAll && !c.is_ragged()) c.packed_q = c.packed_k = true;
  if (c.lengths != Lengths::kLogNormal) c.tokens = c.draw = 0;  // another option came after it
  return c;
}

Mask mask_of(const Case& c, int64_t len_q, int64_t len_k) {
  flash3_forward_params p{};
  set_options(c, {}, &p);
  return Mask::make(len_q, len_k, mask_rule_of(p));
}

namespace {

// The sum of f(queries, keys) over the sequences of the batch, with the keys that a call appends.
template <class F>
double sum_over_sequences(const Case& c, const CaseSequences* given, const F& f) {
  if (!c.is_ragged()) return static_cast<double>(c.batch) * f(c.seq_q, c.seq_k);
  const CaseSequences sequences = given ? *given : make_sequences(c);
  const std::vector<int32_t> added =
      c.append > 0 ? make_cache_plan(c).added : std::vector<int32_t>(static_cast<size_t>(c.batch));
  double sum = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const SeqInfo s = sequences[b];
    sum += f(s.q.length, s.k.length + added[static_cast<size_t>(b)]);
  }
  return sum;
}

double pairs_of_one(const Case& c, int64_t len_q, int64_t len_k) {
  const Mask mask = mask_of(c, len_q, len_k);
  if (len_q > 0 && len_k > 0 && mask.is_full(len_q, len_k))
    return static_cast<double>(len_q) * static_cast<double>(len_k);
  int64_t pairs = 0;
  for (int64_t i = 0; i < len_q; ++i) pairs += mask.keys({i, i + 1}, len_k).size();
  return static_cast<double>(pairs);
}

}  // namespace

int64_t queries(const Case& c, const CaseSequences* given) {
  return static_cast<int64_t>(
      sum_over_sequences(c, given, [](int64_t q, int64_t) { return static_cast<double>(q); }));
}

int64_t visible_pairs(const Case& c, const CaseSequences* given) {
  return static_cast<int64_t>(
      sum_over_sequences(c, given, [&](int64_t q, int64_t k) { return pairs_of_one(c, q, k); }));
}

int64_t products_of_pair(const Case& c) {
  return c.backward ? 3 * c.head_dim + 2 * c.head_dim_v
                    : c.head_dim + c.head_dim_v + (c.qv ? c.head_dim_v : 0);
}

double flops(const Case& c, const CaseSequences* given) {
  const double pairs = sum_over_sequences(c, given, [&](int64_t q, int64_t k) {
    if (c.causal && !c.window && c.chunk == 0 && q == k)
      return static_cast<double>(q) * static_cast<double>(k) / 2;
    return pairs_of_one(c, q, k);
  });
  return 2 * pairs * static_cast<double>(products_of_pair(c) * c.heads_q);
}

// Elements of a key and its value.
static int64_t dims_of_key(const Case& c) {
  return c.latent ? c.head_dim : c.head_dim + c.head_dim_v;
}

double kv_bytes(const Case& c, const CaseSequences* given) {
  const double rows = sum_over_sequences(
      c, given, [&](int64_t, int64_t k) { return static_cast<double>(k * c.heads_k); });
  return dtype_size(c.dtype_of_kv()) * rows * static_cast<double>(dims_of_key(c));
}

double tensor_bytes(const Case& c, const CaseSequences* given) {
  const double size = dtype_size(c.dtype), out_size = dtype_size(c.dtype_of_out());
  const double rows_q = static_cast<double>(queries(c, given) * c.heads_q);
  const double dim = static_cast<double>(c.head_dim), dim_v = static_cast<double>(c.head_dim_v);
  const double new_rows =
      c.append > 0 ? static_cast<double>(make_cache_plan(c).cu_new.back() * c.heads_k) : 0;
  const double tensors =
      size * (dim + (c.qv ? dim_v : 0)) * rows_q +
      dtype_size(c.dtype_of_new()) * static_cast<double>(dims_of_key(c)) * new_rows +
      kv_bytes(c, given) + out_size * dim_v * rows_q;
  const double lse = 4 * rows_q;
  return (c.backward ? 2 * tensors : tensors) + (c.want_lse ? lse : 0) + (c.want_dlse ? lse : 0);
}

double host_bytes(const Case& c) {
  const CaseSequences sequences = make_sequences(c);
  const auto rows = [&](const SequenceLengths& of, int64_t heads) {
    return static_cast<double>((of.cu.empty() ? c.batch : 1) * of.rows * heads);
  };
  const double rows_q = rows(sequences.q, c.heads_q), rows_k = rows(sequences.k, c.heads_k);
  const double dim = static_cast<double>(c.head_dim), dim_v = static_cast<double>(c.head_dim_v);
  const double of_q = rows_q * dim, of_out = rows_q * dim_v, of_kv = rows_k * (dim + dim_v);
  const double size = dtype_size(c.dtype), out_size = dtype_size(c.dtype_of_out());
  constexpr double kWritten = 3, kReference = sizeof(double) + sizeof(float);
  const double checked = kWritten * out_size + kReference;
  const double inputs = of_q * size + of_kv * dtype_size(c.dtype_of_kv());
  return c.backward ? inputs + 2 * of_out * out_size + (of_q + of_kv) * checked
                    : inputs + of_out * checked;
}

double cost_per_token(const Case& c, const CaseSequences* given) {
  const double tokens = static_cast<double>(queries(c, given));
  const double pairs = sum_over_sequences(c, given, [](int64_t q, int64_t k) {
    return static_cast<double>(q) * static_cast<double>(k);
  });
  return tokens > 0 ? pairs / tokens : 0;
}

double score_matrix_bytes(const Case& c, const CaseSequences* given) {
  const double size = dtype_size(c.dtype_of_out());
  return size * static_cast<double>(c.heads_q) *
         sum_over_sequences(c, given, [](int64_t q, int64_t k) {
           return static_cast<double>(q) * static_cast<double>(k);
         });
}

}  // namespace flash3::cases
