// SPDX-License-Identifier: Apache-2.0
// What FP8 kernels are put together from. load_fp8_pages.cuh adds the paged ones, softcap_fp8.cuh
// those with a softcap, bias_fp8.cuh those of biased scores.
//
// Operands of a consumer (consume.cuh): e4m3.
//
// O is in units of the present key tile's scale of V: the rescaling that the softmax needs anyway
// changes them too. The wait for O comes before all exponentials: the product is short, the
// registers of P are free after it, and rounding fills the gaps between the exponentials.
#pragma once

#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/sm90/device/tile.cuh"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"
#include "cuda/sm90/forward/output_sums.cuh"
#include "cuda/sm90/forward/warp_rows.cuh"

namespace flash3::cuda::sm90 {

// The softmax of FP8 scores: a tile's raw scores have a scale of their own, so that the maximum of
// a row is kept of scaled ones, in base 2; and weights are multiplied by 2^kFp8Offset before they
// are rounded to e4m3, whose largest number is 448. A weight may exceed the row's maximum so far by
// 2^kFp8Slack before it is raised (device/score/softmax.cuh): together they must stay below 448.
// What is 2^(6 + kFp8Offset) below the maximum begins to lose bits.
inline constexpr float kFp8Offset = 6.f;

// What the scores of a key tile are multiplied by: those of a thread's two rows by one factor, or
// by one each.
template <bool kRowScales>
struct ScoreScale {
  static constexpr int kCount = kRowScales ? 2 : 1;

  float factors[kCount];

  // q_scales: with what all scores are multiplied by.
  __device__ __forceinline__ void begin_tile(const float (&q_scales)[kCount], float k_scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) factors[i] = q_scales[i] * k_scale;
  }
  __device__ __forceinline__ float of_row(int h) const { return factors[kRowScales ? h : 0]; }
};

template <ScoreKind, bool kRowScales = false>
struct Fp8Score;

template <bool kRowScales>
struct Fp8Score<ScoreKind::kPlain, kRowScales> {
  static constexpr bool kCapped = false, kKeepsLargest = false, kShifts = false;

  ScoreScale<kRowScales> scale;

  template <class Params>
  static __device__ __forceinline__ Fp8Score of(const Params&) {
    return {};
  }

  // As Score<kPlain>, but m is of scaled scores, in base 2, and shifts leave the offset.
  template <class Place>
  __device__ __forceinline__ float log2_above(float s, float shift, const Place& at) const {
    return fmaf(s, scale.of_row(at.r), -shift);
  }
  __device__ __forceinline__ float shift_of(float m) const { return m - kFp8Offset; }
  __device__ __forceinline__ float max_above(float m, float shift) const {
    return m - kFp8Offset - shift;
  }
  __device__ __forceinline__ float limit(float m) const { return m + kFp8Slack; }
  __device__ __forceinline__ bool needs_exact(float m) const { return limit(m) < 0.f; }
  __device__ __forceinline__ float max_of(float largest, int h) const {
    return largest * scale.of_row(h);
  }
};

// Issues O += P·V, or O = P·V, V transposed by load_fp8.cuh, and commits it as one group.
template <class VTile, int kTileN>
__device__ __forceinline__ void issue_fp8_pv(float (&r_o)[VTile::kRows / 2],
                                             uint32_t (&r_p)[kTileN / 8], Descriptor v,
                                             bool accumulate = true) {
  fence_operand(r_o);
  fence_operand(r_p);
  wgmma_fence();
#pragma unroll
  for (int key = 0; key < kTileN; key += VTile::kStep)
    Wgmma<Element::kE4m3, VTile::kRows>::rs(r_o, &r_p[key / 8], v + VTile::k_step(key),
                                            key != 0 || accumulate);
  wgmma_commit();
}

// The score accumulator becomes the A operand of the next product: a thread's four scores of 16
// keys of a row are the four bytes of a register, in V's order of keys (load_fp8.cuh).
template <int N>
__device__ __forceinline__ void pack_fp8_probabilities(const float (&r_s)[N],
                                                       uint32_t (&r_p)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float* r = &r_s[i / 2 * 8 + i % 2 * 2];  // 16 keys, upper or lower row
    r_p[i] = pack4_e4m3(r[0], r[1], r[4], r[5]);
  }
}

