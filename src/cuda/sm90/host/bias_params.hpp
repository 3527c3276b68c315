// SPDX-License-Identifier: Apache-2.0
// What kernels of biased scores are told of a call: one place for forward and backward.
#pragma once

#include <cstdint>

#include "cuda/device/score/bias.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {

// scale_log2: what brings a raw score, or what the kernel's softcap makes of it, to base 2. terms:
// the kernel's; beside one alone scores stay raw.
inline BiasParams bias_params(const Problem& p, BiasTerms terms, float scale_log2) {
  BiasParams params{};
  params.heads_q = int(p.heads_q);
  params.scale_log2 = scale_log2;
  params.unit = terms == BiasTerms::kAny ? float(kLog2E) : 1.f / p.softmax_scale;
  ScoreBias& bias = params.bias;
  bias.slopes = p.alibi_slopes.data;
  bias.slopes_batch = p.alibi_slopes.stride_batch;
  bias.slopes_head = p.alibi_slopes.stride_head;
  bias.table = p.bias_table.data;
  bias.table_head = p.bias_table.stride_head;
  bias.reach = int(std::min<Index>(p.bias_table.distance, kMaxLength));
  if (p.bias.given) bias.type = float_type(p.bias.dtype);
  bias.pairs = p.bias.data;
  bias.pairs_batch = p.bias.stride_batch;
  bias.pairs_head = p.bias.stride_head;
  bias.pairs_row = p.bias.stride_row;
  bias.pairs_key = p.bias.stride_key;
  const auto even = [](Index stride) { return stride % 2 == 0; };
  bias.in_twos = p.bias.given && bias.type != FloatType::kFloat32 && p.bias.stride_key == 1 &&
                 even(p.bias.keys) && even(p.bias.stride_row) && even(p.bias.stride_head) &&
                 even(p.bias.stride_batch) && reinterpret_cast<uintptr_t>(p.bias.data) % 4 == 0;
  bias.capped = p.softcap > 0.f;
  DroppedWeights& dropped = params.dropped;
  dropped.threshold = p.dropout.threshold;
  dropped.scale = p.dropout.scale();
  dropped.state = reinterpret_cast<const unsigned long long*>(p.dropout_state.data);
  dropped.seed = p.dropout.seed, dropped.offset = p.dropout.offset;
  dropped.first_head = unsigned(p.dropout.first_sequence * p.heads_q);
  return params;
}

}  // namespace flash3::cuda::sm90
