// The copy engine's description of a tensor: a CUtensorMap that host and device can hold without
// the driver's header.
#pragma once

namespace flash3::hopper {

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace flash3::hopper
