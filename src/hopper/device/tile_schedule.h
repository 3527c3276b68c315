// The work of one launch as the scheduler hands it out (scheduler.cuh). Plain data, host and
// device: a kernel family's params hold one.
#pragma once

#include "core/band.hpp"

namespace flash3::hopper {

// See TileCounter in scheduler.cuh.
struct TileCounterMemory {
  unsigned long long ticket;
  int next;
  int finished_blocks;
};

// A head group is what shares work tiles: one query head, or the packed ones (head_pack.hpp).
struct TileSchedule {
  Band band;  // cut to where no sum with a row overflows 32 bits
  int seq_q, seq_k;
  int tile_queries;            // queries of a work tile
  int m_tiles;                 // per head group
  int head_groups;             // per batch element
  int groups;                  // batch · head_groups
  int groups_at_a_time;        // consecutive ones whose K and V share the L2 cache
  int tiles;                   // in all
  TileCounterMemory* counter;  // null: tiles are dealt out in turn
  unsigned long long ticket;   // of this launch
};

}  // namespace flash3::hopper
