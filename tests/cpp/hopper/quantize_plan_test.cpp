// SPDX-License-Identifier: Apache-2.0
// What the Hopper backend plans for flash3_quantize, and the walk of its kernels over blocks of
// tokens, emulated. Needs no GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <tuple>

#include "core/rotation.hpp"
#include "cuda/quantize/plan.hpp"

namespace flash3::cuda {
namespace {

flash3_tensor tensor(flash3_dtype dtype, std::vector<int64_t> shape) {
  flash3_tensor t{};
  t.dtype = dtype;
  t.ndim = int32_t(shape.size());
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.shape[d] = shape[size_t(d)];
    t.stride[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

struct Sizes {
  int64_t batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v;
};

// A question about [batch, seq, heads, dim] tensors with scales for blocks.
flash3_quantize_params padded(const Sizes& s, flash3_dtype dtype = FLASH3_BFLOAT16) {
  flash3_quantize_params p{};
  p.struct_size = sizeof p;
  const auto blocks = [](int64_t seq) { return ceil_div(seq, kScaleBlock); };
  const auto give = [&](int64_t seq, int64_t heads, int64_t dim, flash3_tensor* in,
                        flash3_tensor* out, flash3_tensor* scale) {
    *in = tensor(dtype, {s.batch, seq, heads, dim});
    *out = tensor(FLASH3_FLOAT8_E4M3, {s.batch, seq, heads, dim});
    *scale = tensor(FLASH3_FLOAT32, {s.batch, heads, blocks(seq)});
  };
  give(s.seq_q, s.heads_q, s.dim, &p.q, &p.q_out, &p.q_scale);
  give(s.seq_k, s.heads_k, s.dim, &p.k, &p.k_out, &p.k_scale);
  give(s.seq_k, s.heads_k, s.dim_v, &p.v, &p.v_out, &p.v_scale);
  return p;
}

// The same packed, with seq_q and seq_k rows in all.
flash3_quantize_params packed(const Sizes& s) {
  flash3_quantize_params p = padded(s);
  for (const auto& [in, out, scale] : {std::tuple{&p.q, &p.q_out, &p.q_scale},
                                       {&p.k, &p.k_out, &p.k_scale},
                                       {&p.v, &p.v_out, &p.v_scale}}) {
    const int64_t rows = in->shape[1], heads = in->shape[2], dim = in->shape[3];
    *in = tensor(in->dtype, {rows, heads, dim});
    *out = tensor(out->dtype, {rows, heads, dim});
    *scale = tensor(FLASH3_FLOAT32, {1, heads, rows / kScaleBlock + s.batch});
  }
  p.cu_seqlens_q = p.cu_seqlens_k = tensor(FLASH3_INT32, {s.batch + 1});
  return p;
}

QuantizeProblem problem_of(const flash3_quantize_params& p) {
  QuantizeProblem problem;
  const Status status = make_quantize_problem(&p, Pointers::kOptional, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

QuantizePlan plan_of(const QuantizeProblem& problem) {
  QuantizePlan plan;
  size_t workspace = 0;
  const Status status = cuda::plan(problem, Device{}, &workspace, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

// As the kernel finds a block's tokens; false if it has none.
bool tile_of(const QuantizeParams& params, Index index, QuantizeTile* tile) {
  if (!find_tensor(params, index, tile)) return false;
  const QuantizedTensor& t = params.tensors[tile->tensor];
  Index b = 0;
  if (t.sequences.packed)
    while (b + 1 < t.batch && first_scale_block(t, b + 1) <= tile->scale_block) ++b;
  return find_tokens(t, b, tile);
}

// Every token that counts comes once, with the scale that core/fp8.hpp says.
void expect_all_once(const QuantizeProblem& problem) {
  std::map<std::tuple<int, Index, Index, Index>, int> seen;  // dim, batch, head, row
  const QuantizePlan plan = plan_of(problem);
  size_t wanted = 0;
  for (int i = 0; i < plan.count; ++i) {
    const QuantizeParams params = quantize_params(problem, plan.passes[i], false);
    Index index = 0;
    for (int i_tensor = 0; i_tensor < params.count; ++i_tensor) {
      const QuantizedTensor& t = params.tensors[i_tensor];
      for (Index b = 0; b < t.batch; ++b)
        wanted += size_t(rows_of(t.sequences, b).length * t.heads);
      for (; index < t.past; ++index) {
        QuantizeTile tile;
        if (!tile_of(params, index, &tile)) continue;
        ASSERT_EQ(tile.tensor, i_tensor);
        const RowRange rows = rows_of(t.sequences, tile.batch);
        ASSERT_GE(tile.token, 0);
        ASSERT_LE(tile.token + tile.count, rows.length);
        ASSERT_EQ(tile.row, rows.first + tile.token);
        ASSERT_EQ(tile.scale_block, scale_block(t.sequences, rows, tile.batch, tile.token));
        ASSERT_LT(tile.scale_block, scale_blocks(t.sequences, t.batch));
        for (int r = 0; r < tile.count; ++r)
          ASSERT_EQ(++seen[std::tuple(i * 3 + i_tensor, tile.batch, tile.head, tile.row + r)], 1);
      }
    }
    QuantizeTile tile;
    EXPECT_FALSE(tile_of(params, index, &tile)) << "blocks past the end have nothing";
  }
  EXPECT_EQ(seen.size(), wanted);
}

TEST(QuantizeSchedule, ReachesEveryTokenOnce) {
  for (const int64_t seq : {0, 1, 127, 128, 129, 300})
    expect_all_once(problem_of(padded({3, seq, 200, 4, 2, 128, 64})));
  expect_all_once(problem_of(padded({0, 5, 7, 4, 2, 64, 64})));
  expect_all_once(problem_of(padded({2, 5, 7, 0, 0, 64, 64})));
}

TEST(QuantizeSchedule, LeavesOutTokensBehindSeqused) {
  QuantizeProblem problem = problem_of(padded({4, 300, 300, 2, 2, 64, 64}));
  const std::vector<int> used = {0, 1, 128, 300};
  problem.sequences_q.has_used = true;
  problem.sequences_q.used = used.data();
  expect_all_once(problem);
}

TEST(QuantizeSchedule, ReachesEveryTokenOfPackedSequences) {
  const std::vector<std::vector<int>> batches = {{0, 0, 1, 129, 385, 385, 700},
                                                 {0, 128, 256, 384, 512, 640, 700},
                                                 {5, 5, 5, 6, 7, 8, 650},
                                                 {0, 0, 0, 0, 0, 0, 0},
                                                 {700, 700, 700, 700, 700, 700, 700}};
  for (const auto& cu : batches) {
    QuantizeProblem problem = problem_of(packed({6, 700, 700, 4, 2, 96, 96}));
    problem.sequences_q.cu = problem.sequences_k.cu = cu.data();
    expect_all_once(problem);
    const std::vector<int> used = {100000, 0, 127, 129, 1, 200};
    problem.sequences_k.has_used = true;
    problem.sequences_k.used = used.data();
    expect_all_once(problem);
  }
}

// Whatever the lengths are, tokens and scales lie inside the tensors.
TEST(QuantizeSchedule, StaysInsideWhateverTheLengthsAre) {
  const std::vector<int> cu = {300, -5, 700, 2, 100000, 0, 699}, used = {9, -1, 100000, 5, 1, 700};
  QuantizeProblem problem = problem_of(packed({6, 700, 700, 4, 2, 96, 96}));
  problem.sequences_q.cu = problem.sequences_k.cu = cu.data();
  problem.sequences_k.has_used = true;
  problem.sequences_k.used = used.data();
  const QuantizePlan plan = plan_of(problem);
  const QuantizeParams params = quantize_params(problem, plan.passes[0], false);
  int tiles = 0;
  for (Index index = 0; index < quantize_blocks(params); ++index) {
    QuantizeTile tile;
    if (!tile_of(params, index, &tile)) continue;
    ++tiles;
    EXPECT_GE(tile.row, 0);
    EXPECT_LE(tile.row + tile.count, 700);
    EXPECT_GE(tile.token, 0);
    EXPECT_LT(tile.scale_block, 700 / kScaleBlock + 6);
  }
  EXPECT_GT(tiles, 0);
}

TEST(QuantizePlan, TakesTheNarrowestKernelForEachHeadDim) {
  struct {
    int64_t dim, dim_v;
    bool rotate;
    std::vector<std::string> ids;
  } const cases[] = {
      {1, 1, false, {"quantize_bf16_d64"}},
      {64, 64, true, {"quantize_bf16_d64_rotated"}},
      {96, 96, true, {"quantize_bf16_d96_rotated"}},
      {256, 256, true, {"quantize_bf16_d256_rotated"}},
      {128, 96, true, {"quantize_bf16_d128_transformed"}},
      {80, 80, true, {"quantize_bf16_d128_transformed"}},
      {65, 128, true, {"quantize_bf16_d128_transformed"}},
      {192, 128, true, {"quantize_bf16_d128", "quantize_bf16_d192_rotated"}},
      {192, 128, false, {"quantize_bf16_d128", "quantize_bf16_d256"}},
      {32, 256, false, {"quantize_bf16_d64", "quantize_bf16_d256"}},
  };
  for (const auto& c : cases) {
    flash3_quantize_params p = padded({1, 100, 100, 1, 1, c.dim, c.dim_v});
    p.rotate = c.rotate;
    const QuantizePlan plan = plan_of(problem_of(p));
    std::vector<std::string> ids;
    for (int i = 0; i < plan.count; ++i) ids.push_back(kernel_id(plan, plan.passes[i]));
    EXPECT_EQ(ids, c.ids) << c.dim << " " << c.dim_v;
  }
}

TEST(QuantizePlan, RotatesOnTheTensorCoresWhatItCanAccessSixteenBytesAtATime) {
  const auto dim_of = [](const flash3_quantize_params& p) {
    return plan_of(problem_of(p)).passes[0].rotating_dim;
  };
  flash3_quantize_params p = padded({2, 9, 9, 2, 2, 128, 128});
  EXPECT_EQ(dim_of(p), 0) << "nothing to rotate";
  p.rotate = 1;
  EXPECT_EQ(dim_of(p), 128);
  flash3_quantize_params odd = p;
  odd.k.stride[1] += 4;
  EXPECT_EQ(dim_of(odd), 0) << "rows that do not begin at 16 bytes";
  odd = p;
  odd.v_out.stride[1] += 8;
  odd.v_out.stride[0] += 9 * 8;
  EXPECT_EQ(dim_of(odd), 0);
  odd = p;
  odd.rotary_cos = odd.rotary_sin = tensor(FLASH3_FLOAT32, {9, 64});
  EXPECT_EQ(dim_of(odd), 0) << "rotary is applied in float32";
}

TEST(QuantizePlan, RefusesFloat32) {
  const QuantizeProblem problem = problem_of(padded({1, 100, 100, 1, 1, 64, 64}, FLASH3_FLOAT32));
  QuantizePlan plan;
  size_t workspace = 0;
  const Status status = cuda::plan(problem, Device{}, &workspace, &plan);
  EXPECT_EQ(status.code(), FLASH3_UNSUPPORTED);
  EXPECT_EQ(status.message(),
            "q.dtype = float32 but the hopper backend brings float16 and bfloat16 to FP8");
}

TEST(QuantizePlan, FindsWideScalesOfThoseThatHaveThem) {
  flash3_quantize_params p = padded({2, 100, 200, 4, 2, 64, 64});
  EXPECT_FALSE(plan_of(problem_of(p)).has_wide_scales);
  p.q_scale = tensor(FLASH3_FLOAT32, {2, 2});
  p.v_scale = tensor(FLASH3_FLOAT32, {1});
  const QuantizeProblem problem = problem_of(p);
  const QuantizePlan plan = plan_of(problem);
  EXPECT_TRUE(plan.has_wide_scales);
  ASSERT_EQ(plan.count, 1);
  const QuantizeParams gathers = quantize_params(problem, plan.passes[0], true);
  ASSERT_EQ(gathers.count, 2);
  EXPECT_EQ(gathers.tensors[0].scale.kind, ScaleKind::kHead);
  EXPECT_EQ(gathers.tensors[1].scale.kind, ScaleKind::kTensor);
  EXPECT_EQ(quantize_blocks(gathers), 2 * 4 * 1 + 2 * 2 * 2);
  EXPECT_EQ(quantize_params(problem, plan.passes[0], false).count, 3);
}

TEST(QuantizePlan, AccessesAreAsWideAsMemoryAllows) {
  const auto widths = [](const flash3_quantize_params& p) {
    const QuantizeProblem problem = problem_of(p);
    const QuantizedTensor t =
        quantize_params(problem, plan_of(problem).passes[0], false).tensors[0];
    return std::pair(t.in.width, t.out.width);
  };
  const auto of_dim = [&](int64_t dim) { return widths(padded({2, 9, 9, 2, 2, dim, dim})); };
  EXPECT_EQ(of_dim(64), std::pair(16, 16));
  EXPECT_EQ(of_dim(72), std::pair(16, 4)) << "rows of 72 bytes";
  EXPECT_EQ(of_dim(100), std::pair(4, 4));
  EXPECT_EQ(of_dim(98), std::pair(4, 1));
  EXPECT_EQ(of_dim(33), std::pair(2, 1));
  flash3_quantize_params p = padded({2, 9, 9, 2, 2, 64, 64});
  p.q.stride[0] += 1;
  EXPECT_EQ(widths(p), std::pair(2, 16));
  p = padded({2, 9, 9, 2, 2, 64, 64});
  p.q.data = reinterpret_cast<void*>(uintptr_t{1028});
  p.q_out.data = reinterpret_cast<void*>(uintptr_t{(1 << 20) + 3});
  EXPECT_EQ(widths(p), std::pair(4, 1));
}

// What the kernel rests on instead of asking rotation_part.
TEST(QuantizeRotation, StepsAndFactorsAreThoseOfTheParts) {
  for (int dim = 1; dim <= kMaxHeadDim; ++dim)
    for (int i = 0; i < dim; ++i) {
      const int size = rotation_part(dim, i).size;
      for (int step = 1; step < kMaxHeadDim; step *= 2)
        ASSERT_EQ(i<(dim & -(2 * step)), size> step) << dim << " " << i << " " << step;
      const int log2_size = 31 - std::countl_zero(unsigned(dim ^ i));
      ASSERT_EQ(1 << log2_size, size) << dim << " " << i;
      ASSERT_EQ(rotation_factor(log2_size), 1.f / std::sqrt(float(size))) << size;
    }
}

TEST(QuantizeRotation, HandsTheSignsToTheKernel) {
  flash3_quantize_params p = padded({1, 9, 9, 1, 1, 256, 256});
  p.rotate = 1;
  p.rotation_seed = 0x123456789ABCDEFull;
  const QuantizeProblem problem = problem_of(p);
  const QuantizeParams params = quantize_params(problem, plan_of(problem).passes[0], false);
  EXPECT_TRUE(params.rotates);
  for (int i = 0; i < kMaxHeadDim; ++i)
    EXPECT_EQ((params.signs[i / 32] >> (i % 32) & 1) != 0, rotation_negates(p.rotation_seed, i));
  EXPECT_TRUE(params.tensors[0].transforms);
  EXPECT_FALSE(params.tensors[2].transforms) << "v stays as it is";
}

}  // namespace
}  // namespace flash3::cuda
