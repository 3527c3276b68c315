// SPDX-License-Identifier: Apache-2.0
// The matrix products. Packed operands, for many rows: 6 rows at a time against panels of columns.
// Few rows, as when decoding: packing would cost more than it saves, and K and V are read where
// they lie.

// Unrolled early, so that arrays of vectors live in registers from the start.
#if defined(__clang__)
#define FLASH3_UNROLL _Pragma("unroll")
#else
#define FLASH3_UNROLL _Pragma("GCC unroll 16")
#endif

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// What becomes of the old content of the result.
enum class Into { kFresh, kAdded, kScaled };

// Rows of the left operand: word k of row r. Transposed where they lie as columns.
struct PackedRows {
  const float* words;
  int64_t stride;
  HWY_INLINE float word(int r, int64_t k) const { return words[r * stride + k]; }
  PackedRows from(int64_t r, int64_t k) const { return {words + r * stride + k, stride}; }
};
struct TransposedRows {
  const float* words;
  int64_t stride;
  HWY_INLINE float word(int r, int64_t k) const { return words[k * stride + r]; }
  TransposedRows from(int64_t r, int64_t k) const { return {words + k * stride + r, stride}; }
};

// Columns of the right operand: vector i of word k.
struct PackedColumns {
  const float* words;
  int64_t stride;
  HWY_INLINE VecF load_vector(int64_t k, int i) const {
    return hn::Load(F32(), words + k * stride + i * kLanes);
  }
};

// Rows of V in place, from row `first` on; word k is made of row k, or of rows 2k and 2k + 1.
template <class Words, class Rows>
struct RowsInPlace {
  Rows rows;
  int64_t first;
  int column;
  HWY_INLINE VecF load_vector(int64_t k, int i) const {
    const int64_t row = first + k * Words::kElements;
    const int at = column + i * kLanes;
    return Words::load_across(rows.row(row) + at, rows.row(row + Words::kElements - 1) + at);
  }
};

// c = a·b (kFresh), c + a·b (kAdded) or c·scale[row] + a·b (kScaled) for kRows rows and kVectors
// vectors of columns: the accumulators stay in registers. They start from zero and join the old
// content at the end, which keeps the rounding of a long sum to that of its tiles.
template <class Words, Into kInto, int kRows, int kVectors, class Rows, class Columns>
HWY_NOINLINE void multiply_block(Rows a, Columns b, int64_t depth, const float* scale, float* c,
                                 int64_t c_stride) {
  VecF sum[kRows][kVectors];
  FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
    FLASH3_UNROLL for (int i = 0; i < kVectors; ++i) { sum[r][i] = hn::Zero(F32()); }
  }
  for (int64_t k = 0; k < depth; ++k) {
    VecF column[kVectors];
    FLASH3_UNROLL for (int i = 0; i < kVectors; ++i) { column[i] = b.load_vector(k, i); }
    FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto element = set(a.word(r, k));
      FLASH3_UNROLL for (int i = 0; i < kVectors; ++i) {
        sum[r][i] = Words::multiply_add(element, column[i], sum[r][i]);
      }
    }
  }
  FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
    FLASH3_UNROLL for (int i = 0; i < kVectors; ++i) {
      float* at = c + r * c_stride + i * kLanes;
      if constexpr (kInto == Into::kScaled)
        sum[r][i] = hn::MulAdd(hn::Load(F32(), at), set(scale[r]), sum[r][i]);
      if constexpr (kInto == Into::kAdded) sum[r][i] = hn::Add(hn::Load(F32(), at), sum[r][i]);
      hn::Store(sum[r][i], F32(), at);
    }
  }
}

// The same for `vectors` vectors of columns, at most a panel.
template <class Words, Into kInto, int kRows, class Rows, class Columns>
HWY_INLINE void multiply_columns(Rows a, Columns b, int64_t depth, int vectors, const float* scale,
                                 float* c, int64_t c_stride) {
  if (vectors == kPanelVectors)
    return multiply_block<Words, kInto, kRows, kPanelVectors>(a, b, depth, scale, c, c_stride);
  if constexpr (kPanelVectors == 4) {
    if (vectors == 3)
      return multiply_block<Words, kInto, kRows, 3>(a, b, depth, scale, c, c_stride);
    if (vectors == 2)
      return multiply_block<Words, kInto, kRows, 2>(a, b, depth, scale, c, c_stride);
  }
  multiply_block<Words, kInto, kRows, 1>(a, b, depth, scale, c, c_stride);
}

// scores = q·kᵀ for one strip, from packed K: its first `vectors` vectors of keys.
template <class Words>
void packed_scores(const float* q, int q_words, const float* k, int vectors, float* scores,
                   int64_t scores_stride) {
  for (; vectors > 0; vectors -= kPanelVectors, k += int64_t{q_words} * kPanel, scores += kPanel)
    multiply_columns<Words, Into::kFresh, Words::kStripRows>(
        PackedRows{q, q_words}, PackedColumns{k, kPanel}, q_words, std::min(vectors, kPanelVectors),
        nullptr, scores, scores_stride);
}

