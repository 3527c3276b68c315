// SPDX-License-Identifier: Apache-2.0
// The rotation on the tensor cores: products with matrices of ±1, and sums between them. H of 2^n
// dimensions is a Kronecker product, and mma takes its steps of 1…16 columns at once.
#pragma once

#include "cuda/device/ptx/compiler.cuh"
#include "cuda/device/ptx/e4m3.cuh"
#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/words.cuh"
#include "cuda/quantize/elements.cuh"

namespace flash3::cuda {

inline constexpr int kChunk = 32;  // columns; each of four threads has eight of them

// Where a thread stores the codes of a block's rows, from its first eight columns on.
struct CodeOutput {
  unsigned char* first;
  long long stride;
  int count;

  __device__ __forceinline__ bool has(int row) const { return row < count; }
  __device__ __forceinline__ uint2* at(int row) const {
    return reinterpret_cast<uint2*>(first + unsigned(row) * stride);
  }
};

// The elements that a warp holds of a block's 128 rows: kTiles times 16 rows, in registers as mma
// takes its first operand. Lane l, with g = l / 4 and t = l % 4, holds columns 8t…8t + 7 of each
// chunk, in rows g and g + 8 of each tile.
template <Element kElement, int kDim>
struct WarpElements {
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kThreads = kDim <= 64 ? 64 : kDim <= 128 ? 128 : 256;  // of a block
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTiles = int(kScaleBlock) / 16 / kWarps;

  // Columns {0, 1} and {2, 3} of a thread's eight, then {4, 5} and {6, 7}, each in rows g and g
  // + 8.
  uint32_t a[kTiles][kChunks][2][4];

  static __device__ __forceinline__ int column() { return int(threadIdx.x % 4 * 8); }
  static __device__ __forceinline__ int row(int tile, int half) {
    return int(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) + tile * kWarps * 16 + half * 8;
  }

  // Rows past the last repeat the last one.
  __device__ __forceinline__ void load(const uint16_t* in, long long stride, int count) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint16_t* const from =
            in + unsigned(min(row(tile, half), count - 1)) * stride + column();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const uint4 x = __ldg(reinterpret_cast<const uint4*>(from + chunk * kChunk));
          uint32_t(&to)[2][4] = a[tile][chunk];
          to[0][half] = x.x, to[0][2 + half] = x.y, to[1][half] = x.z, to[1][2 + half] = x.w;
        }
      }
  }

  // Applies the signs D: bit i of signs[c] belongs to column i of chunk c.
  __device__ __forceinline__ void change_signs(const unsigned (&signs)[kRotationWords],
                                               bool rotates) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t bits = __byte_perm(rotates ? signs[chunk] : 0, 0, 0x4440u + threadIdx.x % 4);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        // Bit 2 · pair to bit 15, and the next one to bit 31; the eight of either do not meet.
        const uint32_t moved = bits * ((1u << 15 | 1u << 30) >> (2 * pair));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& x = a[tile][chunk][pair / 2][pair % 2 * 2 + half];
            x ^= moved & 0x80008000u;
            x = hide_from_optimizer(x);  // not beside what it was, for where there is no sign
          }
      }
    }
  }

  // The bits of the largest size of elements as they came.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t sizes = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kChunks * 8; ++i)
        sizes = larger_sizes(sizes, a[tile][i / 8][i / 4 % 2][i % 4]);
    return __float_as_uint(to_float<kElement>(uint16_t(max(sizes & 0xFFFFu, sizes >> 16))));
  }

  // Stores the codes of elements as they came.
  __device__ __forceinline__ void store(float factor, const CodeOutput& to) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!to.has(row(tile, half))) continue;
        uint2* const out = to.at(row(tile, half));
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const uint32_t(&x)[2][4] = a[tile][chunk];
          const auto word = [&](const uint32_t(&of)[4]) {
            return to_e4m3(low_float<kElement>(of[half]), high_float<kElement>(of[half]),
                           low_float<kElement>(of[2 + half]), high_float<kElement>(of[2 + half]),
                           factor);
          };
          out[chunk * kChunk / 8] = {word(x[0]), word(x[1])};
        }
      }
  }
};

// H's entries for the lanes of a warp: ±2^-4, two in a register. That is the smallest factor of any
// rotation, so that a sum overflows only where the result does. A set of columns takes four
// registers, for a thread's pairs of columns {0, 1}, {2, 3}, {4, 5} and {6, 7} of eight.
struct HadamardEntries {
  uint4 of[8][32];  // four pairs of columns of the result, then the same negated

  template <Element kElement>
  __device__ __forceinline__ void fill() {
    constexpr uint32_t kEntry = kElement == Element::kFloat16 ? 0x2C002C00u : 0x3D803D80u;
    // The entries of rows {2t, 2t + 1} and column g in mma's numbers, which are columns 8t + {0, 1}
    // and 8 (g / 2) + g % 2 of the chunk. An entry is negative if both share an odd number of bits.
    const uint32_t t = threadIdx.x % 4, g = threadIdx.x % 32 / 4, both = t & (g / 2);
    const uint32_t odd = (both ^ both >> 1) & 1, high = odd ^ (g & 1);
    const uint32_t entry = kEntry ^ odd << 15 ^ high << 31;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t x = i < 4 ? entry : entry ^ 0x80008000u;
      const uint32_t by1 = i % 2 != 0 ? 0x80008000u : 0, by2 = i / 2 % 2 != 0 ? 0x80008000u : 0;
      of[i][threadIdx.x % 32] = {x, x ^ by1, x ^ by2, x ^ by1 ^ by2};
    }
  }
  // Loads them each time again: registers are short, and mma wants them side by side.
  __device__ __forceinline__ void load(int pair, bool negated, uint32_t (&b)[2][2]) const {
    const uint4* const from = &of[pair + (negated ? 4 : 0)][threadIdx.x % 32];
    load_shared_volatile(from, b);
  }
};

