// SPDX-License-Identifier: Apache-2.0
// The kernel before those of a ragged batch: it reads the lengths, which lie on the device alone,
// and lists the sequences, the longest first.
#pragma once

#include "core/kv_cache.hpp"
#include "core/seq_info.hpp"
#include "core/status.hpp"
#include "cuda/device/types.hpp"

namespace flash3::cuda {

struct VarlenScheduleParams {
  Sequences q, k;
  KvCache cache;    // that k and v are, if any
  Sequences added;  // keys that the call has appended to it
  int batch;
  int least_queries;  // shorter sequences have no tiles
  bool in_order;  // as they come, and not cut into tiles: first_tile and what follows are not used

  // The forward's tiles are of tile_rows queries, the backward's of so many keys.
  bool tiles_of_keys;
  int tile_rows;
  int groups;  // of heads, each with all tiles of a sequence
  // How many groups run at the same time: so many that their rows on the other side, of
  // bytes_per_row each, take no more than bytes_at_a_time, in steps of group_step; or whose tiles
  // are no more than tiles_at_a_time. 0: one.
  long long bytes_at_a_time, bytes_per_row;
  int group_step;
  int tiles_at_a_time;

  // Of a split kernel: into how many splits at most the keys of a tile are split, which are listed
  // one by one (device/key_splits.hpp); and its counters, which begin at 0.
  int most_splits;
  int* counters;
  int counter_count;

  ListedSequence* rows;  // [batch]
  int* first_tile;       // [batch + 1]
};

// Enqueues it. The next kernel of the stream may begin before it ends
// (host/programmatic_launch.hpp).
Status launch_varlen_schedule(const VarlenScheduleParams& params, void* stream);

}  // namespace flash3::cuda
