// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flash3::cuda::sm90 {

const void* decode_schedule_function();
inline constexpr int kDecodeScheduleThreads = 256;

}  // namespace flash3::cuda::sm90
