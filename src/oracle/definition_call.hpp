// SPDX-License-Identifier: Apache-2.0
// What the definition of the forward and that of the backward have in common: the tensors of a call
// and its scores, by the params of the C interface alone.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/convert.hpp"
#include "core/dropout.hpp"
#include "oracle/definition.hpp"
#include "oracle/mask_pairs.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline bool given(const flash3_tensor& t) { return t.ndim > 0; }

inline int64_t entry(const flash3_tensor& t, int64_t i) {
  return static_cast<const int32_t*>(t.data)[i * t.stride[0]];
}

// What forward and backward have in common: the scores of a call.
template <class Params>
struct Call {
  const Params& p;
  const bool packed_q = given(p.cu_seqlens_q), packed_k = given(p.cu_seqlens_k);
  const int64_t batch = packed_q ? p.cu_seqlens_q.shape[0] - 1 : p.q.shape[0];
  const int64_t heads_q = p.q.shape[p.q.ndim - 2], heads_k = p.k.shape[p.k.ndim - 2];
  const int64_t head_dim = p.q.shape[p.q.ndim - 1], head_dim_v = p.v.shape[p.v.ndim - 1];
  // Products of a score: with qv the values are keys too.
  int64_t products() const {
    if constexpr (requires { p.qv; })
      if (given(p.qv)) return head_dim + head_dim_v;
    return head_dim;
  }
  const double scale = p.softmax_scale > 0
                           ? double{p.softmax_scale}
                           : double{static_cast<float>(1 / std::sqrt(double(products())))};

  int64_t kv_head(int64_t head) const { return head / (heads_q / heads_k); }
  Tokens queries(int64_t b) const {
    return tokens_of(p.cu_seqlens_q, p.seqused_q, b, p.q.shape[1]);
  }
  Tokens keys(int64_t b) const { return tokens_of(p.cu_seqlens_k, p.seqused_k, b, p.k.shape[1]); }

  VisibleKeys visible(int64_t b) const {
    return VisibleKeys::of(p, queries(b).count, keys(b).count);
  }

  // Element d of token i of sequence b, of a tensor [batch, seq, heads, dim] or [total, heads,
  // dim].
  double element(const flash3_tensor& t, int64_t b, const Tokens& tokens, int64_t i, int64_t head,
                 int64_t d) const {
    const int64_t* stride = t.stride + (t.ndim - 3);
    const int64_t first = t.ndim == 4 ? b * t.stride[0] : 0;
    return load_float(t.data, t.dtype,
                      first + (tokens.first + i) * stride[0] + head * stride[1] + d * stride[2]);
  }
  // The place of that element among the results, which are contiguous.
  static int64_t place(const flash3_tensor& t, int64_t b, const Tokens& tokens, int64_t i,
                       int64_t head) {
    const int64_t row = (t.ndim == 4 ? b * t.shape[1] : 0) + tokens.first + i;
    return (row * t.shape[t.ndim - 2] + head) * t.shape[t.ndim - 1];
  }
  // The same for [batch, heads, seq] or [heads, total].
  static int64_t lse_place(int64_t heads, int64_t rows, bool packed, int64_t b,
                           const Tokens& tokens, int64_t i, int64_t head) {
    return ((packed ? 0 : b * heads) + head) * rows + tokens.first + i;
  }