// Rotates a warp's elements each time again: there are no registers to keep the result.
template <Element kElement, int kDim>
struct WarpRotation {
  using Elements = WarpElements<kElement, kDim>;
  static constexpr int kChunks = Elements::kChunks;
  static_assert(kChunks <= 4 || kChunks % 2 == 0, "chunks are taken two by two");
  // 2: the products also take the step between neighbouring chunks, and registers hold half the
  // sums at a time. A loop of one pair at a time keeps the compiler from more than fits registers.
  static constexpr int kStep = kChunks > 4 ? 2 : 1, kSums = kChunks / kStep;
  static constexpr int kPairsAtOnce = kChunks > 6 ? 1 : 4;

  const HadamardEntries& entries;

  // Whether the transform of a chunk has steps of `step` chunks.
  static __device__ __forceinline__ constexpr bool joins(int chunk, int step) {
    return chunk * kChunk < (kDim & -(2 * step * kChunk));
  }
  // 16 times the factor of the transform that a chunk is in.
  static __device__ __forceinline__ float factor(int chunk) {
    return 16.f * rotation_factor(kDim, chunk * kChunk);
  }

  // y[i]: sums of 2^-4 of the elements, for columns 8t + 2 · pair + {0, 1} of chunk kStep · i +
  // first and rows g and g + 8. kLast: with the last step.
  template <bool kLast>
  __device__ __forceinline__ void sums(const uint32_t (&a)[kChunks][2][4], int first, int pair,
                                       float (&y)[kSums][4]) const {
    const auto add = [&](float(&d)[4], int chunk, const uint32_t(&b)[2][2], bool begins) {
      const float zeros[4] = {};
      if (begins)
        mma_m16n8k16<kElement>(d, a[chunk][0], b[0], zeros);
      else
        mma_m16n8k16<kElement>(d, a[chunk][0], b[0], d);
      mma_m16n8k16<kElement>(d, a[chunk][1], b[1], d);
    };
    uint32_t b[2][2];
    entries.load(pair, first == 1, b);
#pragma unroll
    for (int i = 0; i < kSums; ++i) add(y[i], kStep * i + first, b, true);
    if constexpr (kStep == 2) {
      if (first == 1) entries.load(pair, false, b);
#pragma unroll
      for (int i = 0; i < kSums; ++i) add(y[i], kStep * i + 1 - first, b, false);
    }
#pragma unroll
    for (int step = kStep; step < kChunks; step *= 2)
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if ((i & (step / kStep)) == 0 && joins(kStep * i + first, step) &&
            (kLast || joins(kStep * i + first, 2 * step)))
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float &p = y[i][j], &q = y[i + step / kStep][j];
            const float sum = p + q;
            q = p - q;
            p = sum;
          }
  }

  __device__ __forceinline__ float largest(const Elements& elements) const {
    uint32_t sizes[kChunks] = {};  // bits, which without a sign are in the order of the values
#pragma unroll
    for (int tile = 0; tile < Elements::kTiles; ++tile)
#pragma unroll
      for (int first = 0; first < kStep; ++first)
#pragma unroll kPairsAtOnce
        for (int pair = 0; pair < 4; ++pair) {
          float y[kSums][4];
          sums<false>(elements.a[tile], first, pair, y);
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            const int chunk = kStep * i + first;
            // The larger of |p + q| and |p − q|, the last step, is |p| + |q|.
            int last = 0;
#pragma unroll
            for (int step = kStep; step < kChunks; step *= 2)
              if (joins(chunk, step)) last = step;
            if ((chunk & last) != 0) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float size = fabsf(y[i][j]);
              if (last != 0) size += fabsf(y[i + last / kStep][j]);
              sizes[chunk] = max(sizes[chunk], __float_as_uint(size));
            }
          }
        }
    float largest = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      largest = larger_size(largest, __uint_as_float(sizes[chunk]) * factor(chunk));
    return largest;
  }

  __device__ __forceinline__ void store(const Elements& elements, float scale,
                                        const CodeOutput& to) const {
#pragma unroll
    for (int tile = 0; tile < Elements::kTiles; ++tile)
#pragma unroll
      for (int first = 0; first < kStep; ++first) {
        uint16_t low[kSums][2];
        uint2 codes[kSums][2] = {};
#pragma unroll kPairsAtOnce
        for (int pair = 0; pair < 4; ++pair) {
          float y[kSums][4];
          sums<true>(elements.a[tile], first, pair, y);
#pragma unroll
          for (int i = 0; i < kSums; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float by = scale * factor(kStep * i + first);
              const uint16_t two = pack2_e4m3(y[i][2 * half] * by, y[i][2 * half + 1] * by);
              uint2& to = codes[i][half];
              if constexpr (kPairsAtOnce == 1)
                to = {__byte_perm(to.x, to.y, 0x5432), __byte_perm(to.y, two, 0x5432)};
              else if (pair % 2 == 0)
                low[i][half] = two;
              else
                to = {to.y, pack2(low[i][half], two)};
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = Elements::row(tile, half);
          if (!to.has(row)) continue;
          uint2* const out = to.at(row);
#pragma unroll
          for (int i = 0; i < kSums; ++i) out[(kStep * i + first) * kChunk / 8] = codes[i][half];
        }
      }
  }
};

}  // namespace flash3::cuda
