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

  // Whether the pair with the upper or the lower 16 bits of a word is kept.
  __device__ __forceinline__ bool keeps(unsigned word, bool upper) const {
    return (upper ? word : word << 16) >=
           threshold << 16;  // what is below the upper bits decides nothing
  }
};

// The random words of a tile's pairs, as far as a thread needs them: they depend on the place alone
// and can be there before the scores.
template <class View>
struct DropoutWords;

// view: of queries and keys of the sequence; its first row is one of the first eight of sixteen,
// its first key of eight.
template <int N>
struct DropoutWords<QueriesByKeys<N>> {
  PhiloxWords groups[N / 8];

  __device__ __forceinline__ void draw(const HeadDropout& head, const QueriesByKeys<N>& view) {
    DropoutGroup group = DropoutGroup::of(view.row(0), view.key(0));
#pragma unroll
    for (int i = 0; i < N / 8; ++i, group.keys += DropoutGroup::kOfKeys)
      groups[i] = group.words(head.batch_head, head.key);
  }
  // Sets the weights that are dropped to 0.
  __device__ __forceinline__ void drop(const HeadDropout& head, float (&r_p)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int place = i / 2 % 2 * 4 + i / 4 % 2 * 2 + i % 2;  // row, key / 8, key
      if (!head.keeps(groups[i / 8].word[place / 2], place % 2 != 0)) r_p[i] = 0.f;
    }
  }
};

// Of transposed tiles, whose first key of the thread is one of the first eight of sixteen, and the
// thread's queries are two neighbours of each eight: the lane of the next or last key has its
// groups too, and each computes one of two. By whole warps.
template <int N>
struct DropoutWords<KeysByQueries<N>> {
  // Of two queries of sixteen each the halves that are of this thread's key, and of its key + 8:
  // two words of the query of this lane's parity, and two of the other.
  unsigned mine[N / 8][2], others[N / 8][2];
  bool odd;

  __device__ __forceinline__ void draw(const HeadDropout& head, const KeysByQueries<N>& view) {
    const int key = view.key(0);
    odd = key % 2 != 0;
    constexpr int kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words
    // Of query e = 0 by the lane of an even key, of e = 1 by that of an odd one.
    DropoutGroup group = DropoutGroup::of(view.first_row + int(odd), key);
#pragma unroll
    for (int g = 0; g < N / 8; ++g, group.queries += DropoutGroup::kOfQueries) {
      const PhiloxWords own = group.words(head.batch_head, head.key);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned a = own.word[2 * i], b = own.word[2 * i + 1];
        mine[g][i] = __byte_perm(a, b, odd ? kHighHalves : kLowHalves);
        others[g][i] = __byte_perm(a, b, odd ? kLowHalves : kHighHalves);
        others[g][i] = __shfl_xor_sync(~0u, others[g][i], 4);
      }
    }
  }
  // Gives the weights that are dropped the sign of −0.
  __device__ __forceinline__ void sign(const HeadDropout& head, float (&r_p)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int e = i % 2, query_half = i / 4 % 2, key_half = i / 2 % 2;
      const unsigned word = (e != 0) == odd ? mine[i / 8][query_half] : others[i / 8][query_half];
      if (!head.keeps(word, key_half != 0))
        r_p[i] = __uint_as_float(__float_as_uint(r_p[i]) | 0x80000000u);
    }
  }
};

}  // namespace flash3::cuda