  double dot(const flash3_tensor& x, const Tokens& x_tokens, int64_t i, int64_t x_head,
             const flash3_tensor& y, const Tokens& y_tokens, int64_t j, int64_t y_head, int64_t b,
             int64_t dim) const {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d)
      sum += element(x, b, x_tokens, i, x_head, d) * element(y, b, y_tokens, j, y_head, d);
    return sum;
  }

  double capped(double score) const {
    return p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score;
  }
  // What is added to the capped score of query i and key j; −∞ hides the pair.
  double bias(const VisibleKeys& mask, int64_t b, int64_t head, int64_t i, int64_t j) const {
    double sum = 0;
    if (given(p.alibi_slopes))
      sum -=
          float_at(p.alibi_slopes, place_of_slope(p.alibi_slopes, b, head)) * distance(mask, i, j);
    if (given(p.bias_table))
      sum += float_at(p.bias_table, place_of_entry(p.bias_table, mask, head, i, j));
    if (given(p.bias)) sum += float_at(p.bias, place_of_pair(p.bias, b, head, i, j));
    return sum;
  }
  static double distance(const VisibleKeys& mask, int64_t i, int64_t j) {
    return static_cast<double>(std::abs(mask.diagonal_of(i) - j));
  }
  // Where in these tensors what is of a pair lies, by index; a dimension of one element is for all.
  using Place = std::array<int64_t, 4>;
  static Place place_of_slope(const flash3_tensor& t, int64_t b, int64_t head) {
    return t.ndim == 2 ? Place{b, head} : Place{head};
  }
  static Place place_of_entry(const flash3_tensor& t, const VisibleKeys& mask, int64_t head,
                              int64_t i, int64_t j) {
    const int64_t distance = t.shape[1] / 2;
    return {t.shape[0] == 1 ? 0 : head,
            std::clamp(j - mask.diagonal_of(i), -distance, distance) + distance};
  }
  Place place_of_pair(const flash3_tensor& t, int64_t b, int64_t head, int64_t i, int64_t j) const {
    return {t.shape[0] == 1 ? 0 : b, t.shape[1] == 1 ? 0 : head,
            t.shape[2] == 1 ? 0 : (packed_q ? queries(b).first : 0) + i, j};
  }
  static double float_at(const flash3_tensor& t, const Place& place) {
    int64_t offset = 0;
    for (int d = 0; d < t.ndim; ++d) offset += place[d] * t.stride[d];
    return load_float(t.data, t.dtype, offset);
  }
  // Dropout: what the weight of query i and key j is multiplied by, 0 if it is dropped.
  double kept(int64_t b, int64_t head, int64_t i, int64_t j) const {
    const unsigned threshold = dropout_threshold(p.dropout_p);
    if (threshold == 0) return 1;
    const auto* state = static_cast<const int64_t*>(p.dropout_state.data);
    const PhiloxKey key =
        state ? dropout_key(static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1]))
              : dropout_key(p.dropout_seed, p.dropout_offset);
    const bool keeps = dropout_keeps(key, threshold, unsigned(b * heads_q + head), int(i), int(j));
    return keeps ? 65536. / (65536 - threshold) : 0;
  }
  double sink(int64_t head) const {
    return given(p.sink) ? load_float(p.sink.data, p.sink.dtype, head * p.sink.stride[0])
                         : -kInfinity;
  }
};

// The gradients of what is added to scores: sums of ds without the softcap's slope.
class BiasGradients {
 public:
  BiasGradients(const Call<flash3_backward_params>& call, DefinedBackward* result)
      : call_(call), result_(result) {
    const flash3_backward_params& p = call.p;
    add(p.dbias, "dbias"), add(p.dbias_table, "dbias_table"), add(p.dalibi_slopes, "dalibi_slopes");
  }
  void add_pair(const VisibleKeys& mask, int64_t b, int64_t h, int64_t i, int64_t j, double ds) {
    const flash3_backward_params& p = call_.p;
    if (given(p.dbias)) at(p.dbias, "dbias", call_.place_of_pair(p.dbias, b, h, i, j)) += ds;
    if (given(p.dbias_table))
      at(p.dbias_table, "dbias_table", call_.place_of_entry(p.dbias_table, mask, h, i, j)) += ds;
    if (given(p.dalibi_slopes))
      at(p.dalibi_slopes, "dalibi_slopes", call_.place_of_slope(p.dalibi_slopes, b, h)) -=
          ds * call_.distance(mask, i, j);
  }

 private:
  void add(const flash3_tensor& t, const char* name) {
    if (!given(t)) return;
    int64_t count = 1;
    for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
    result_->added[name].resize(static_cast<size_t>(count));
  }
  double& at(const flash3_tensor& t, const char* name, const std::array<int64_t, 4>& place) {
    int64_t index = 0;
    for (int d = 0; d < t.ndim; ++d) index = index * t.shape[d] + place[d];
    return result_->added[name][static_cast<size_t>(index)];
  }

  const Call<flash3_backward_params>& call_;
  DefinedBackward* result_;
};

}  // namespace flash3
