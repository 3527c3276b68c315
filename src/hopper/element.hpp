// The 16-bit element types of the kernels, for host and device.
#pragma once

namespace flash3::hopper {

enum class Element { kFloat16, kBFloat16 };

}  // namespace flash3::hopper
