// SPDX-License-Identifier: Apache-2.0
#include "oracle/definition.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/convert.hpp"
#include "core/rotation.hpp"
#include "oracle/definition_call.hpp"
#include "oracle/mask_pairs.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3 {
namespace {

// log(exp(sink) + Σ exp(scores)), with the largest taken out so that nothing overflows.
double log_sum_exp(const std::vector<double>& scores, double sink) {
  double largest = sink;
  for (const double s : scores) largest = std::max(largest, s);
  if (largest == -kInfinity) return -kInfinity;
  double sum = std::exp(sink - largest);
  for (const double s : scores) sum += std::exp(s - largest);
  return largest + std::log(sum);
}

double largest(const std::vector<double>& scores) {
  return scores.empty() ? -kInfinity : *std::max_element(scores.begin(), scores.end());
}

// What an FP8 element is multiplied with: see q_scale in flash3.h. `head` is the tensor's own.
double fp8_scale(const flash3_tensor& t, const flash3_tensor& cu_seqlens, int64_t b, int64_t head,
                 int64_t kv_head, int64_t token) {
  if (!given(t)) return 1;
  const auto at = [&](int64_t offset) { return static_cast<const float*>(t.data)[offset]; };
  if (t.ndim == 1) return at(0);
  if (t.ndim == 2) return at(b * t.stride[0] + kv_head * t.stride[1]);
  const int64_t block = token / FLASH3_FP8_BLOCK;
  if (!given(cu_seqlens)) return at(b * t.stride[0] + head * t.stride[1] + block * t.stride[2]);
  const int64_t first = entry(cu_seqlens, b) / FLASH3_FP8_BLOCK + b;
  return at(head * t.stride[1] + (first + block) * t.stride[2]);
}

// Keys, values and queries of a forward call, whose k and v may be a cache.
class ForwardTokens {
 public:
  explicit ForwardTokens(const flash3_forward_params& p) : p_(p), call_{p} {}

  // Places of the cache that a sequence's keys have before the call; the new ones follow.
  int64_t used(int64_t b) const {
    if (given(p_.seqused_k)) return entry(p_.seqused_k, b);
    return given(p_.page_table) ? p_.page_table.shape[1] * p_.k.shape[1] : call_.keys(b).count;
  }
  int64_t padding(int64_t b) const { return given(p_.leftpad_k) ? entry(p_.leftpad_k, b) : 0; }
  int64_t added(int64_t b) const {
    return given(p_.k_new) ? tokens_of(p_.cu_seqlens_k_new, {}, b, p_.k_new.shape[1]).count : 0;
  }
  int64_t keys(int64_t b) const { return used(b) - padding(b) + added(b); }

  double k(int64_t b, int64_t j, int64_t head, int64_t d) const {
    const int64_t n = padding(b) + j - used(b);
    if (n < 0) return cached(p_.k, b, padding(b) + j, head, d);
    const Tokens tokens = tokens_of(p_.cu_seqlens_k_new, {}, b, p_.k_new.shape[1]);
    return appended(transformed(p_.k_new, b, tokens, n, head, d, position(b) + n), p_.k_new,
                    k_scale(b, j, head));
  }
  double v(int64_t b, int64_t j, int64_t head, int64_t d) const {
    const int64_t n = padding(b) + j - used(b);
    if (n < 0) return cached(p_.v, b, padding(b) + j, head, d);
    if (!given(p_.v_new)) return k(b, j, head, d + first_of_values());
    const Tokens tokens = tokens_of(p_.cu_seqlens_k_new, {}, b, p_.v_new.shape[1]);
    return appended(static_cast<float>(call_.element(p_.v_new, b, tokens, n, head, d)), p_.v_new,
                    v_scale(b, j, head));
  }
  double qv(int64_t b, int64_t i, int64_t head, int64_t d) const {
    return call_.element(p_.qv, b, call_.queries(b), i, head, d);
  }
  double k_scale(int64_t b, int64_t j, int64_t head) const { return scale(p_.k_scale, b, j, head); }
  double v_scale(int64_t b, int64_t j, int64_t head) const { return scale(p_.v_scale, b, j, head); }
  double q(int64_t b, int64_t i, int64_t head, int64_t d) const {
    const bool masked =
        p_.causal || p_.chunk > 0 || (p_.window && (p_.window_left >= 0 || p_.window_right >= 0));
    return rounded(
        transformed(p_.q, b, call_.queries(b), i, head, d, position(b) + (masked ? i : 0)),
        p_.q.dtype);
  }

