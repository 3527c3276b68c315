// SPDX-License-Identifier: Apache-2.0
// What a traced kernel writes: for each role of one block a list of clock stamps, each of which
// ends a phase and begins the next. Host and device, so no <cstdint>.
#pragma once

namespace flash3::device {

// The roles of a block, in the order of their lists. Consumer warpgroup w has list kConsumer + w.
enum class Role { kScheduler, kLoadQ, kLoadK, kLoadV, kTransposeV, kConsumer };
inline constexpr int kMostConsumers = 4;
inline constexpr int kRoles = int(Role::kConsumer) + kMostConsumers;

// What a role does from a stamp to its next one.
enum class Phase {
  kEnd,         // nothing any more
  kWaitTile,    // for a work tile; the scheduler: until one is wanted, and there is room for it
  kWriteTile,   // scheduler: finds the next work tile
  kBeginTile,   // consumer: which key tiles its rows see
  kWaitRoom,    // loader: for a stage that the consumers have left
  kLoad,        // loader: asks the copy engine for a tile, and waits for nothing
  kWaitV,       // transposer: for V as it comes
  kTranspose,   // transposer: V for the tensor cores
  kWaitQ,       // consumer: for Q
  kWaitK,       // consumer: for a key tile of K
  kWaitTurn,    // consumer: ping-pong; the other warpgroup issues
  kIssue,       // consumer: starts S = Q·Kᵀ of this key tile and O += P·V of the one before it
  kWaitScores,  // consumer: for S
  kMaximum,     // consumer: softmax up to the rows' maxima
  kWaitOutput,  // consumer: for O
  kExponentiate,  // consumer: the rest of the softmax
  kLastProduct,   // consumer: O += P·V of the last key tile, from its issue to its end
  kStore,         // consumer: normalises and stores O
};
inline constexpr int kPhases = int(Phase::kStore) + 1;

// At `clock`, the low half of the multiprocessor's counter, the role began `what`: a phase in the
// low byte, and above it the key tile, or the warpgroup whose Q it is.
struct alignas(8) Stamp {
  unsigned clock, what;
};

// Stamps that a role has room for. Those after them are counted and not kept.
inline constexpr int kMostStamps = 1 << 14;

struct TraceBuffer {
  unsigned counts[kRoles];  // of stamps, with those that were not kept
  unsigned multiprocessor;
  unsigned long long clocks[2], nanoseconds[2];  // when consumer 0 began and ended
  Stamp stamps[kRoles][kMostStamps];
};

// Where the traced kernel writes, and which block does.
struct TraceTarget {
  TraceBuffer* buffer;
  int block;
};

}  // namespace flash3::device
