// SPDX-License-Identifier: Apache-2.0
// Which words an instruction set computes a task of attention-inl.hpp in, and what the task has in
// its thread's scratch.

HWY_BEFORE_NAMESPACE();
namespace flash3::cpu {
namespace {

// Calls what(Words) for the words in which this instruction set computes these dtypes.
template <class What>
auto with_words([[maybe_unused]] const ForwardProblem& p, const What& what) {
#if defined(FLASH3_AMX)
  return what(AmxWords());
#else
  if (p.has_fp8_keys() && p.dtype == FLASH3_FLOAT16) return what(Fp8KeyWords<Fp16>());
  if (p.has_fp8_keys() && p.dtype == FLASH3_BFLOAT16) return what(Fp8KeyWords<Bf16>());
  switch (p.dtype) {
    case FLASH3_FLOAT16: return what(FloatWords<Fp16>());
#if defined(FLASH3_NATIVE_BF16)
    case FLASH3_BFLOAT16: return what(Bf16Words());
#else
    case FLASH3_BFLOAT16: return what(FloatWords<Bf16>());
#endif
    case FLASH3_FLOAT8_E4M3: return what(Fp8Words());
    default: return what(FloatWords<float>());
  }
#endif
}

// Up to so many rows read K and V in place, in strips of kFewRows.
constexpr int kInPlaceRows = 8;
constexpr int kFewRows = 4;

// The buffers of one task, cut from the thread's scratch.
struct Buffers {
  int q_words, v_words;  // per row; v_words in whole vectors of columns
  int k_words;           // of q_words those that meet k; the others, those of qv, meet v
  float *q, *k, *v, *scores, *weights, *out, *max, *sum, *stage;
  float *k_scales, *v_scales;  // of the rows of an FP8 tile
  void *k_rows, *v_rows;       // of a paged tile: where its rows lie
  uint8_t* kept;               // [row][key / 8] of a tile; null without dropout

  // Returns the bytes used; without a base it only measures.
  template <class Words>
  size_t cut(const ForwardProblem& p, TileShape tile, char* base) {
    size_t used = 0;
    const auto take = [&](int64_t words) {
      float* at = base ? reinterpret_cast<float*>(base + used) : nullptr;
      used += (static_cast<size_t>(words) * sizeof(float) + 63) / 64 * 64;
      return at;
    };
    constexpr int kElements = Words::kElements, kStripRows = Words::kStripRows;
    constexpr int kWhole = kStripRows * kFewRows;  // a whole number of either strip
    const int rows = round_up(tile.rows, kWhole);
    const auto words = [](int dim) {
      return ceil_div(dim, kElements * Words::kDepth) * Words::kDepth;
    };
    k_words = words(p.head_dim);
    q_words = k_words + words(static_cast<int>(p.qv.dim));
    v_words = round_up(p.head_dim_v, kLanes);
    q = take(int64_t{rows} * q_words);
    k = take(int64_t{tile.keys} * q_words);
    v = take(int64_t{tile.keys} / kElements * v_words);
    scores = take(int64_t{kStripRows} * tile.keys);
    weights = take(int64_t{kStripRows} * tile.keys / kElements);
    out = take(int64_t{rows} * v_words);
    max = take(rows);
    sum = take(rows);
    stage = take(int64_t{kLanes} * round_up(q_words, kBlock));
    const int64_t scaled = Words::kScaled ? tile.keys : 0;
    k_scales = take(scaled);
    v_scales = take(scaled);
    // One more than the tile has: a word of V is read with the row after it.
    const int64_t listed =
        p.cache.paged ? (tile.keys + 1) * int64_t{sizeof(void*) / sizeof(float)} : 0;
    k_rows = take(listed);
    v_rows = take(listed);
    const bool drops = p.dropout.given();
    kept = drops ? reinterpret_cast<uint8_t*>(take(rows * (tile.keys / 32))) : nullptr;
    return used;
  }
};

}  // namespace
}  // namespace flash3::cpu
HWY_AFTER_NAMESPACE();