 private:
  // Where v begins in the rows of k, if it is a part of them.
  int64_t first_of_values() const {
    return (static_cast<const char*>(p_.v.data) - static_cast<const char*>(p_.k.data)) /
           (p_.k.dtype == FLASH3_FLOAT32 ? 4 : 2);
  }
  // The element of k and v that holds a sequence's place, a page or another, and the row in it.
  std::pair<int64_t, int64_t> row_of(int64_t b, int64_t place) const {
    if (given(p_.page_table)) {
      const int64_t size = p_.k.shape[1];
      return {static_cast<const int32_t*>(
                  p_.page_table.data)[b * p_.page_table.stride[0] + place / size],
              place % size};
    }
    return {given(p_.cache_batch_idx) ? entry(p_.cache_batch_idx, b) : b, place};
  }
  double cached(const flash3_tensor& t, int64_t b, int64_t place, int64_t head, int64_t d) const {
    const auto [of, row] = row_of(b, place);
    return call_.element(t, of, {call_.packed_k ? call_.keys(b).first : 0, 0}, row, head, d);
  }
  // The scale of key j; blocks are blocks of the cache's rows.
  double scale(const flash3_tensor& t, int64_t b, int64_t j, int64_t head) const {
    if (!given(t) || t.ndim < 3 || call_.packed_k)
      return fp8_scale(t, p_.cu_seqlens_k, b, head, head, j);
    const auto [of, row] = row_of(b, padding(b) + j);
    return fp8_scale(t, {}, of, head, head, row);
  }

  static double rounded(float x, flash3_dtype dtype) {
    uint32_t element = 0;
    store_float(&element, dtype, 0, x);
    return load_float(&element, dtype, 0);
  }
  // An element of k_new or v_new as it lies in the cache.
  double appended(float x, const flash3_tensor& t, double scale) const {
    const bool becomes_fp8 = t.dtype != p_.k.dtype;
    return rounded(becomes_fp8 ? x / static_cast<float>(scale) : x, p_.k.dtype);
  }

  int64_t position(int64_t b) const {
    return given(p_.rotary_offsets) ? entry(p_.rotary_offsets, b) : used(b);
  }

  // Element d with the rotary embedding and the rotation, if they are asked for, in float32.
  float transformed(const flash3_tensor& t, int64_t b, const Tokens& tokens, int64_t i,
                    int64_t head, int64_t d, int64_t position) const {
    const auto x = [&](int64_t at) { return embedded(t, b, tokens, i, head, at, position); };
    if (!p_.rotate) return x(d);
    // The power of two that d is in, of those that head_dim is the sum of.
    int64_t begin = 0, n = 1;
    while (true) {
      while (2 * n <= call_.head_dim - begin) n *= 2;
      if (d < begin + n) break;
      begin += n, n = 1;
    }
    const float factor = 1 / std::sqrt(static_cast<float>(n));
    const auto with_sign = [&](int64_t at) {
      return x(at) * (rotation_negates(p_.rotation_seed, static_cast<int>(at)) ? -factor : factor);
    };
    return hadamard(with_sign, begin, n, d - begin);
  }
  // Element d of y·H, with y(begin) … y(begin + n − 1), and H of n = 2^k dimensions: [H', H'; H',
  // −H'] of half as many.
  template <class Y>
  static float hadamard(const Y& y, int64_t begin, int64_t n, int64_t d) {
    if (n == 1) return y(begin);
    const int64_t half = n / 2;
    const float first = hadamard(y, begin, half, d % half),
                second = hadamard(y, begin + half, half, d % half);
    return d < half ? first + second : first - second;
  }

  // Element d with the rotary embedding, if there is one, in float32.
  float embedded(const flash3_tensor& t, int64_t b, const Tokens& tokens, int64_t i, int64_t head,
                 int64_t d, int64_t position) const {
    const int64_t pairs = p_.rotary_cos.shape[1];
    if (!given(p_.rotary_cos) || d >= 2 * pairs)
      return static_cast<float>(call_.element(t, b, tokens, i, head, d));
    const int64_t pair = p_.rotary_interleaved ? d / 2 : d % pairs;
    const bool second = p_.rotary_interleaved ? d % 2 == 1 : d >= pairs;
    const auto x = [&](bool other) {
      const int64_t at = p_.rotary_interleaved ? 2 * pair + other : pair + (other ? pairs : 0);
      return static_cast<float>(call_.element(t, b, tokens, i, head, at));
    };
    const auto table = [&](const flash3_tensor& of) {
      return load_float(of.data, of.dtype, position * of.stride[0] + pair);
    };
    const float cos = table(p_.rotary_cos), sin = table(p_.rotary_sin);
    return second ? x(false) * sin + x(true) * cos : x(false) * cos - x(true) * sin;
  }

