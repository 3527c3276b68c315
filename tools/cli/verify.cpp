// SPDX-License-Identifier: Apache-2.0
// flash3 verify: the case table, or the accuracy experiment, against the oracle.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "cases/accuracy.hpp"
#include "cases/runner.hpp"
#include "cases/table.hpp"
#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/progress.hpp"
#include "cli/run_input.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::CheckResult;

// Whether this backend takes FP8.
bool takes_fp8(flash3_backend backend) {
  Case c;
  c.dtype = FLASH3_FLOAT8_E4M3;
  auto question = cases::make_question(c);
  question.backend = backend;
  return flash3_forward_supported(&question) == FLASH3_OK;
}

// The cases whose keys may lie in pages or other elements, with keys that do.
std::vector<Case> cached(const std::vector<Case>& table) {
  std::vector<Case> list;
  for (Case c : table) {
    if (!c.used_k || c.packed_k || c.has_cache()) continue;
    c.batch_idx = list.size() % 3 == 0;
    if (!c.batch_idx) c.page_size = list.size() % 3 == 1 ? 16 : 100;
    list.push_back(c);
  }
  return list;
}

std::vector<Case> mask_cases(cases::Level level, std::span<const flash3_dtype> dtypes,
                             flash3_backend backend, bool backward) {
  auto list = cases::mask_case_table(level, dtypes, backward);
  if (backward || !takes_fp8(backend)) return list;
  for (const Case& c : cases::fp8_mask_case_table()) list.push_back(c);
  if (backend != FLASH3_BACKEND_CPU) return list;
  for (const Case& c : cached(list)) list.push_back(c);
  return list;
}

// The table that these options ask for.
std::vector<Case> table_of(const VerifyOptions& options, flash3_backend backend,
                           cases::Level level) {
  const auto dtypes = cases::dtypes_of(backend);
  if (options.accuracy) return cases::accuracy_cases(level, options.lengths);
  if (options.quantize) return cases::quantize_case_table(level, dtypes);
  const auto with_added = [&](std::vector<Case> list) {
    return cases::with_added_tensors(std::move(list), backend);
  };
  if (options.decode) return with_added(cases::cache_case_table(level, dtypes));
  if (options.masks) return mask_cases(level, dtypes, backend, options.backward);
  if (options.backward)
    return with_added(options.ragged ? cases::ragged_backward_case_table(level, dtypes)
                                     : cases::backward_case_table(level, dtypes));
  auto list = with_added(options.ragged ? cases::ragged_case_table(level, dtypes)
                                        : cases::case_table(level, dtypes));
  if (!takes_fp8(backend)) return list;
  for (const Case& c : with_added(cases::fp8_case_table(level, options.ragged))) list.push_back(c);
  return list;
}

std::vector<Case> select_cases(const VerifyOptions& options, flash3_backend backend) {
  std::vector<Case> list;
  for (const std::string& id : options.cases) {
    list.push_back(parse_case(id));
    list.back().backward |= options.backward;
  }
  if (list.empty()) {
    const auto level = cases::parse_level(options.level);
    if (!level)
      throw UsageError("level " + cases::in_quotes(options.level) + " is not one of quick, full");
    list = table_of(options, backend, *level);
  }
  if (options.accuracy)
    for (const Case& c : list)
      if (const std::string why = accuracy_objection(c); !why.empty())
        throw UsageError("case '" + to_id(c) + "': " + why);
  keep_matching(options.filters, &list);
  return list;
}

std::string report(const Case& c, const CheckResult& v) {
  if (!v.passed()) return format("FAIL  {}\n      {}", to_id(c), v.failure);
  const auto part = [](const char* name, const cases::TensorCheck& t) {
    return format("{} {:.2f}", name, t.fraction);
  };
  if (c.quantize)
    return format("ok    {:<56} q {:.4f}  k {:.4f}  v {:.4f} of the largest", to_id(c), v.q.error,
                  v.k.error, v.v.error);
  std::string line = format("ok    {:<56} ", to_id(c));
  if (c.backward) {
    line += format("{}  {}  {}", part("dq", v.dq), part("dk", v.dk), part("dv", v.dv));
    if (c.sink != cases::Sink::kNone) line += "  " + part("dsink", v.dsink);
  } else {
    line += part("out", v.out);
    if (c.want_lse) line += "  " + part("lse", v.lse);
  }
  for (const auto& [name, check] : v.added) line += "  " + part(name.c_str(), check);
  return line + " of its bound";
}

