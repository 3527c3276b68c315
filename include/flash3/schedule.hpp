// SPDX-License-Identifier: Apache-2.0
/** @file
 * flash3 for C++20: schedules that the caller keeps, a header-only layer over schedule.h.
 *
 *     flash3::Schedule schedule = flash3::schedule(args, memory, size);  // once a step
 *     args.schedule = &schedule;
 *     for (each layer) flash3::forward(args);                            // its own addresses
 */
#pragma once

#include <cstddef>

#include "flash3/flash3.hpp"
#include "flash3/schedule.h"

namespace flash3 {

/// A schedule: plain data, as in schedule.h.
using Schedule = flash3_schedule;

/// Finds the bytes that the schedule of this call takes; sets nothing if it fails.
inline Result try_schedule_size(const Forward& args, size_t* bytes) {
  const flash3_forward_params p = args.params();
  return Result(flash3_forward_schedule_size(&p, bytes));
}

/// Makes the schedule of this call in memory of the caller's; sets nothing if it fails.
inline Result try_schedule(const Forward& args, void* data, size_t size, Schedule* schedule) {
  const flash3_forward_params p = args.params();
  Schedule made{data, size, 0};
  Result result(flash3_forward_schedule(&p, &made));
  if (result) *schedule = made;
  return result;
}

#if FLASH3_EXCEPTIONS

/// Bytes that the schedule of this call takes. Throws Error.
inline size_t schedule_size(const Forward& args) {
  return detail::or_throw<size_t>([&](size_t* bytes) { return try_schedule_size(args, bytes); });
}

/// Makes the schedule of this call in memory of the caller's. Throws Error.
inline Schedule schedule(const Forward& args, void* data, size_t size) {
  return detail::or_throw<Schedule>(
      [&](Schedule* made) { return try_schedule(args, data, size, made); });
}

#endif  // FLASH3_EXCEPTIONS

}  // namespace flash3
