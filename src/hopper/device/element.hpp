// SPDX-License-Identifier: Apache-2.0
// The element types of the kernels, for host and device.
#pragma once

namespace flash3::hopper {

enum class Element { kFloat16, kBFloat16, kE4m3 };

constexpr int element_bytes(Element e) { return e == Element::kE4m3 ? 1 : 2; }

}  // namespace flash3::hopper
