// SPDX-License-Identifier: Apache-2.0
// Rows of Q, K and V brought into the order in which the matrix products read them.
//
//   Q  row-major words                     [row][word]
//   K  transposed, in panels of kPanel keys   [panel][word][key in panel]
//   V  in panels of kPanel columns            [panel][key / kElements][column in panel]
//
// Padding (keys beyond seq_k, columns beyond the head dim) is zero. FP8 values are multiplied by
// their scales here: by powers of two that rounds nothing.

HWY_BEFORE_NAMESPACE();

namespace flash3::cpu {
namespace {

#if HWY_TARGET == HWY_SCALAR
constexpr int kBlock = 1;
#else
constexpr int kBlock = 4;  // words in a 128-bit block, the unit that shuffles work within

// A vector whose block b is the block at p + b · stride.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const float* p, int64_t stride) {
  if constexpr (hn::MaxLanes(D()) == kBlock) {
    return hn::LoadU(d, p);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, p + hn::MaxLanes(half) / kBlock * stride, stride),
                       load_blocks(half, p, stride));
  }
}
#endif

// out[word][key] = rows[key][word] for kLanes keys and kBlock words; out's rows are kPanel apart.
HWY_INLINE void transpose(const float* rows, int64_t stride, float* out) {
#if HWY_TARGET == HWY_SCALAR
  (void)stride;
  *out = *rows;
#else
  const auto a = load_blocks(F32(), rows, kBlock * stride);
  const auto b = load_blocks(F32(), rows + stride, kBlock * stride);
  const auto c = load_blocks(F32(), rows + 2 * stride, kBlock * stride);
  const auto d = load_blocks(F32(), rows + 3 * stride, kBlock * stride);
  const auto ac_low = hn::InterleaveLower(F32(), a, c), ac_high = hn::InterleaveUpper(F32(), a, c);
  const auto bd_low = hn::InterleaveLower(F32(), b, d), bd_high = hn::InterleaveUpper(F32(), b, d);
  hn::Store(hn::InterleaveLower(F32(), ac_low, bd_low), F32(), out);
  hn::Store(hn::InterleaveUpper(F32(), ac_low, bd_low), F32(), out + kPanel);
  hn::Store(hn::InterleaveLower(F32(), ac_high, bd_high), F32(), out + 2 * kPanel);
  hn::Store(hn::InterleaveUpper(F32(), ac_high, bd_high), F32(), out + 3 * kPanel);
#endif
}

// `words` times scale, where these words have scales.
template <class Words>
HWY_INLINE VecF scaled(VecF words, [[maybe_unused]] float scale) {
  if constexpr (Words::kScaled) return hn::Mul(words, set(scale));
  return words;
}

// One row of `dim` elements as words, zero up to `words`.
template <class Words>
HWY_INLINE void copy_row(const typename Words::Element* row, int dim, int words, float* out,
                         float scale = 1.f) {
  constexpr int kStep = kLanes * Words::kElements;
  int d = 0;
  for (; d + kStep <= dim; d += kStep)
    hn::StoreU(scaled<Words>(Words::load_along(row + d), scale), F32(), out + d / Words::kElements);
  if (d < dim) {
    typename Words::Element rest[kStep] = {};
    std::copy_n(row + d, dim - d, rest);
    float rest_words[kLanes];
    hn::StoreU(scaled<Words>(Words::load_along(rest), scale), F32(), rest_words);
    std::copy_n(rest_words, words - d / Words::kElements, out + d / Words::kElements);
  }
}

// Where the rows of K or V of one head lie: `stride` apart from the first on.
template <class Element>
struct EvenRows {
  const Element* first;
  int64_t stride;
  HWY_INLINE const Element* row(int64_t j) const { return first + j * stride; }
  HWY_INLINE bool is_even(int64_t /*j*/, int64_t /*count*/) const { return true; }
};
// Or, of pages, each by itself, from row `origin` on; those of one page are `stride` apart.
template <class Element>
struct ListedRows {
  const Element* const* rows;
  int64_t stride, origin;
  HWY_INLINE const Element* row(int64_t j) const { return rows[j - origin]; }
  bool is_even(int64_t j, int64_t count) const {
    for (int64_t i = 1; i < count; ++i)
      if (row(j + i) != row(j + i - 1) + stride) return false;
    return true;
  }
};

