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

/// Bytes that the schedule of this call takes. Throws Error.
inline size_t schedule_size(const Forward& args) {
  const flash3_forward_params p = args.params();
  size_t bytes = 0;
  Result(flash3_forward_schedule_size(&p, &bytes)).or_throw();
  return bytes;
}

/// Makes the schedule of this call in memory of the caller's. Throws Error.
inline Schedule schedule(const Forward& args, void* data, size_t size) {
  const flash3_forward_params p = args.params();
  Schedule made{data, size, 0};
  Result(flash3_forward_schedule(&p, &made)).or_throw();
  return made;
}

}  // namespace flash3
