// SPDX-License-Identifier: Apache-2.0
#include "cpu/work_list.hpp"

#include <algorithm>

namespace flash3::cpu {
namespace {

// Taking a task costs a fraction of a microsecond; so many multiply-adds take ten or more.
constexpr double kLeastWork = 5e5;
// But each thread gets so many tasks, where there are as many units.
constexpr int kTasksPerThread = 8;

}  // namespace

void WorkList::close(int threads) {
  const auto sooner = [](const Block& a, const Block& b) { return a.urgency > b.urgency; };
  if (!std::is_sorted(blocks_.begin(), blocks_.end(), sooner))
    std::stable_sort(blocks_.begin(), blocks_.end(), sooner);

  const double enough = std::min(kLeastWork, work_ / (kTasksPerThread * threads));
  double work = 0;
  for (int64_t unit = 0; unit < units(); ++unit) {
    work += block_of(unit).cost;
    if (work < enough && unit + 1 < units()) continue;
    starts_.push_back(unit + 1);
    work = 0;
  }
}

}  // namespace flash3::cpu
