#include "cases/case.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>
#include <vector>

#include "core/band.hpp"

namespace flash3::cases {
namespace {

constexpr std::pair<const char*, flash3_dtype> kDtypes[] = {
    {"fp16", FLASH3_FLOAT16},    {"bf16", FLASH3_BFLOAT16},     {"fp32", FLASH3_FLOAT32},
    {"float16", FLASH3_FLOAT16}, {"bfloat16", FLASH3_BFLOAT16}, {"float32", FLASH3_FLOAT32}};

constexpr std::pair<const char*, Layout> kLayouts[] = {{"bshd", Layout::kBatchSeq},
                                                       {"bhsd", Layout::kHeadsFirst},
                                                       {"padded", Layout::kPadded},
                                                       {"odd", Layout::kOdd}};

constexpr std::pair<const char*, Distribution> kDistributions[] = {
    {"normal", Distribution::kNormal},
    {"outliers", Distribution::kOutliers},
    {"special", Distribution::kSpecial}};

template <class Table, class Value>
const char* name_in(const Table& table, Value value) {
  for (const auto& [name, entry] : table)
    if (entry == value) return name;
  return "unknown";
}

template <class Value, size_t N>
std::optional<Value> value_in(const std::pair<const char*, Value> (&table)[N],
                              std::string_view name) {
  for (const auto& [entry, value] : table)
    if (entry == name) return value;
  return std::nullopt;
}

// Strips prefix from *text if it is there.
bool eat(std::string_view prefix, std::string_view* text) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// All of text as a non-negative number.
template <class Number>
bool number(std::string_view text, Number* out) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return !text.empty() && text[0] != '-' && code == std::errc() && end == text.data() + text.size();
}

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

bool option(std::string_view text, Case* c) {
  if (const auto layout = value_in(kLayouts, text)) return c->layout = *layout, true;
  if (const auto inputs = value_in(kDistributions, text)) return c->distribution = *inputs, true;
  if (text == "nolse") return c->want_lse = false, true;
  if (text == "bwd") return c->backward = true;
  if (text == "dlse") return c->backward = c->want_dlse = true;
  if (text == "deterministic") return c->backward = c->deterministic = true;
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
const char* short_name(Layout layout) { return name_in(kLayouts, layout); }
const char* short_name(Distribution d) { return name_in(kDistributions, d); }
std::optional<flash3_dtype> parse_dtype(std::string_view name) { return value_in(kDtypes, name); }
std::optional<Layout> parse_layout(std::string_view name) { return value_in(kLayouts, name); }

std::string to_id(const Case& c) {
  std::string id = short_name(c.dtype);
  id += "/b" + std::to_string(c.batch);
  id += "/q" + std::to_string(c.seq_q) + "/k" + std::to_string(c.seq_k);
  id += "/h" + pair_name(c.heads_q, c.heads_k);
  id += "/d" + pair_name(c.head_dim, c.head_dim_v);
  id += "/" + mask_name(c);
  const Case defaults;
  if (c.layout != defaults.layout) id += std::string("/") + short_name(c.layout);
  if (c.distribution != defaults.distribution) id += std::string("/") + short_name(c.distribution);
  if (!c.want_lse) id += "/nolse";
  if (c.softmax_scale != 0.f) id += "/scale" + float_name(c.softmax_scale);
  if (c.seed != defaults.seed) id += "/seed" + std::to_string(c.seed);
  if (c.backward) id += "/bwd";
  if (c.want_dlse) id += "/dlse";
  if (c.deterministic) id += "/deterministic";
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
      "the dtype (fp16, bf16 or fp32)",
      "the batch (b2)",
      "the query length (q129)",
      "the key length (k1000)",
      "the heads (h4, or h4x2 for 4 query heads on 2 KV heads)",
      "the head dim (d128, or d192x128 for q, k and v)",
      "the mask (full, causal, w<left>:<right> or causal+w<left>:)",
      "an option (bshd, bhsd, padded, odd, normal, outliers, special, nolse, scale<x>, seed<n>, "
      "bwd, dlse, "
      "deterministic)"};
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
      const std::string found = i < parts.size() ? "'" + std::string(parts[i]) + "'" : "its end";
      *error = "case '" + std::string(id) + "': expected " + kWhat[std::min(i, kRequired)] +
               ", found " + found;
    }
    return std::nullopt;
  }
  return c;
}

Band band_of(const Case& c) {
  const int64_t left = c.window ? c.window_left : -1;
  int64_t right = c.window ? c.window_right : -1;
  if (c.causal) right = right < 0 ? 0 : std::min<int64_t>(right, 0);
  return Band::make(c.seq_q, c.seq_k, left, right);
}

int64_t visible_pairs(const Case& c) {
  const Band band = band_of(c);
  if (c.seq_q > 0 && c.seq_k > 0 && band.is_full(c.seq_q, c.seq_k)) return c.seq_q * c.seq_k;
  int64_t pairs = 0;
  for (int64_t i = 0; i < c.seq_q; ++i) pairs += band.keys({i, i + 1}, c.seq_k).size();
  return pairs;
}

double flops(const Case& c) {
  double pairs = static_cast<double>(visible_pairs(c));
  if (c.causal && !c.window && c.seq_q == c.seq_k)
    pairs = static_cast<double>(c.seq_q) * static_cast<double>(c.seq_k) / 2;
  const int64_t products =
      c.backward ? 3 * c.head_dim + 2 * c.head_dim_v : c.head_dim + c.head_dim_v;
  return 2 * pairs * static_cast<double>(products * c.batch * c.heads_q);
}

double tensor_bytes(const Case& c) {
  const double size = c.dtype == FLASH3_FLOAT32 ? 4 : 2;
  const double rows_q = static_cast<double>(c.batch * c.seq_q * c.heads_q);
  const double rows_k = static_cast<double>(c.batch * c.seq_k * c.heads_k);
  const double dims = static_cast<double>(c.head_dim + c.head_dim_v);
  const double tensors = size * dims * (rows_q + rows_k), lse = 4 * rows_q;
  return (c.backward ? 2 * tensors : tensors) + (c.want_lse ? lse : 0) + (c.want_dlse ? lse : 0);
}

double score_matrix_bytes(const Case& c) {
  const double size = c.dtype == FLASH3_FLOAT32 ? 4 : 2;
  return size * static_cast<double>(c.batch * c.heads_q) * static_cast<double>(c.seq_q) *
         static_cast<double>(c.seq_k);
}

}  // namespace flash3::cases
