// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX: eight of 16 rows × 64 bytes. A row holds 16 float sums, or 16 words of
// two bfloat16. These few functions are all that the kernel knows of them, so that a test can build
// it with an emulation of them (FLASH3_EMULATE_AMX) for machines without AMX.
#if defined(FLASH3_EMULATE_AMX)
#include <stdexcept>
#endif

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // of a row

#if !defined(FLASH3_EMULATE_AMX)

// Assembly rather than the compiler's intrinsics: gcc's do not tell it that they touch memory.

// The tiles belong to the thread while this lives. Released, they cost context switches nothing.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kTileWords * 4;
      config.rows[i] = kTileRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
HWY_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// stride: words from row to row.
template <int kTile>
HWY_INLINE void tile_load(const float* words, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(words), "r"(stride * 4), "i"(kTile)
               : "memory");
}
template <int kTile>
HWY_INLINE void tile_store(float* words, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(words), "r"(stride * 4), "i"(kTile)
               : "memory");
}
// sum[row][column] += Σ over words, of the products of both halves of a[row][word] and
// b[word][column].
template <int kSum, int kA, int kB>
HWY_INLINE void tile_dpbf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

#else  // the same in memory, rounded in the order that Intel documents

thread_local float emulated_tiles[8][kTileRows][kTileWords];
thread_local bool tiles_are_configured = false;

class Tiles {
 public:
  Tiles() {
    tiles_are_configured = true;
    std::fill_n(&emulated_tiles[0][0][0], 8 * kTileRows * kTileWords, 0.f);
  }
  ~Tiles() { tiles_are_configured = false; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// What the processor answers with an undefined instruction.
template <int kTile>
auto& emulated_tile() {
  static_assert(kTile >= 0 && kTile < 8);
  if (!tiles_are_configured) throw std::logic_error("a tile is used while none are configured");
  return emulated_tiles[kTile];
}

template <int kTile>
void tile_zero() {
  std::fill_n(&emulated_tile<kTile>()[0][0], kTileRows * kTileWords, 0.f);
}
template <int kTile>
void tile_load(const float* words, int64_t stride) {
  auto& tile = emulated_tile<kTile>();
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(tile[r], words + r * stride, sizeof tile[r]);  // bits: no float may pass through
}
template <int kTile>
void tile_store(float* words, int64_t stride) {
  const auto& tile = emulated_tile<kTile>();
  for (int r = 0; r < kTileRows; ++r) std::memcpy(words + r * stride, tile[r], sizeof tile[r]);
}

// Half 0 or 1 of a word; denormal numbers count as zero.
HWY_INLINE float half_of_word(uint32_t word, int half) {
  const uint32_t bits = half ? word & 0xFFFF0000u : word << 16;
  return std::bit_cast<float>((bits & 0x7F800000u) ? bits : bits & 0x80000000u);
}

template <int kSum, int kA, int kB>
void tile_dpbf16() {
  static_assert(kSum != kA && kSum != kB && kA != kB);  // else undefined instruction
  auto& sum = emulated_tile<kSum>();
  uint32_t a[kTileRows][kTileWords], b[kTileRows][kTileWords];
  std::memcpy(a, emulated_tile<kA>(), sizeof a);
  std::memcpy(b, emulated_tile<kB>(), sizeof b);
  for (int r = 0; r < kTileRows; ++r) {
    float halves[2][kTileWords] = {};
    for (int w = 0; w < kTileWords; ++w)
      for (int half = 0; half < 2; ++half) {
        const float factor = half_of_word(a[r][w], half);
        for (int c = 0; c < kTileWords; ++c)
          halves[half][c] = std::fma(factor, half_of_word(b[w][c], half), halves[half][c]);
      }
    for (int c = 0; c < kTileWords; ++c) sum[r][c] += halves[0][c] + halves[1][c];
  }
}

#endif

// The matrix products of packed operands on AMX tiles. The layouts are those of Bf16Words as they
// are: rows of Q and of weights are rows of a left tile, and what pack_k and pack_v write, pairs of
// bfloat16 along the summed dimension, is the order of a right tile. Only the summed dimension must
// be whole tiles; its padding is zero on both sides.

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
