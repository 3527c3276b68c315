// SPDX-License-Identifier: Apache-2.0
// Finding the sequence of a tile among thousands: a whole warp asks 32 places at a time.
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda {

// At most 32 of `count` places.
struct Places {
  int first, count;
};

// The places among which is the last p with first(p) ≤ value, the first places if there is none;
// first does not decrease. If it does, any.
template <class First>
__device__ __forceinline__ Places places_around(int count, int value, const First& first) {
  const int lane = int(threadIdx.x % 32);
  int place = 0;
  while (count > 32) {
    const int step = (count + 31) / 32, at = lane * step;
    const unsigned passed = __ballot_sync(~0u, at < count && first(place + at) <= value);
    const int skipped = max(__popc(passed) - 1, 0) * step;
    place += skipped;
    count = min(step, count - skipped);
  }
  return {place, count};
}

// The last place p in [0, count) with first(p) ≤ value, 0 if there is none; likewise. count > 0.
template <class First>
__device__ __forceinline__ int last_place_from(int count, int value, const First& first) {
  const Places at = places_around(count, value, first);
  const int lane = int(threadIdx.x % 32);
  const unsigned passed = __ballot_sync(~0u, lane < at.count && first(at.first + lane) <= value);
  return at.first + max(__popc(passed) - 1, 0);
}

// The listed sequence of a tile, and the tile's number among its own; not valid if there are fewer
// tiles.
struct ListedTile {
  bool valid;
  int index;
  ListedSequence sequence;
};

// Finds the index-th tile. The records of 32 sequences are read together with where their tiles
// begin: of two reads one after the other a block would wait for both. count > 0.
__device__ __forceinline__ ListedTile find_sequence(const SequenceList& list, int index) {
  const int tiles = list.first_tile[list.count];
  const Places at =
      places_around(list.count, index, [&](int place) { return list.first_tile[place]; });
  const int lane = int(threadIdx.x % 32);
  int first = 0;
  ListedSequence rows{};
  if (lane < at.count) first = list.first_tile[at.first + lane], rows = list.rows[at.first + lane];
  const unsigned passed = __ballot_sync(~0u, lane < at.count && first <= index);
  const int found = max(__popc(passed) - 1, 0);
  int* const words = reinterpret_cast<int*>(&rows);
#pragma unroll
  for (int i = 0; i < int(sizeof(ListedSequence) / sizeof(int)); ++i)
    words[i] = __shfl_sync(~0u, words[i], found);
  return {index < tiles, index - __shfl_sync(~0u, first, found), rows};
}

}  // namespace flash3::cuda