std::string accuracy_header() {
  return format(
      "out against float64, on data with outliers; RMSE must be <= {} x that of naive, a plain\n"
      "implementation that rounds scores and probabilities to the tensors' dtype\n"
      "      {:<48} {:>10} {:>10} {:>6} {:>10}",
      cases::kAccuracyBar, "case", "naive RMSE", "RMSE", "ratio", "max error");
}

std::string accuracy_row(const Case& c, const CheckResult& v) {
  if (v.out.naive_rmse <= 0) return report(c, v);  // it failed before there was anything to compare
  const std::string row =
      format("{:<5} {:<48} {:>10.2e} {:>10.2e} {:>6.2f} {:>10.1e}", v.passed() ? "ok" : "FAIL",
             to_id(c), v.out.naive_rmse, v.out.rmse, v.out.rmse / v.out.naive_rmse, v.out.error);
  return v.passed() ? row : row + "\n      " + v.failure;
}

// All cases, `jobs` at a time, or those that were begun before a stop was requested; done is called
// with each one's place in the list as soon as it is done, by one thread at a time.
std::vector<std::optional<CheckResult>> run_all(
    const std::vector<Case>& list, flash3_backend backend, const VerifyOptions& options, int jobs,
    const std::function<void(size_t, const CheckResult&)>& done) {
  // The costliest first, so that no worker ends alone with one of them.
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return flops(list[a]) > flops(list[b]); });
  cases::RunOptions run;
  run.backend = backend;
  run.repeat = options.repeat;
  run.num_threads = options.threads;
  run.naive = options.accuracy;
  run.oracle_threads = std::max(1, available_cores() / jobs);

  std::vector<std::optional<CheckResult>> results(list.size());
  std::mutex mutex;
  std::atomic<size_t> next{0};
  std::string broken;  // the device failed: nothing after it means anything
  MemoryBudget budget(MemoryBudget::of_machine());
  const auto work = [&] {
    size_t i = 0;
    try {
      const auto memory = make_memory(backend);
      while (!stop_requested() && (i = next++) < order.size()) {
        const Case& c = list[order[i]];
        const MemoryBudget::Share share(budget, cases::host_bytes(c));
        CheckResult result = run_case(c, *memory, run);
        if (options.accuracy && result.passed()) result.failure = check_accuracy(result.out);
        const std::lock_guard lock(mutex);
        done(order[i], result);
        results[order[i]] = std::move(result);
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex);
      if (broken.empty())
        broken = (i < order.size() ? to_id(list[order[i]]) + ": " : std::string()) + sentence_of(e);
      next = order.size();
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int job = 0; job < jobs; ++job) workers.emplace_back(work);
  }
  if (!broken.empty()) throw std::runtime_error(broken);
  return results;
}

// One row of the FP8 table; 1 if it failed.
size_t print_fp8_row(const std::string& name, const cases::Fp8Accuracy& a, cases::Fp8Demand demand,
                     bool quiet) {
  const std::string failure = check_fp8_accuracy(a, demand);
  if (quiet && failure.empty()) return 0;
  print("{:<5} {:<48} {:>9.2e} {:>9.2e} {:>9.2e}", failure.empty() ? "ok" : "FAIL", name, a.rms,
        a.half, a.plain);
  for (const double rmse : a.rmse) print(" {:>9.2e}", rmse);
  print("\n");
  if (!failure.empty()) print("      {}\n", failure);
  flush_output();  // a run that is cut short keeps its lines
  return failure.empty() ? 0 : 1;
}

