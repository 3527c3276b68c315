// Finding the sequence of a tile among thousands: a whole warp asks 32 places at a time.
#pragma once

#include "hopper/device/sequence_list.hpp"

namespace flash3::hopper {

// The last place p in [0, count) with first(p) ≤ value, 0 if there is none; first does not
// decrease. If it does, any place. count > 0.
template <class First>
__device__ __forceinline__ int last_place_from(int count, int value, const First& first) {
  const int lane = int(threadIdx.x % 32);
  int place = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane * step;
    const unsigned passed = __ballot_sync(~0u, at < count && first(place + at) <= value);
    const int skipped = max(__popc(passed) - 1, 0) * step;
    place += skipped;
    count = min(step, count - skipped);
  }
  return place;
}

// The listed sequence of the index-th tile; `count` if there are fewer tiles.
__device__ __forceinline__ int find_sequence(const SequenceList& list, int index) {
  const int tiles = list.first_tile[list.count];  // on its way while the place is looked for
  const int place = last_place_from(list.count, index, [&](int at) { return list.first_tile[at]; });
  return index < tiles ? place : list.count;
}

}  // namespace flash3::hopper
