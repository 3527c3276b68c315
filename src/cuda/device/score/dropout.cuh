// SPDX-License-Identifier: Apache-2.0
// Which weights of a tile are dropped (core/dropout.hpp).
#pragma once

#include "cuda/device/score/bias.hpp"
#include "cuda/device/score/transposed_views.hpp"

namespace flash3::cuda {

// Of one head of a sequence.
struct HeadDropout {
  unsigned threshold;
  unsigned batch_head;
  PhiloxKey key;

  __device__ __forceinline__ HeadDropout(const DroppedWeights& dropped, int batch_head_)
      : threshold(dropped.threshold), batch_head(dropped.first_head + unsigned(batch_head_)) {
    unsigned long long seed = dropped.seed, offset = dropped.offset;
    if (dropped.state != nullptr) seed = __ldg(dropped.state), offset = __ldg(dropped.state + 1);
    key = dropout_key(seed, offset);
  }

  // Whether the pair with these 16 bits, the upper or the lower ones of a word, is kept.
  __device__ __forceinline__ bool keeps(unsigned word, bool upper) const {
    return (upper ? word & 0xFFFF0000u : word << 16) >= threshold << 16;
  }
};

// Sets the weights that are dropped to 0. view: of queries and keys of the sequence; its first row
// is one of the first eight of sixteen, its first key of eight.
template <int N>
__device__ __forceinline__ void drop_weights(const HeadDropout& head, const QueriesByKeys<N>& view,
                                             float (&r_p)[N]) {
#pragma unroll
  for (int group = 0; group < N; group += 8) {
    const PhiloxWords words =
        DropoutGroup::of(view.row(0), view.key(group / 2)).words(head.batch_head, head.key);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int place = j / 2 % 2 * 4 + j / 4 * 2 + j % 2;  // row, key / 8, key
      if (!head.keeps(words.word[place / 2], place % 2 != 0)) r_p[group + j] = 0.f;
    }
  }
}

// Gives the weights that are dropped the sign of −0. Of transposed tiles, whose first key of the
// thread is one of the first eight of sixteen, and the thread's queries are two neighbours of each
// eight: the lane of the next or last key has its group too, and each computes one of the two. By
// whole warps.
template <int N>
__device__ __forceinline__ void sign_dropped(const HeadDropout& head, const KeysByQueries<N>& view,
                                             float (&r_p)[N]) {
  const int key = view.key(0);
  const bool odd = key % 2 != 0;
  constexpr int kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words
#pragma unroll
  for (int group = 0; group < N; group += 8) {
    // Of query e = 0 by the lane of an even key, of e = 1 by that of an odd one.
    const int query = view.first_row + group * 2 + int(odd);
    const PhiloxWords own = DropoutGroup::of(query, key).words(head.batch_head, head.key);
    // The halves of its words that are of this lane's key, and of the other's.
    unsigned mine[2], others[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned a = own.word[2 * i], b = own.word[2 * i + 1];
      mine[i] = __byte_perm(a, b, odd ? kHighHalves : kLowHalves);
      others[i] = __byte_perm(a, b, odd ? kLowHalves : kHighHalves);
      others[i] = __shfl_xor_sync(~0u, others[i], 4);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int e = j % 2, query_half = j / 4, key_half = j / 2 % 2;
      const unsigned word = (e != 0) == odd ? mine[query_half] : others[query_half];
      if (!head.keeps(word, key_half != 0))
        r_p[group + j] = __uint_as_float(__float_as_uint(r_p[group + j]) | 0x80000000u);
    }
  }
}

}  // namespace flash3::cuda
