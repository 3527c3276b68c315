// SPDX-License-Identifier: Apache-2.0
// The program flash3, and with FLASH3_RUN_ALONE flash3_run, which has of its commands run alone.
#include <cstdio>
#include <exception>
#include <iostream>

#include "cli/environment.hpp"
#include "cli/options.hpp"
#include "cli/safetensors.hpp"

namespace {

using namespace flash3::cli;

Commands commands() {
#ifdef FLASH3_RUN_ALONE
  return {{}, run, {}, {}, {}, {}, {}};
#else
  return {info, run, bench, compare, verify, explain, trace};
#endif
}

int fail(const std::exception& e, int exit_code) {
  std::fprintf(stderr, "flash3: %s\n", e.what());
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv, std::string(flash3_version()) + " (" + build_commit() + ")",
                         commands(), std::cout, std::cerr);
  } catch (const flash3::safetensors::FileError& e) {
    return fail(e, kExitUsage);
  } catch (const UsageError& e) {
    return fail(e, kExitUsage);
  } catch (const std::exception& e) {
    return fail(e, kExitFailure);
  }
}
