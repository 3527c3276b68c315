// SPDX-License-Identifier: Apache-2.0
// flash3 trace: what each role of one block of a forward kernel does, and when.
#include "device/trace.hpp"

#include <optional>
#include <stdexcept>

#include "cases/internals.hpp"
#include "cli/bench_report.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/timing.hpp"
#include "cli/trace_report.hpp"
#include "cli/workbench.hpp"
#include "device/bench_kernels.hpp"

namespace flash3::cli {
namespace {

constexpr int kSamples = 11;
constexpr double kSampleSeconds = 0.01;

cases::Case case_to_trace(const TraceOptions& options) {
  const cases::Case c = parse_case(options.id);
  if (c.backward) throw UsageError(to_id(c) + " is a backward call but trace is for forward calls");
  if (const std::string reason = unavailable(FLASH3_BACKEND_HOPPER); !reason.empty())
    throw std::runtime_error("trace needs a Hopper GPU: " + reason);
  device::require_bench_kernels("trace");
  return c;
}

// Throws unless the traced kernel writes what the library's writes, bit for bit.
void check_output(const device::TracedCall& call, const flash3_tensor& out, cases::Memory& memory) {
  const size_t bytes = size_t(cases::span_of(out)) * size_t(dtype_size(out.dtype));
  const auto expected = memory.allocate(bytes);
  memory.fill(out.data, std::byte{0xFF}, bytes);
  call.library();
  memory.copy(expected.get(), out.data, bytes);
  memory.fill(out.data, std::byte{0xFF}, bytes);
  call.traced();
  if (!memory.equal(expected.get(), out.data, bytes))
    throw std::runtime_error(call.kernel + ": with stamps its output is another");
}

}  // namespace

int trace(const TraceOptions& options) {
  const cases::Case c = case_to_trace(options);
  std::optional<OutputFile> output;
  if (!options.output.empty()) output.emplace(options.output);
  Workbench workbench(FLASH3_BACKEND_HOPPER, 0);
  const PreparedCase prepared = workbench.prepare(c);
  cases::Memory& memory = workbench.memory();
  const device::TracedCall call = device::traced_call(prepared.forward, options.block, memory);
  check_output(call, prepared.forward.out, memory);
  const std::vector<Timing> timings =
      measure_interleaved(memory, {call.library, call.traced}, kSamples, kSampleSeconds, [] {});
  call.traced();
  const device::Trace recorded = call.read();

  uint32_t left_out = 0;
  for (const device::RoleTrace& role : recorded.roles) left_out += role.left_out;
  Json about = metadata(FLASH3_BACKEND_HOPPER);
  about["case"] = options.id;
  about["kernel"] = call.kernel;
  about["kernel_of_the_library"] = call.planned;
  about["block"] = recorded.block;
  about["blocks"] = call.blocks;
  about["multiprocessor"] = recorded.multiprocessor;
  about["clock_mhz"] = 1e-6 * recorded.clock_hz;
  about["ms"] = 1e3 * timings[0].median;
  about["ms_traced"] = 1e3 * timings[1].median;
  about["stamps_left_out"] = left_out;

  print("{}; flash3 {} ({}); {}\n", describe(FLASH3_BACKEND_HOPPER), flash3_version(),
        build_commit(), options.id);
  print(
      "{}, block {} of {} on multiprocessor {}, {:.0f} MHz; {:.4f} ms, with stamps {:.4f} ms "
      "({:+.1f}%)\n",
      call.kernel, recorded.block, call.blocks, recorded.multiprocessor, 1e-6 * recorded.clock_hz,
      1e3 * timings[0].median, 1e3 * timings[1].median,
      100 * (timings[1].median / timings[0].median - 1));
  if (call.kernel != call.planned)
    print("the library takes {} for this call, which is not traced\n", call.planned);
  if (left_out > 0)
    print("{} stamps had no room: the timeline ends before the block does\n", left_out);
  print("{}", trace_table(recorded));
  if (output) output->finish(chrome_trace(recorded, about));
  return 0;
}

}  // namespace flash3::cli