// out = out·scale + weights·v for one strip, from packed V: words [first, first + depth) of the
// panel_depth that it holds for each of its `vectors` vectors of columns.
template <class Words>
void packed_values(const float* weights, int64_t weights_stride, const float* v,
                   int64_t panel_depth, int64_t first, int64_t depth, int vectors,
                   const float* scale, float* out) {
  const int out_stride = vectors * kLanes;
  for (; vectors > 0; vectors -= kPanelVectors, v += panel_depth * kPanel, out += kPanel) {
    const int now = std::min(vectors, kPanelVectors), stride = now * kLanes;
    multiply_columns<Words, Into::kScaled, Words::kStripRows>(
        PackedRows{weights + first, weights_stride}, PackedColumns{v + first * stride, stride},
        depth, now, scale, out, out_stride);
  }
}

// c += a·b for one strip of packed rows and at most a panel of packed columns. Not more than `rows`
// rows of c are written if the strip is longer than kVectorRows.
template <class Words>
void packed_sum(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                int vectors, [[maybe_unused]] int rows, float* c, int64_t c_stride) {
  multiply_columns<Words, Into::kAdded, Words::kStripRows>(
      PackedRows{a, a_stride}, PackedColumns{b, b_stride}, depth, vectors, nullptr, c, c_stride);
}

#if HWY_TARGET != HWY_SCALAR
// Adds the 128-bit blocks of a vector.
template <class D>
HWY_INLINE auto add_blocks(D /*tag*/, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == kBlock) {
    return v;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

// The sums of the lanes of four vectors.
HWY_INLINE void store_sums(const VecF (&v)[4], float* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) out[i] = hn::GetLane(v[i]);
#else
  const F32 d;
  const auto ac = hn::Add(hn::InterleaveLower(d, v[0], v[2]), hn::InterleaveUpper(d, v[0], v[2]));
  const auto bd = hn::Add(hn::InterleaveLower(d, v[1], v[3]), hn::InterleaveUpper(d, v[1], v[3]));
  const auto abcd = hn::Add(hn::InterleaveLower(d, ac, bd), hn::InterleaveUpper(d, ac, bd));
  hn::StoreU(add_blocks(d, abcd), hn::CappedTag<float, 4>(), out);
#endif
}

// scores[r][j] = q[r]·k[first + j], or that more (kAdded), for kRows rows and `count` keys in
// place, the first `words` of a row of q. Whole vectors only. Writes scores in fours.
template <class Words, Into kInto, int kRows, class Rows>
HWY_NOINLINE void scores_in_place(const float* q, int q_stride, int words, Rows k, int64_t first,
                                  int64_t count, float* scores, int64_t scores_stride) {
  for (int64_t j = 0; j < count; j += 4) {
    const typename Words::Element* key[4];
    for (int i = 0; i < 4; ++i) key[i] = k.row(first + std::min(j + i, count - 1));
    VecF sum[kRows][4];
    FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
      FLASH3_UNROLL for (int i = 0; i < 4; ++i) { sum[r][i] = hn::Zero(F32()); }
    }
    for (int w = 0; w < words; w += kLanes) {
      VecF of_key[4];
      FLASH3_UNROLL for (int i = 0; i < 4; ++i) {
        of_key[i] = Words::load_along(key[i] + w * Words::kElements);
      }
      FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
        const auto element = hn::LoadU(F32(), q + r * q_stride + w);
        FLASH3_UNROLL for (int i = 0; i < 4; ++i) {
          sum[r][i] = Words::multiply_add(element, of_key[i], sum[r][i]);
        }
      }
    }
    FLASH3_UNROLL for (int r = 0; r < kRows; ++r) {
      float* at = scores + r * scores_stride + j;
      if constexpr (kInto == Into::kAdded) {
        float sums[4];
        store_sums(sum[r], sums);
        for (int i = 0; i < 4; ++i) at[i] += sums[i];
      } else {
        store_sums(sum[r], at);
      }
    }
  }
}

// out = out·scale + weights·v for kRows rows, V in place from row `first` on. Whole vectors only.
template <class Words, int kRows, class Rows>
void values_in_place(const float* weights, int64_t weights_stride, Rows v, int64_t first,
                     int64_t depth, int vectors, const float* scale, float* out) {
  const int out_stride = vectors * kLanes;
  for (int column = 0; column < out_stride; column += kPanel, out += kPanel)
    multiply_columns<Words, Into::kScaled, kRows>(
        PackedRows{weights, weights_stride}, RowsInPlace<Words, Rows>{v, first, column}, depth,
        std::min(vectors - column / kLanes, kPanelVectors), scale, out, out_stride);
}

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