  const flash3_forward_params& p_;
  const Call<flash3_forward_params> call_;
};

// The words of a sequence's queries.
const uint64_t* tree_words(const flash3_forward_params& p, int64_t b, const Tokens& queries) {
  const flash3_tensor& t = p.tree_mask;
  return static_cast<const uint64_t*>(t.data) + (t.ndim == 2 ? b * t.stride[0] : 0) + queries.first;
}

}  // namespace

DefinedForward define_forward(const flash3_forward_params& p, const flash3_mask_params* source) {
  const Call<flash3_forward_params> call{p};
  const CallMask call_mask(p.mask, source);
  const ForwardTokens tokens{p};
  const int64_t rows = p.q.shape[p.q.ndim - 3];
  const int64_t all_rows = call.packed_q ? rows : call.batch * rows;
  DefinedForward result;
  result.out.resize(static_cast<size_t>(all_rows * call.heads_q * call.head_dim_v));
  result.lse.resize(static_cast<size_t>(all_rows * call.heads_q));
  const bool of_heads = p.max_logits.ndim == 1;
  std::vector<double>* max_logits = nullptr;
  if (given(p.max_logits)) {
    max_logits = &result.added["max_logits"];
    max_logits->assign(of_heads ? size_t(call.heads_q) : result.lse.size(), -kInfinity);
  }

  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads_q; ++h)
      for (int64_t i = 0; i < call.queries(b).count; ++i) {
        const Tokens queries = call.queries(b);
        const int64_t keys = tokens.keys(b);
        VisibleKeys mask = call_mask.of(call.visible(b), b, h);
        mask.seq_k = keys;
        if (given(p.tree_mask)) mask.tree = tree_words(p, b, queries);
        const int64_t kv_head = call.kv_head(h);
        const double q_scale = fp8_scale(p.q_scale, p.cu_seqlens_q, b, h, kv_head, i);

        std::vector<int64_t> seen;
        std::vector<double> scores;
        for (int64_t j = 0; j < keys; ++j) {
          if (!mask.sees(i, j) || call.bias(mask, b, h, i, j) == -kInfinity) continue;
          const double k_scale = tokens.k_scale(b, j, kv_head);
          double dot = 0;
          for (int64_t d = 0; d < call.head_dim; ++d)
            dot += tokens.q(b, i, h, d) * tokens.k(b, j, kv_head, d);
          for (int64_t d = 0; given(p.qv) && d < call.head_dim_v; ++d)
            dot += tokens.qv(b, i, h, d) * tokens.v(b, j, kv_head, d);
          seen.push_back(j);
          scores.push_back(call.capped(call.scale * q_scale * k_scale * dot) +
                           call.bias(mask, b, h, i, j));
        }
        const double lse = log_sum_exp(scores, call.sink(h));
        const auto at_lse = static_cast<size_t>(
            call.lse_place(call.heads_q, rows, call.packed_q, b, queries, i, h));
        result.lse[at_lse] = lse;
        if (max_logits) {
          double& logit = (*max_logits)[of_heads ? static_cast<size_t>(h) : at_lse];
          logit = std::max(logit, largest(scores));
        }

        const size_t out = static_cast<size_t>(call.place(p.out, b, queries, i, h));
        for (size_t n = 0; n < seen.size(); ++n) {
          const int64_t j = seen[n];
          const double weight = std::exp(scores[n] - lse) * call.kept(b, h, i, j);
          const double v_scale = tokens.v_scale(b, j, kv_head);
          for (int64_t d = 0; d < call.head_dim_v; ++d)
            result.out[out + static_cast<size_t>(d)] +=
                weight * v_scale * tokens.v(b, j, kv_head, d);
        }
      }
  return result;
}

