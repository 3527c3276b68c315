// flash3 verify: the case table against the oracle.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/progress.hpp"
#include "cpu/parallel.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::Verdict;

std::vector<Case> select_cases(const VerifyOptions& options, flash3_backend backend) {
  std::vector<Case> list;
  for (const std::string& id : options.cases) list.push_back(parse_case(id));
  if (list.empty()) {
    const auto level = cases::parse_level(options.level);
    if (!level) throw UsageError("level '" + options.level + "' is not one of quick, full");
    list = cases::case_table(*level, cases::dtypes_of(backend));
  }
  keep_matching(options.filters, &list);
  return list;
}

std::string report(const Case& c, const Verdict& v) {
  if (!v.passed()) return fmt::format("FAIL  {}\n      {}", to_id(c), v.failure);
  std::string line =
      fmt::format("ok    {:<56} out {:.1e} <= {:.1e}", to_id(c), v.out.error, v.out.allowed);
  if (c.want_lse) line += fmt::format("  lse {:.1e} <= {:.1e}", v.lse.error, v.lse.allowed);
  return line;
}

}  // namespace

int verify(const VerifyOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  const std::vector<Case> list = select_cases(options, backend);
  if (options.list) {
    for (const Case& c : list) fmt::print("{}\n", to_id(c));
    return 0;
  }

  // The costliest first, so that no worker ends alone with one of them.
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return flops(list[a]) > flops(list[b]); });
  const int cores = available_threads();
  const int jobs = std::min(options.jobs > 0 ? options.jobs : cores, static_cast<int>(list.size()));
  cases::RunOptions run;
  run.backend = backend;
  run.repeat = options.repeat;
  run.num_threads = options.threads;
  run.oracle_threads = std::max(1, cores / jobs);

  fmt::print("{} cases on {} ({}), {} at a time\n", list.size(), flash3_backend_name(backend),
             describe(backend), jobs);
  std::vector<Verdict> verdicts(list.size());
  Progress progress("verify", list.size());
  std::mutex mutex;
  std::atomic<size_t> next{0};
  std::string broken;  // the device failed: nothing after it means anything
  const auto work = [&] {
    size_t i = 0;
    try {
      const auto memory = make_memory(backend);
      while ((i = next++) < order.size()) {
        const size_t at = order[i];
        verdicts[at] = run_case(list[at], *memory, run);
        const std::lock_guard lock(mutex);
        if (!options.quiet || !verdicts[at].passed())
          progress.print(report(list[at], verdicts[at]));
        progress.step();
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex);
      if (broken.empty())
        broken = (i < order.size() ? to_id(list[order[i]]) + ": " : std::string()) + e.what();
      next = order.size();
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int job = 0; job < jobs; ++job) workers.emplace_back(work);
  }
  if (!broken.empty()) throw std::runtime_error(broken);

  std::vector<size_t> failed;
  for (size_t i = 0; i < list.size(); ++i)
    if (!verdicts[i].passed()) failed.push_back(i);
  if (!options.quiet)
    for (const size_t i : failed) progress.print(report(list[i], verdicts[i]));
  progress.print(fmt::format("{} passed, {} failed", list.size() - failed.size(), failed.size()));
  return failed.empty() ? 0 : kExitFailure;
}

}  // namespace flash3::cli