// The scales of the rows of K or V of one head, from row `origin` on.
struct ListedScales {
  const float* of_rows = nullptr;  // null: 1
  int64_t origin = 0;
  HWY_INLINE float at(int64_t j) const { return of_rows ? of_rows[j - origin] : 1.f; }
};

// Keys [begin, end) of one head, a whole number of panels, as rows of `words` of the `all_words` of
// a key; those from `limit` on are zero. stage: kLanes rows of staging.
template <class Words, class Rows>
HWY_NOINLINE void pack_k(Rows k, int dim, int words, int all_words, int64_t begin, int64_t end,
                         int64_t limit, float* stage, float* out, ListedScales scales = {}) {
  using Element = typename Words::Element;
  constexpr bool kDirect = sizeof(Element) * Words::kElements == sizeof(float);
  const int stage_stride = round_up(words, kBlock);
  for (int64_t panel = begin; panel < end; panel += kPanel, out += int64_t{all_words} * kPanel) {
    for (int first = 0; first < kPanel; first += kLanes) {
      const int64_t key = panel + first;
      const float* rows = stage;
      int64_t rows_stride = stage_stride;
      if (kDirect && key + kLanes <= limit && dim == words * Words::kElements &&
          words % kBlock == 0 && k.stride % Words::kElements == 0 && k.is_even(key, kLanes)) {
        rows = reinterpret_cast<const float*>(k.row(key));
        rows_stride = k.stride / Words::kElements;
      } else {
        for (int i = 0; i < kLanes; ++i) {
          float* row = stage + i * stage_stride;
          if (key + i < limit)
            copy_row<Words>(k.row(key + i), dim, words, row, scales.at(key + i));
          else
            std::fill_n(row, words, 0.f);
        }
      }
      int w = 0;
      for (; w + kBlock <= words; w += kBlock)
        transpose(rows + w, rows_stride, out + w * kPanel + first);
      for (; w < words; ++w)
        for (int i = 0; i < kLanes; ++i) out[w * kPanel + first + i] = rows[i * rows_stride + w];
    }
  }
}

// Columns [0, dim) of keys [begin, end) of one head, where out holds `depth` words for every column
// and its word 0 is key `origin`; begin and end − origin are multiples of kElements; keys from
// `limit` on are zero. True if all values are finite.
template <class Words, class Rows>
HWY_NOINLINE bool pack_v(Rows v, int dim, int64_t origin, int64_t begin, int64_t end, int64_t limit,
                         int64_t depth, float* out, ListedScales scales = {}) {
  using Element = typename Words::Element;
  static constexpr Element kZeros[kMaxValueDim] = {};
  VecF not_finite[2] = {set(0.f), set(0.f)};  // NaN once a value was not finite
  for (int column = 0; column < dim; column += kPanel) {
    const int vectors = std::min(kPanelVectors, ceil_div(dim - column, kLanes));
    for (int64_t j = begin; j < end; j += Words::kElements) {
      const Element* row = (j < limit ? v.row(j) : kZeros) + column;
      const Element* next = (j + 1 < limit ? v.row(j + 1) : kZeros) + column;
      float* words = out + (j - origin) / Words::kElements * vectors * kLanes;
      const float scale = Words::kScaled && j < limit ? scales.at(j) : 1.f;
      for (int i = 0; i < vectors; ++i, row += kLanes, next += kLanes) {
        const int count = dim - column - i * kLanes;
        VecF word;
        if (count >= kLanes) {
          word = Words::load_across(row, next);
        } else {
          Element rest[2][kLanes] = {};
          std::copy_n(row, count, rest[0]);
          std::copy_n(next, count, rest[1]);
          word = Words::load_across(rest[0], rest[1]);
        }
        word = scaled<Words>(word, scale);
        hn::Store(word, F32(), words + i * kLanes);
        not_finite[i % 2] = Words::multiply_add(word, set(0.f), not_finite[i % 2]);
      }
    }
    out += depth * kPanel;
  }
  return hn::AllFalse(F32(), hn::IsNaN(hn::Add(not_finite[0], not_finite[1])));
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
