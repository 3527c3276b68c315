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

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
