// SPDX-License-Identifier: Apache-2.0
// The program flash3, and with FLASH3_RUN_ALONE flash3_run, which has the command run alone.
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <sstream>
#include <system_error>

#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/progress.hpp"

namespace {

using namespace flash3::cli;

Commands commands() {
#ifdef FLASH3_RUN_ALONE
  return {{}, run, {}, {}, {}, {}, {}};
#else
  return {info, run, bench, compare, verify, explain, trace};
#endif
}

constexpr int kKilled = 128;  // what a shell adds to a signal's number
constexpr int kPipe = kKilled + SIGPIPE;

int fail(const std::string& what, int exit_code) {
  print(stderr, "flash3: {}\n", what);
  return exit_code;
}

int run_command(int argc, char** argv) {
  std::ostringstream out, err;
  const auto command = [&] {
    return parse_and_run(argc, argv, std::string(flash3_version()) + " (" + build_commit() + ")",
                         commands(), out, err);
  };
  int code = 0;
  try {
    code = command();
  } catch (const Stopped&) {
    return kExitFailure;  // main() knows why
  } catch (const FileError& e) {
    return fail(e.what(), kExitUsage);
  } catch (const UsageError& e) {
    return fail(e.what(), kExitUsage);
  } catch (const std::system_error& e) {
    // A pipe that is written to by name is as stdout is.
    return e.code() == std::errc::broken_pipe ? kPipe : fail(e.what(), kExitFailure);
  } catch (const std::exception& e) {
    return fail(sentence_of(e), kExitFailure);
  }
  print("{}", out.str());
  print(stderr, "{}", err.str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  prepare_to_stop();
  const int code = run_command(argc, argv);
  flush_output();
  if (const int signal = stop_signal()) return kKilled + signal;
  if (output_error() == EPIPE) return kPipe;  // the reader has seen enough
  if (output_error() != 0)
    return fail(std::string("stdout cannot be written: ") + std::strerror(output_error()),
                kExitFailure);
  return code;
}
