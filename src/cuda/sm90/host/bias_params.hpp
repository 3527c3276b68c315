// SPDX-License-Identifier: Apache-2.0
// What kernels of biased scores are told of a call: one place for forward and backward.
#pragma once

#include <cstdint>

#include "cuda/device/score/bias.hpp"
#include "cuda/sm90/device/bias_tiles.hpp"
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
  bias.capped = p.softcap > 0.f;
  DroppedWeights& dropped = params.dropped;
  dropped.threshold = p.dropout.threshold;
  dropped.scale = p.dropout.scale();
  dropped.state = reinterpret_cast<const unsigned long long*>(p.dropout_state.data);
  dropped.seed = p.dropout.seed, dropped.offset = p.dropout.offset;
  dropped.first_head = unsigned(p.dropout.first_sequence * p.heads_q);
  return params;
}

// A bias or its gradient as the copy engine would have it. Where a stride is 0 one element serves
// all.
inline TensorView bias_rows(const BiasView& bias) {
  const auto own = [](Index size, Index stride) { return stride == 0 ? Index{size > 0} : size; };
  return {bias.data,
          own(bias.batch, bias.stride_batch),
          own(bias.rows, bias.stride_row),
          own(bias.heads, bias.stride_head),
          bias.keys,
          bias.stride_batch,
          bias.stride_row,
          bias.stride_head};
}
// Whether it comes in tiles: of 16 bits, and with strides that TMA takes.
inline bool has_tiles(const BiasView& bias) {
  const TensorView view = bias_rows(bias);
  return view.batch > 0 && view.seq > 0 && view.heads > 0 && view.dim > 0 &&
         dtype_size(bias.dtype) == 2 && (bias.keys == 1 || bias.stride_key == 1) &&
         tma_can_address(view);
}
// In tiles of tile_rows rows, or of one that serves all queries.
inline Status encode_tiles(const BiasView& bias, int tile_rows, BiasTiles* tiles) {
  *tiles = {};
  if (!has_tiles(bias)) return {};
  const TensorView view = bias_rows(bias);
  tiles->batches = int(view.batch), tiles->heads = int(view.heads);
  tiles->box_rows = view.seq == 1 ? 1 : tile_rows;
  RowMap rows;
  return encode_map(view, RowIndexing::kBySequence, {tiles->box_rows, kBiasBoxKeys}, &tiles->map,
                    &rows);
}

// A call's bias, for a kernel that takes tiles: as such if it may be, else as it lies.
inline Status encode_bias(const BiasView& bias, int tile_rows, BiasParams* params,
                          BiasTiles* tiles) {
  if (has_tiles(bias)) params->bias.pairs = nullptr;
  return encode_tiles(bias, tile_rows, tiles);
}

}  // namespace flash3::cuda::sm90
