// SPDX-License-Identifier: Apache-2.0
// Which keys of a tile a thread's two rows see under the lists of a mask (core/mask_lists.hpp).
#pragma once

#include "core/mask_lists.hpp"
#include "cuda/device/score/mask.cuh"
#include "cuda/sm90/device/mask_tile.cuh"

namespace flash3::cuda::sm90 {

// Where a thread finds what its two rows see, in each work tile.
struct RowsOfMask {
  const MaskRange* range;  // of its first row, in the first range; the second row is 8 rows on
  const unsigned* words;   // of the thread, in the first slot

  // of: the first row of the work tile, the thread's first row in it, the thread among those of two
  // warpgroups.
  __device__ __forceinline__ RowsOfMask(const MaskMemory& mask, int batch, int head, int first_row,
                                        int row, int thread)
      : range(mask.range(0, batch, head, first_row + row)), words(mask.words + thread) {}

  // Those of both rows, as begin and end.
  __device__ __forceinline__ void read_ranges(const MaskMemory& mask, int which, uint2& upper,
                                              uint2& lower) const {
    const MaskShape& shape = mask.shape;
    const auto* at =
        reinterpret_cast<const uint2*>(range + which * (shape.batch * shape.heads * shape.rows()));
    upper = __ldg(at), lower = __ldg(at + 8);
  }
};

// Rows that see the keys whose bits are set, of which a word has 16 of each row: those of its
// second row come after those of the first.
struct BitMask {
  const uint32_t (&words)[2];

  template <int N>
  __device__ __forceinline__ void apply(const QueriesByKeys<N>&, float (&r_s)[N]) const {
    using View = QueriesByKeys<N>;
    static_assert(View::kKeys <= 32);
#pragma unroll
    for (int r = 0; r < View::kRows; ++r)
#pragma unroll
      for (int k = 0; k < View::kKeys; ++k) {
        float& x = View::at(r_s, r, k);
        x = words[k / 16] & 1u << (16 * r + k % 16) ? x : -kInfinity;
      }
  }
};

static_assert(ScoreMask<BitMask, QueriesByKeys<8>>);

// The 16 keys of a thread from this one on, by the range of a row.
__device__ __forceinline__ uint32_t seen_of(const uint2& range, int key) {
  return keys_before<16>(int(range.y) - key) & ~keys_before<16>(int(range.x) - key);
}

// What a thread's two rows see of a key tile. It is read while the scores are under way.
struct SeenKeys {
  int tile = 0;                   // the key tile
  bool masked = false;            // else all is seen
  bool by_bits = false;           // else by ranges
  uint32_t a[2] = {}, b[2] = {};  // words of bits in a; or the begins and ends of the two ranges

  template <int kTileN>
  __device__ __forceinline__ void read(const MaskMemory& mask, const RowsOfMask& rows,
                                       const MaskTile& listed, int warpgroup) {
    tile = listed.tile();
    masked = listed.kind() != kMaskFull;
    by_bits = listed.kind() != kMaskRange;
    if (!masked) return;
    if (listed.kind() == kMaskQuarters) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[half] = listed.sees(warpgroup, kTileN == kMaskBlock ? half : tile % 2) ? ~0u : 0;
      if constexpr (kTileN < kMaskBlock) masked = a[0] == 0;
    } else if (by_bits) {
      // 64 keys have 256 words, one of each thread.
      const unsigned* const words = rows.words + (long long)listed.data * kMaskWords;
      if constexpr (kTileN == kMaskBlock) {
        a[0] = __ldg(words), a[1] = __ldg(words + 256);
      } else {
        static_assert(2 * kTileN == kMaskBlock);
        a[0] = __ldg(words + tile % 2 * 256);
      }
    } else {
      uint2 upper, lower;
      rows.read_ranges(mask, listed.data, upper, lower);
      a[0] = upper.x, a[1] = upper.y, b[0] = lower.x, b[1] = lower.y;
    }
  }

  // By bits, whatever tells: one instruction makes seven predicates of them.
  template <class View>
  __device__ __forceinline__ void apply(const View& view, typename View::Scores& r_s) const {
    uint32_t words[2] = {a[0], a[1]};
    if (!by_bits) {
#pragma unroll
      for (int half = 0; half < View::kKeys / 16; ++half) {
        const int key = view.key(16 * half);
        words[half] = seen_of({a[0], a[1]}, key) | seen_of({b[0], b[1]}, key) << 16;
      }
    }
    BitMask{words}.apply(view, r_s);
  }
};

}  // namespace flash3::cuda::sm90