namespace {

// A query of a head, and the keys that it sees with what the forward makes of them.
struct SeenKeys {
  std::vector<int64_t> keys;
  std::vector<double> scores, weights;
  std::vector<double> slopes;  // 1 − tanh² of the softcap
  double lse;
};

SeenKeys seen_keys(const Call<flash3_backward_params>& call, const flash3_backward_params& p,
                   const CallMask& call_mask, int64_t b, int64_t h, int64_t i) {
  const Tokens queries = call.queries(b), keys = call.keys(b);
  const VisibleKeys mask = call_mask.of(call.visible(b), b, h);
  SeenKeys seen;
  for (int64_t j = 0; j < keys.count; ++j) {
    if (!mask.sees(i, j) || call.bias(mask, b, h, i, j) == -kInfinity) continue;
    const double dot =
        call.dot(p.q, queries, i, h, p.k, keys, j, call.kv_head(h), b, call.head_dim);
    seen.keys.push_back(j);
    const double capped = call.capped(call.scale * dot);
    const double tanh = p.softcap > 0 ? capped / p.softcap : 0;
    seen.scores.push_back(capped + call.bias(mask, b, h, i, j));
    seen.slopes.push_back(1 - tanh * tanh);
  }
  seen.lse = log_sum_exp(seen.scores, call.sink(h));
  for (const double score : seen.scores) seen.weights.push_back(std::exp(score - seen.lse));
  return seen;
}

// The gradient of the LSE of query i.
double dlse_of(const flash3_backward_params& p, int64_t b, int64_t h, const Tokens& queries,
               int64_t i) {
  if (!given(p.dlse)) return 0;
  const int64_t* stride = p.dlse.stride + (p.dlse.ndim - 2);
  const int64_t first = p.dlse.ndim == 3 ? b * p.dlse.stride[0] : 0;
  return static_cast<const float*>(
      p.dlse.data)[first + h * stride[0] + (queries.first + i) * stride[1]];
}

}  // namespace

// For query i and the keys j that it sees, with p_j = exp(score_j − lse) and dp_j = dout·v_j:
//
//   ds_j = p_j · (dp_j − Σ p·dp + dlse) · (1 − tanh² of the softcap)
//   dq = scale · Σ ds_j·k_j     dk_j += scale · ds_j·q     dv_j += p_j·dout
//   dsink += exp(sink − lse) · (dlse − Σ p·dp)
//   dbias_ij += ds_j without the softcap's part
//
// Dropout multiplies dp_j, and p_j in dv, by 0 or by 1 / (1 − its p).
DefinedBackward define_backward(const flash3_backward_params& p, const flash3_mask_params* source) {
  const Call<flash3_backward_params> call{p};
  const CallMask call_mask(p.mask, source);
  const auto elements = [](const flash3_tensor& t) {
    int64_t count = 1;
    for (int n = 0; n < t.ndim; ++n) count *= t.shape[n];
    return static_cast<size_t>(count);
  };
  DefinedBackward result;
  result.dq.resize(elements(p.q));
  result.dk.resize(elements(p.k));
  result.dv.resize(elements(p.v));
  if (given(p.sink)) result.dsink.resize(static_cast<size_t>(call.heads_q));
  BiasGradients biases(call, &result);

  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads_q; ++h)
      for (int64_t i = 0; i < call.queries(b).count; ++i) {
        const Tokens queries = call.queries(b), keys = call.keys(b);
        const int64_t kv_head = call.kv_head(h);
        const SeenKeys seen = seen_keys(call, p, call_mask, b, h, i);
        std::vector<double> dp, kept;
        double mean = 0;  // Σ p·dp
        for (size_t n = 0; n < seen.keys.size(); ++n) {
          kept.push_back(call.kept(b, h, i, seen.keys[n]));
          dp.push_back(kept[n] * call.dot(p.dout, queries, i, h, p.v, keys, seen.keys[n], kv_head,
                                          b, call.head_dim_v));
          mean += seen.weights[n] * dp[n];
        }
        const double dlse = dlse_of(p, b, h, queries, i);

        const auto q_row = static_cast<size_t>(call.place(p.q, b, queries, i, h));
        for (size_t n = 0; n < seen.keys.size(); ++n) {
          const int64_t j = seen.keys[n];
          const double of_score = seen.weights[n] * (dp[n] - mean + dlse);
          const double ds = of_score * seen.slopes[n];
          biases.add_pair(call_mask.of(call.visible(b), b, h), b, h, i, j, of_score);
          const auto k_row = static_cast<size_t>(call.place(p.k, b, keys, j, kv_head));
          const auto v_row = static_cast<size_t>(call.place(p.v, b, keys, j, kv_head));
          for (int64_t d = 0; d < call.head_dim; ++d) {
            const auto at = static_cast<size_t>(d);
            result.dq[q_row + at] += call.scale * ds * call.element(p.k, b, keys, j, kv_head, d);
            result.dk[k_row + at] += call.scale * ds * call.element(p.q, b, queries, i, h, d);
          }
          for (int64_t d = 0; d < call.head_dim_v; ++d)
            result.dv[v_row + static_cast<size_t>(d)] +=
                kept[n] * seen.weights[n] * call.element(p.dout, b, queries, i, h, d);
        }
        if (const double sink = call.sink(h); given(p.sink) && sink != -kInfinity)
          result.dsink[static_cast<size_t>(h)] += std::exp(sink - seen.lse) * (dlse - mean);
      }
  return result;
}

}  // namespace flash3
