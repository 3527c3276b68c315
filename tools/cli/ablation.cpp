// SPDX-License-Identifier: Apache-2.0
// flash3 bench --ablation: what each part of the forward kernel's schedule is worth.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "cases/internals.hpp"
#include "cases/kernel_input.hpp"
#include "cases/tensors.hpp"
#include "cases/text.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"
#include "cli/workbench.hpp"
#include "device/bench_kernels.hpp"
#include "device/device.hpp"

namespace flash3::cli {
namespace {

// The variants differ by the order in which they add up, and by the points at which they round P,
// to float16, or to e4m3 at 2.6 % each; the outputs are means of thousands of N(0, 1) values, 0.1
// at most.
constexpr double kMaxDifference = 1e-3, kMaxFp8Difference = 8e-3;

void check_options(const BenchOptions& options) {
  if (!options.dtype.empty() && options.dtype != "fp16" && options.dtype != "e4m3")
    throw UsageError("--dtype " + cases::printable(options.dtype) +
                     " but --ablation is for fp16 and e4m3");
  if (options.backend == "cpu")
    throw UsageError("--ablation needs a Hopper GPU, and --backend is cpu");
  resolve_backend(options.backend);  // a name that there is not
  if (const std::string reason = unavailable(FLASH3_BACKEND_HOPPER); !reason.empty())
    throw std::runtime_error("--ablation needs a Hopper GPU: " + reason);
  device::require_bench_kernels("--ablation");
}

// Each variant's output held against the first one's, the library's.
class OutputCheck {
 public:
  OutputCheck(const flash3_tensor& out, double allowed, cases::Memory& memory)
      : out_(out), allowed_(allowed), memory_(memory), count_(size_t(cases::span_of(out))) {}

  // The largest difference. Throws if it is too large, or if the outputs are no figures at all.
  double operator()(const device::AblationVariant& variant) {
    const std::vector<uint16_t> fill(count_, 0xFFFF);  // NaN: shows what is never written
    memory_.copy_in(out_.data, fill.data(), fill.size() * sizeof(uint16_t));
    variant.call();
    std::vector<uint16_t> bits(count_);
    memory_.copy_out(bits.data(), out_.data, bits.size() * sizeof(uint16_t));
    if (expected_.empty()) expected_ = bits;
    double largest = 0, difference = 0;
    for (size_t i = 0; i < count_; ++i) {
      const double got = float16_to_float(bits[i]), want = float16_to_float(expected_[i]);
      largest = std::max(largest, std::abs(got));
      const double d = std::abs(got - want);
      difference =
          std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(difference, d);
    }
    if (largest == 0 || !(difference <= allowed_))
      throw std::runtime_error(
          format("{}: its output differs from the library kernel's by up to {:.1e}, {:.1e} is "
                 "allowed; its largest value is {:.3g}",
                 variant.name, difference, allowed_, largest));
    return difference;
  }

 private:
  const flash3_tensor out_;
  const double allowed_;
  cases::Memory& memory_;
  const size_t count_;
  std::vector<uint16_t> expected_;
};

// Prints the variants' table and returns its rows. flops: of a call.
Json report(const std::vector<device::AblationVariant>& variants,
            const std::vector<Timing>& timings, const std::vector<double>& differences,
            double flops) {
  constexpr const char* kRow = "{:<26} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9}\n";
  print(kRow, "schedule", "tile", "ms", "TFLOP/s", "spread", "of full", "paper", "of full",
        "max diff");
  const auto tflops = [&](size_t i) { return flops / timings[i].median * 1e-12; };
  Json rows = Json::array();
  for (size_t i = 0; i < variants.size(); ++i) {
    const device::AblationVariant& v = variants[i];
    const Timing& t = timings[i];
    const bool in_paper = v.paper_tflops > 0;
    const double share = tflops(i) / tflops(0),
                 paper_share = in_paper ? v.paper_tflops / variants[0].paper_tflops : 0;
    print(kRow, v.name, v.tile, format("{:.4f}", 1e3 * t.median), format("{:.1f}", tflops(i)),
          format("{:.1f}%", 100 * (t.p90 - t.p10) / t.median), format("{:.3f}", share),
          in_paper ? format("{:.0f}", v.paper_tflops) : "-",
          in_paper ? format("{:.3f}", paper_share) : "-", format("{:.1e}", differences[i]));
    Json row{{"schedule", v.name},
             {"tile", v.tile},
             {"median_ms", 1e3 * t.median},
             {"p10_ms", 1e3 * t.p10},
             {"p90_ms", 1e3 * t.p90},
             {"samples", t.samples},
             {"calls_per_sample", t.calls_per_sample},
             {"tflops", tflops(i)},
             {"share_of_full", share},
             {"max_difference", differences[i]}};
    if (in_paper) row["paper_tflops"] = v.paper_tflops, row["paper_share_of_full"] = paper_share;
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

int bench_ablation(const BenchOptions& options) {
  check_options(options);
  std::optional<OutputFile> file;
  if (!options.json_file.empty()) file.emplace(options.json_file);
  const bool fp8 = options.dtype == "e4m3";
  const char* const id = fp8 ? device::kFp8AblationCase : device::kAblationCase;
  const cases::Case c = parse_case(id);
  const std::string how =
      format("median of {} interleaved samples of {} ms", options.samples, options.sample_ms);
  print("{}; flash3 {} ({}); {}; {}\n", describe(FLASH3_BACKEND_HOPPER), flash3_version(),
        build_commit(), id, how);

  Workbench workbench(FLASH3_BACKEND_HOPPER, 0);
  PreparedCase prepared = workbench.prepare(c);
  // As flash3_quantize makes them: with scales of other kinds the output changes its units.
  std::optional<PreparedCase> in_16_bits;
  std::optional<cases::Fp8Input> input;
  if (fp8) {
    in_16_bits = workbench.prepare(parse_case(device::kAblationCase));
    input.emplace(workbench.memory(), in_16_bits->forward, cases::Scales::kBlock, /*rotate=*/true);
    check(input->quantize());
    input->apply(&prepared.forward);
  }
  const auto variants = device::ablation_variants(prepared.forward);
  OutputCheck check_output(prepared.forward.out, fp8 ? kMaxFp8Difference : kMaxDifference,
                           workbench.memory());
  std::vector<double> differences;
  std::vector<std::function<void()>> calls;
  for (const device::AblationVariant& variant : variants) {
    differences.push_back(check_output(variant));
    calls.push_back(variant.call);
  }
  const std::vector<Timing> timings =
      measure_interleaved(workbench.memory(), calls, options.samples, 1e-3 * options.sample_ms,
                          [&] { workbench.monitor()->start(); });
  const device::Reading reading = workbench.monitor()->stop();

  const Json results = report(variants, timings, differences, flops(c));
  if (!fp8)
    print("{}: small tiles, because two tiles of scores and 96 keys exceed the registers\n",
          "three stages");
  if (reading.samples > 0)
    print("{:.0f} MHz, {:.0f} W{} over all of them\n", 1e-6 * reading.clock_hz,
          reading.mean_watts(),
          reading.throttled ? ", held below its clock by power or heat," : "");
  if (file) {
    Json about = metadata(FLASH3_BACKEND_HOPPER);
    about["case"] = id;
    about["how"] = how;
    add_reading(reading, &about);
    file->finish(report_text(Json{{"metadata", about}, {"ablation", results}}));
  }
  return 0;
}

}  // namespace flash3::cli