template <class Traits>
class OperandsFp8 {
 public:
  static constexpr bool kBiased = Traits::kConfig.terms != BiasTerms::kNone;
  using Score = Fp8Score<kBiased ? ScoreKind::kBiased : Traits::kScore, Traits::kRowScales>;
  using VTile = typename Traits::VTile;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kProbabilityRegisters = kTileN / 8;
  static constexpr Descriptor kVLayout = VTile::kMajorK;
  // One warpgroup's exponentials then fall into the other's products, the more so the later.
  static constexpr PassTurn kPassTurn =
      kTileN >= 128 && Traits::kHeadDimV <= 128 ? PassTurn::kWithMaxima : PassTurn::kWithScores;
  // One copy of the softmax, not one a stage: less code to fetch. Three and four warpgroups have
  // too few registers for a stage that is no constant.
  static constexpr bool kOneSoftmax = Traits::kWarpgroups == 2;

  __device__ __forceinline__ OperandsFp8(const ForwardParams& params,
                                         typename Traits::Shared& shared, int q_stage,
                                         int warpgroup)
      : params_(params),
        shared_(shared),
        sums_(params, shared),
        q_scales_(shared.q_scales[q_stage][warpgroup]) {}

  static __device__ __forceinline__ void issue_scores(float (&r_s)[kTileN / 2], Descriptor q,
                                                      Descriptor k) {
    issue_abt<Element::kE4m3, typename Traits::QTile, typename Traits::KTile>(r_s, q, k);
  }
  // The product with the key tile before. Where O has been flushed it begins anew.
  template <class Tile>
  __device__ __forceinline__ void issue_output(Tile& tile, Descriptor v) const {
    issue_fp8_pv<VTile, kTileN>(tile.output, tile.probabilities, v, !sums_.is_due(tile.n + 1));
  }

  // In a uniform register: with three warpgroups the softmax needs all others.
  static __device__ __forceinline__ int warp_in_warpgroup(int) { return cuda::warp_in_warpgroup(); }

  // What follows from the scales of the key tile in this stage, and of the one before it, with
  // which O ends. Its scores are still under way: nobody waits for scales.
  template <class Tile>
  __device__ __forceinline__ void begin_key_tile(Tile& tile, const typename Traits::KvState& k,
                                                 const typename Traits::KvState& previous) {
    scales_ = &shared_.key_scales[k.phase][k.stage];
    float q_scales[kQScales];
#pragma unroll
    for (int i = 0; i < kQScales; ++i) q_scales[i] = q_scale(i) * fp8_params(params_).q_factor;
    tile.softmax.score.scale.begin_tile(q_scales, scales_->k);
    changes_v_scale_ = __any_sync(~0u, scales_->v != v_scale(previous));
    // Before the wait for the scores, where ptxas would not leave it.
#pragma unroll
    for (int i = 0; i < kQScales; ++i) order_before(tile.softmax.score.scale.factors[i]);
    __syncwarp();  // a warp's release of the stage is for what its threads have read too
  }

  template <class Tile>
  __device__ __forceinline__ void scale_scores(Tile& tile) const {
    if constexpr (Score::kCapped) tile.softmax.score.scale_scores(tile.scores);
  }

  // Whether O changes though no maximum is raised.
  template <class Tile>
  __device__ __forceinline__ bool changes_output(const Tile& tile) const {
    return changes_v_scale_ || sums_.is_due(tile.n);
  }

  // rescale: by alpha. previous: the key tile that O ends with; O comes to the next one's scale of
  // V by way of alpha.
  template <class Tile>
  __device__ __forceinline__ void change_output(Tile& tile, bool rescale,
                                                const typename Traits::KvState& previous) const {
    if (changes_v_scale_) {
      const float ratio = v_scale(previous) / scales_->v;
      tile.alpha[0] *= ratio, tile.alpha[1] *= ratio;
    }
    if (rescale || changes_v_scale_) {
      tile.softmax.scale_rows(tile.output, tile.alpha);
      sums_.scale(tile.alpha);
    }
    if (sums_.is_due(tile.n)) sums_.flush(tile.output, tile.n, tile.keys.seen.end);
  }

  // O lacks what has been flushed.
  template <class Tile>
  __device__ __forceinline__ void complete_output(Tile& tile) const {
    sums_.take(tile.output, tile.keys.seen);
  }

  template <class Tile>
  __device__ __forceinline__ void make_probabilities(Tile& tile) const {
    tile.softmax.exponentiate(tile.view(), tile.scores);
    pack_fp8_probabilities(tile.scores, tile.probabilities);
  }

