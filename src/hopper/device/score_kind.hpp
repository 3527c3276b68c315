// SPDX-License-Identifier: Apache-2.0
// What a kernel makes of q·k, a column of the tile tables. device/score.cuh has the functors.
#pragma once

namespace flash3::hopper {

enum class ScoreKind {
  kPlain,   // softmax_scale · q·k
  kSoftcap  // softcap · tanh(softmax_scale · q·k / softcap)
};

}  // namespace flash3::hopper
