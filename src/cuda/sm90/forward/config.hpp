// SPDX-License-Identifier: Apache-2.0
// A row of the forward's tile table (tile_table.hpp), and what follows from it for its kernel.
// constexpr and NVRTC-clean: host and kernels have it alike.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

// Columns of FP8's transposed tile of V: 16-byte pieces are swizzled in groups of four or eight.
FLASH3_HOST_DEVICE constexpr int transposed_v_cols(int tile_n) { return round_up(tile_n, 64); }

// What Q, K and V are: float16 or bfloat16; FP8; or FP8 keys and values under a Q of 16 bits, which
// become 16-bit on their way to the tensor cores.
enum class Operands { k16Bit, kE4m3, kWidened };

// Registers a thread after setmaxnreg. Together at most what the block was launched with: a
// warpgroup that asks for more waits for ever.
struct RegisterSplit {
  int producer, consumer;
};

FLASH3_HOST_DEVICE constexpr RegisterSplit register_split(bool more_for_producer, int warpgroups) {
  if (warpgroups == 3) return {32, 160};
  if (more_for_producer) return warpgroups == 2 ? RegisterSplit{40, 232} : RegisterSplit{32, 112};
  return warpgroups == 2 ? RegisterSplit{24, 240} : RegisterSplit{24, 112};
}

// One kernel: scores are computed in tiles of tile_m queries × tile_n keys by `warpgroups` consumer
// warpgroups of 64 queries each; K and V each travel through a ring of `stages` tiles.
struct ForwardConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  bool band = false;   // masks by the band; otherwise only the end of the keys
  bool lists = false;  // walks the lists of a mask (load_lists.cuh)
  ScoreKind score = ScoreKind::kPlain;
  BiasTerms terms = BiasTerms::kNone;
  Operands operands = Operands::k16Bit;
  bool paged = false;  // a table may tell where keys lie (load_pages.cuh, load_fp8_pages.cuh)
  bool split = false;  // several blocks may share the keys of a work tile (split.cuh)
  int tile_n = 0;
  int warpgroups = 0;
  int stages = 0;
  int q_stages = 0;        // 2: Q of the next work tile loads while this one runs
  int raw_v_stages = 0;    // FP8: V as it comes, before it is transposed; one: in two parts
  int raw_stages = 0;      // widened: K and V as they come, half a tile each
  bool two_level = false;  // FP8: O is summed up in float32 too (output_sums.cuh)
  // Time on one multiprocessor, fitted to measurements: of a key tile, and of what each work tile
  // adds to its key tiles (the first loads and scores, the masks, the last P·V, the store; less the
  // key tiles that warpgroups skip).
  double key_tile_us = 0;
  double tile_us = 0;

  // The row without what its machine code does not depend on: the type of its kernels.
  FLASH3_HOST_DEVICE constexpr ForwardConfig compiled() const {
    ForwardConfig c = *this;
    c.key_tile_us = c.tile_us = 0;
    return c;
  }

  FLASH3_HOST_DEVICE constexpr bool fp8() const { return operands == Operands::kE4m3; }
  FLASH3_HOST_DEVICE constexpr bool holds(Element element) const {
    return fp8() == (element == Element::kE4m3);
  }
  FLASH3_HOST_DEVICE constexpr bool widened() const { return operands == Operands::kWidened; }
  FLASH3_HOST_DEVICE constexpr int element_bytes() const { return fp8() ? 1 : 2; }

  // Parts in which a tile of V comes: with room for one tile alone, one part of it is loaded while
  // the other is transposed.
  FLASH3_HOST_DEVICE constexpr int raw_v_parts() const { return raw_v_stages == 1 ? 2 : 1; }

  // Tiles of a bias of each pair come beside those of K (tile_bias.cuh).
  FLASH3_HOST_DEVICE constexpr bool bias_tiles() const {
    const bool any = terms == BiasTerms::kAny && head_dim <= 128 && !paged && !lists && !fp8();
    return terms == BiasTerms::kPairs || any;
  }

  FLASH3_HOST_DEVICE constexpr int tile_m() const { return 64 * warpgroups; }
  FLASH3_HOST_DEVICE constexpr int threads() const { return 128 * (warpgroups + 1); }
  FLASH3_HOST_DEVICE constexpr int accumulators() const { return (tile_n + head_dim_v) / 2; }
  // FP8's producer transposes V as well, and where keys lie in pages it looks them up; another
  // widens K and V; a split kernel's finds and awaits splits; one walks lists over pages.
  FLASH3_HOST_DEVICE constexpr bool needs_producer_registers() const {
    return split || widened() || (lists && paged) || (fp8() && (paged || accumulators() < 160));
  }
  FLASH3_HOST_DEVICE constexpr int producer_registers() const {
    return register_split(needs_producer_registers(), warpgroups).producer;
  }
  FLASH3_HOST_DEVICE constexpr int consumer_registers() const {
    return register_split(needs_producer_registers(), warpgroups).consumer;
  }
  // What the block starts with: the launch bound's share, which ptxas reports.
  FLASH3_HOST_DEVICE constexpr int launch_registers() const { return 65536 / threads() / 8 * 8; }

  // Keys that are loaded at once where they are widened, and their bytes.
  FLASH3_HOST_DEVICE constexpr int raw_rows() const { return tile_n / 2; }
  FLASH3_HOST_DEVICE constexpr int raw_bytes() const { return raw_rows() * head_dim; }
  // FP8: whether each row of Q has a scale of its own, so that rows may be of several heads
  // (HeadPack). Otherwise a warpgroup's rows have one.
  FLASH3_HOST_DEVICE constexpr bool row_scales() const { return fp8() && paged; }
  // Bytes of the second level of sums; they lie in shared memory if they fit (output_sums.cuh).
  FLASH3_HOST_DEVICE constexpr int sums_bytes() const { return tile_m() * head_dim_v * 4; }
};

}  // namespace flash3::cuda::sm90
