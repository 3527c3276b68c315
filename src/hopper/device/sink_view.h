// SPDX-License-Identifier: Apache-2.0
// Where the sinks lie. Plain data: host and device.
#pragma once

namespace flash3::hopper {

enum class SinkType { kFloat32, kFloat16, kBFloat16 };

// [heads_q]; data null: none.
struct SinkRow {
  const void* data;
  SinkType type;
};

}  // namespace flash3::hopper
