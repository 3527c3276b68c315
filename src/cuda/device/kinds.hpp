// SPDX-License-Identifier: Apache-2.0
// What kernels are compiled for, columns of the tile tables. Host and device.
#pragma once

namespace flash3::cuda {

// A block can have so much shared memory, in bytes.
inline constexpr int kMostSharedBytes = 227 * 1024;

// The element types of q, k and v.
enum class Element { kFloat16, kBFloat16, kE4m3 };

constexpr int element_bytes(Element e) { return e == Element::kE4m3 ? 1 : 2; }

// What a kernel makes of q·k.
enum class ScoreKind {
  kPlain,   // softmax_scale · q·k
  kSoftcap  // softcap · tanh(softmax_scale · q·k / softcap)
};

}  // namespace flash3::cuda