// FP8 against float64 of the 16-bit tensors, on the paper's data and on files. The rows that passed
// and failed.
VerifyCounts verify_fp8_accuracy(const std::vector<Case>& list, flash3_backend backend,
                                 const VerifyOptions& options) {
  const auto memory = make_memory(backend);
  const int threads = options.inputs.empty() ? 0 : options.threads;
  print(
      "\nFP8: out against float64 of the tensors before they became FP8, RMSE; `both` is what\n"
      "flash3_quantize is for, and must be <= {:.1e} from head dim 128 on without a mask up to {}\n"
      "queries, of which all are compared, and <= {:.2f} of the RMS of out anywhere\n"
      "      {:<48} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
      cases::kFp8Bar, cases::kAllRows, cases::kFp8RelativeBar, "case", "RMS out", "16 bit", "plain",
      "tensor", "blocks", "rotated", "both");
  VerifyCounts counts;
  const auto count = [&](size_t failed) { counts.failed += failed, counts.passed += 1 - failed; };
  for (const std::string& path : options.inputs) {
    if (stop_requested()) break;
    RunOptions file;
    file.input = path;
    const Input in = load_input(file);
    const flash3_tensor out = view_of(nullptr, in.c.dtype, out_shape(in), in.c.layout);
    const auto params = cases::make_params(in.c, in.q, in.k, in.v, out, {});
    const auto measured = measure_fp8_accuracy(params, *memory, backend, threads);
    count(print_fp8_row(cases::printable(path.substr(path.rfind('/') + 1)), measured,
                        cases::Fp8Demand::kOwn, options.quiet));
  }
  for (const Case& c : list) {
    if (stop_requested()) break;
    const cases::ForwardTensors t = cases::make_forward_tensors(c);
    const auto params = cases::make_params(c, t.q.view, t.k.view, t.v.view, t.out.view, {});
    const auto measured = measure_fp8_accuracy(params, *memory, backend, threads);
    // The bars say nothing of other cases. The paper's is absolute, and out of some rows of this
    // data is half as large again as that of others.
    const bool paper = c.head_dim >= 128 && !c.causal && c.seq_q <= cases::kAllRows;
    const cases::Fp8Demand demand = !options.cases.empty() ? cases::Fp8Demand::kNone
                                    : paper                ? cases::Fp8Demand::kPaper
                                                           : cases::Fp8Demand::kOwn;
    count(print_fp8_row(to_id(c), measured, demand, options.quiet));
  }
  return counts;
}

}  // namespace

VerifyCounts verify_cases(const VerifyOptions& options) {
  const flash3_backend backend = resolve_backend(options.backend);
  if (!options.inputs.empty()) return verify_fp8_accuracy({}, backend, options);
  std::vector<Case> list = select_cases(options, backend);
  if (options.list) {
    for (const Case& c : list) print("{}\n", to_id(c));
    return {};
  }
  const std::vector<Case> fp8_list = options.accuracy ? list : std::vector<Case>();
  // Some rows of many tell nothing that the check of 16 bits could use.
  if (!options.lengths.empty())
    std::erase_if(list, [](const Case& c) { return c.seq_q > cases::kAllRows; });

  const int wanted = options.jobs > 0 ? options.jobs : available_cores();
  const int jobs = std::clamp(static_cast<int>(list.size()), 1, wanted);
  print("{} cases on {} ({}), {} at a time\n", std::max(list.size(), fp8_list.size()),
        flash3_backend_name(backend), describe(backend), jobs);
  Progress progress("verify", list.size());
  const std::vector<std::optional<CheckResult>> results =
      run_all(list, backend, options, jobs, [&](size_t i, const CheckResult& result) {
        // The accuracy table is printed whole, in its own order.
        if (!options.accuracy && (!options.quiet || !result.passed()))
          progress.print(report(list[i], result));
        progress.step();
      });

  if (options.accuracy && !list.empty()) progress.print(accuracy_header());
  VerifyCounts counts;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!results[i]) continue;
    const bool passed = results[i]->passed();
    ++(passed ? counts.passed : counts.failed);
    if (options.accuracy && (!options.quiet || !passed))
      progress.print(accuracy_row(list[i], *results[i]));
    if (!options.accuracy && !options.quiet && !passed)
      progress.print(report(list[i], *results[i]));
  }
  size_t total = list.size();
  if (takes_fp8(backend) && !fp8_list.empty()) {
    const VerifyCounts fp8 = verify_fp8_accuracy(fp8_list, backend, options);
    counts.passed += fp8.passed, counts.failed += fp8.failed;
    total += fp8_list.size();
  }
  const size_t left = total - counts.passed - counts.failed;
  progress.print(format("{} passed, {} failed{}", counts.passed, counts.failed,
                        left > 0 ? format(", {} not run", left) : ""));
  return counts;
}

int verify(const VerifyOptions& options) {
  if (!options.record.empty()) return record(options);
  if (options.random > 0) return verify_random(options, resolve_backend(options.backend));
  return verify_cases(options).failed == 0 ? 0 : kExitFailure;
}

}  // namespace flash3::cli
