// SPDX-License-Identifier: Apache-2.0
// The matrix products of packed operands on AMX tiles. The layouts are those of Bf16Words as they
// are: rows of Q and of weights are rows of a left tile, and what pack_k and pack_v write, pairs of
// bfloat16 along the summed dimension, is the order of a right tile. Only the summed dimension must
// be whole tiles; its padding is zero on both sides.

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// bfloat16 as before, with strips of two tiles of rows and a depth of whole tiles.
struct AmxWords : Bf16Words {
  static constexpr int kStripRows = 2 * kTileRows;
  static constexpr int kDepth = kTileWords;
  using Unit = Tiles;
};

// Tiles 0 to 3: sums, [rows][columns]. 4 and 5: rows of a. 6 and 7: columns of b.

// sums = a·b for a strip and kColumnTiles tiles of columns. depth: words, whole tiles of them.
template <int kColumnTiles>
HWY_INLINE void multiply_tiles(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                               int64_t depth) {
  static_assert(kColumnTiles == 1 || kColumnTiles == 2);
  tile_zero<0>();
  tile_zero<2>();
  if constexpr (kColumnTiles == 2) {
    tile_zero<1>();
    tile_zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kTileWords) {
    tile_load<6>(b + k * b_stride, b_stride);
    tile_load<4>(a + k, a_stride);
    tile_dpbf16<0, 4, 6>();
    tile_load<5>(a + kTileRows * a_stride + k, a_stride);
    tile_dpbf16<2, 5, 6>();
    if constexpr (kColumnTiles == 2) {
      tile_load<7>(b + k * b_stride + kTileWords, b_stride);
      tile_dpbf16<1, 4, 7>();
      tile_dpbf16<3, 5, 7>();
    }
  }
}

template <int kColumnTiles>
HWY_INLINE void store_tiles(float* c, int64_t stride) {
  tile_store<0>(c, stride);
  tile_store<2>(c + kTileRows * stride, stride);
  if constexpr (kColumnTiles == 2) {
    tile_store<1>(c + kTileWords, stride);
    tile_store<3>(c + kTileRows * stride + kTileWords, stride);
  }
}

// c = c·scale[row] + a·b.
template <int kColumnTiles>
HWY_INLINE void add_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            int64_t depth, const float* scale, float* c, int64_t c_stride) {
  constexpr int kColumns = kColumnTiles * kTileWords;
  alignas(64) float product[AmxWords::kStripRows][kColumns];
  multiply_tiles<kColumnTiles>(a, a_stride, b, b_stride, depth);
  store_tiles<kColumnTiles>(product[0], kColumns);
  for (int r = 0; r < AmxWords::kStripRows; ++r, c += c_stride) {
    const VecF factor = set(scale[r]);
    for (int i = 0; i < kColumns; i += kLanes)
      hn::Store(hn::MulAdd(hn::Load(F32(), c + i), factor, hn::Load(F32(), product[r] + i)), F32(),
                c + i);
  }
}

template <>
void packed_scores<AmxWords>(const float* q, int q_words, const float* k, int vectors,
                             float* scores, int64_t scores_stride) {
  for (int i = 0; i < vectors; i += 2) {
    // Two tiles of keys even if one is wanted: panels and rows of scores hold an even number.
    const float* keys = k + i / kPanelVectors * int64_t{q_words} * kPanel;
    multiply_tiles<2>(q, q_words, keys + i % kPanelVectors * kLanes, kPanel, q_words);
    store_tiles<2>(scores + i * kLanes, scores_stride);
  }
}

template <>
void packed_values<AmxWords>(const float* weights, int64_t weights_stride, const float* v,
                             int64_t panel_depth, int64_t first, int64_t depth, int vectors,
                             const float* scale, float* out) {
  const int out_stride = vectors * kLanes;
  for (; vectors > 0; vectors -= kPanelVectors, v += panel_depth * kPanel, out += kPanel) {
    const int now = std::min(vectors, kPanelVectors), stride = now * kLanes;
    for (int i = 0; i < now; i += 2) {
      const float* values = v + first * stride + i * kLanes;
      if (i + 1 < now)
        add_product<2>(weights + first, weights_stride, values, stride, depth, scale,
                       out + i * kLanes, out_stride);
      else
        add_product<1>(weights + first, weights_stride, values, stride, depth, scale,
                       out + i * kLanes, out_stride);
    }
  }
}

// c += a·b for the first `rows` rows.
template <int kColumnTiles>
HWY_INLINE void add_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                         int64_t depth, int rows, float* c, int64_t c_stride) {
  constexpr int kColumns = kColumnTiles * kTileWords;
  alignas(64) float product[AmxWords::kStripRows][kColumns];
  multiply_tiles<kColumnTiles>(a, a_stride, b, b_stride, depth);
  store_tiles<kColumnTiles>(product[0], kColumns);
  for (int r = 0; r < std::min(rows, AmxWords::kStripRows); ++r, c += c_stride)
    for (int i = 0; i < kColumns; i += kLanes)
      hn::Store(hn::Add(hn::Load(F32(), c + i), hn::Load(F32(), product[r] + i)), F32(), c + i);
}

template <>
void packed_sum<AmxWords>(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          int64_t depth, int vectors, int rows, float* c, int64_t c_stride) {
  for (int i = 0; i < vectors; i += 2) {
    const float* columns = b + i * kLanes;
    if (i + 1 < vectors)
      add_rows<2>(a, a_stride, columns, b_stride, depth, rows, c + i * kLanes, c_stride);
    else
      add_rows<1>(a, a_stride, columns, b_stride, depth, rows, c + i * kLanes, c_stride);
  }
}

static_assert(kLanes == kTileWords && kPanelVectors % 2 == 0);

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
