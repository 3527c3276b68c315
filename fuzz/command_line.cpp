// SPDX-License-Identifier: Apache-2.0
// The command line: arguments, one a line. Parsed, and then what runs no attention is done: explain
// and the lists.
#include <sstream>
#include <vector>

#include "bytes.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"

namespace {

using namespace flash3;

int nothing() { return 0; }

// Without the files that it would write. What a case does is counted query by query: too many take
// long.
int list(cli::BenchOptions options) {
  constexpr int64_t kMostQueries = 1 << 20;
  options.json_file.clear(), options.csv_file.clear(), options.share_file.clear();
  for (const std::string& id : options.cases)
    if (const cases::Case c = cli::parse_case(id);
        c.seq_q > kMostQueries || c.batch > kMostQueries / std::max<int64_t>(1, c.seq_q))
      return 0;
  return cli::bench(options);
}

const cli::Commands& commands() {
  static const cli::Commands all{
      [](const cli::InfoOptions&) { return nothing(); },
      [](const cli::RunOptions&) { return nothing(); },
      [](const cli::BenchOptions& options) { return options.list ? list(options) : nothing(); },
      [](const cli::CompareOptions&) { return nothing(); },
      [](const cli::VerifyOptions& options) {
        return options.list && options.inputs.empty() ? cli::verify(options) : nothing();
      },
      cli::explain,
      [](const cli::TraceOptions&) { return nothing(); }};
  return all;
}

}  // namespace

// What the commands print is not looked at.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  return std::freopen("/dev/null", "w", stdout) ? 0 : 1;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> words{"flash3"};
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string word; std::getline(lines, word);)
    words.push_back(word.c_str());  // no NUL inside, as of any argv
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());

  std::ostringstream out, err;
  try {
    const int code = cli::parse_and_run(static_cast<int>(argv.size()), argv.data(), "version",
                                        commands(), out, err);
    FUZZ_CHECK(code == 0 || code == cli::kExitUsage, err.str());
    FUZZ_CHECK(code == 0 || !err.str().empty(), "a failure without a message");
  } catch (const cli::UsageError& e) {
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
  } catch (const std::runtime_error& e) {  // what the library says of a case
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
  }
  return 0;
}