  // Takes the last key tile's scale of V into what normalises O.
  __device__ __forceinline__ void scale_normalisation(float (&inverse_sum)[2],
                                                      const typename Traits::KvState& last) const {
    const float scale = v_scale(last);
    inverse_sum[0] *= scale, inverse_sum[1] *= scale;
  }

 private:
  static constexpr int kQScales = ScoreScale<Traits::kRowScales>::kCount;  // a thread's

  // Read again for each key tile: they need no registers in between.
  __device__ __forceinline__ float q_scale(int h) const {
    if constexpr (!Traits::kRowScales) {
      return q_scales_[0];
    } else {
      const int thread = thread_in_warpgroup();
      return q_scales_[thread / 32 * kWarpRows + thread % 32 / 4 + 8 * h];
    }
  }
  __device__ __forceinline__ float v_scale(const typename Traits::KvState& state) const {
    return shared_.key_scales[state.phase][state.stage].v;
  }

  const ForwardParams& params_;
  const typename Traits::Shared& shared_;
  const OutputSums<Traits> sums_;
  const typename Traits::QScales& q_scales_;
  const KeyTileScales* scales_ = nullptr;  // the present key tile's
  bool changes_v_scale_ = false;           // from the key tile before
};

// ---- the epilogue ----

// The epilogue of one warpgroup's 64 rows: from registers to global memory. A thread has four
// neighbouring columns of each 16 (load_fp8.cuh), the four threads of a quad the 32 bytes of a
// whole sector.

// Stores four columns of a row: together where each four lie in as many aligned bytes.
template <class T, class Quad>
__device__ __forceinline__ void store_quad(T* to, const Quad& quad, int columns, bool together) {
  if (together) {
    if (columns > 0) *reinterpret_cast<Quad*>(to) = quad;
  } else {
    const T(&x)[4] = reinterpret_cast<const T(&)[4]>(quad);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < columns) to[e] = x[e];
  }
}

// Store of FP8 consumers: the final output.
template <class Traits>
struct StoreFp8 {
  static constexpr bool kInPlaceOfQ = false;

  static __device__ __forceinline__ void wait_until_read() {}

  static __device__ __forceinline__ void store(const ForwardParams& params,
                                               const WarpOutput& output, uint8_t*,
                                               const float (&r_o)[Traits::kHeadDimV / 2], int,
                                               int thread) {
    if (params.out_type == FloatType::kFloat32) {
      store_rows<float>(params, output, r_o, thread, [](const float4& x) { return x; });
    } else {
      const auto pack = [&](float low, float high) {
        return params.out_type == FloatType::kFloat16 ? pack2<Element::kFloat16>(low, high)
                                                      : pack2<Element::kBFloat16>(low, high);
      };
      store_rows<uint16_t>(params, output, r_o, thread,
                           [&](const float4& x) { return uint2{pack(x.x, x.y), pack(x.z, x.w)}; });
    }
  }

 private:
  // Stores a thread's two rows, each four columns as `quad_of` makes them.
  template <class T, class QuadOf>
  static __device__ __forceinline__ void store_rows(const ForwardParams& params,
                                                    const WarpOutput& output,
                                                    const float (&r_o)[Traits::kHeadDimV / 2],
                                                    int thread, const QuadOf& quad_of) {
    const int first_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      if (!output.exists(row)) continue;
      T* const out = output.address<T>(row);
      const auto quad = [&](int i) {
        const float* r = &r_o[8 * i + 2 * h];
        return quad_of(float4{r[0], r[4], r[1], r[5]});
      };
      const int first_col = thread % 4 * 4;
      // The usual rows need no branch each four columns. Split kernels lack a register for that.
      if (!Traits::kSplit && params.out_in_quads && params.head_dim_v == Traits::kHeadDimV) {
#pragma unroll
        for (int i = 0; i < Traits::kHeadDimV / 16; ++i)
          store_quad(out + 16 * i + first_col, quad(i), 4, true);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
        const int col = 16 * i + first_col;
        store_quad(out + col, quad(i), params.head_dim_v - col, params.out_in_quads);
      }
    }
  }
};

// ---- the kernel ----

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::kE4m3)
struct PoliciesOf<kRow, kElement> {
  using Traits = Fp8Traits<kRow, kElement>;
  using Producer = Fp8Producer<Traits>;
  using Operands = OperandsFp8<Traits>;
  using Store = StoreFp8<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
