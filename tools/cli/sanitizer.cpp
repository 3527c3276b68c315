// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/progress.hpp"
#include "cli/record_parts.hpp"

namespace flash3::cli {
namespace {

constexpr std::string_view kHazard = "========= Error: ", kWarning = "========= Warning: ",
                           kSummary = "RACECHECK SUMMARY: ", kEnd = "========= \n";

// From `begin` to where the next report begins, or all of them end.
std::string_view report_at(std::string_view output, size_t begin) {
  const std::string_view rest = output.substr(begin);
  return rest.substr(0, rest.find(kEnd));
}

// Whether the line of a thread, which begins with `start`, names this function.
bool is_at(std::string_view report, std::string_view start, std::string_view function) {
  const size_t at = report.find(start);
  if (at == report.npos) return false;
  return report.substr(at, report.find('\n', at) - at).find(function) != std::string_view::npos;
}

// Whether the read names no function but an FP8 kernel: Element::kE4m3 is 2.
bool is_in_fp8_kernel(std::string_view report) {
  return is_at(report, "Read Thread", " at void flash3::cuda::sm90::forward_kernel<") &&
         is_at(report, "Read Thread", ", (flash3::cuda::Element)2>>(");
}

bool is_of_scales(std::string_view report) {
  const bool in_operands = is_at(report, "Read Thread", "flash3::cuda::sm90::OperandsFp8<");
  return report.find("Potential WAR hazard detected at __shared__") != report.npos &&
         ((in_operands && is_at(report, "Read Thread", ">::v_scale(const ")) ||
          (in_operands && is_at(report, "Read Thread", ">::begin_key_tile<")) ||
          is_in_fp8_kernel(report)) &&
         (is_at(report, "Write Thread", " at flash3::cuda::copy_async(float *, ") ||
          is_at(report, "Write Thread", " at flash3::cuda::sm90::copy_scale(float *, "));
}

bool is_of_latent_rows(std::string_view report) {
  return report.find("Potential RAW hazard detected at __shared__") != report.npos &&
         (is_at(report, "Read Thread", "::take_max(int, flash3::cuda::sm90::LatentSoftmax<") ||
          is_at(report, "Read Thread", "::end_sums(flash3::cuda::sm90::LatentSoftmax<")) &&
         (is_at(report, "Write Thread", " at void flash3::cuda::sm90::latent_kernel<") ||
          is_at(report, "Write Thread", " at flash3::cuda::sm90::LatentSoftmax<"));
}

bool is_of_listed_tiles(std::string_view report) {
  return report.find("Potential WAR hazard detected at __shared__") != report.npos &&
         (is_at(report, "Read Thread", " at flash3::cuda::sm90::noted_tile(") ||
          is_at(report, "Read Thread", " at flash3::cuda::sm90::MaskTile::")) &&
         is_at(report, "Write Thread", " at flash3::cuda::sm90::note_tile(");
}

// What the summary counts; −1 without one.
int displayed_hazards(std::string_view output) {
  const size_t at = output.find(kSummary);
  if (at == output.npos) return -1;
  const char* const first = output.data() + at + kSummary.size();
  int count = -1;
  std::from_chars(first, output.data() + output.size(), count);
  return count;
}

}  // namespace

Races check_races(const std::string& output) {
  Races races;
  for (const std::string_view start : {kHazard, kWarning}) {
    for (size_t at = output.find(start); at != output.npos; at = output.find(start, at + 1)) {
      const std::string_view report = report_at(output, at);
      if (is_of_scales(report) || is_of_latent_rows(report) || is_of_listed_tiles(report)) {
        ++races.known;
      } else if (races.unknown.empty()) {
        races.unknown = report;
      }
    }
  }
  if (races.unknown.empty() && displayed_hazards(output) != races.known)
    races.unknown = "the summary counts other hazards than were printed";
  return races;
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kTools[] = {"memcheck", "racecheck", "synccheck", "initcheck"};
constexpr int kFound = 99;         // the exit code of a tool that found something
constexpr int kCoresAProcess = 2;  // the oracle's, and the tool's own work on the host

fs::path find_sanitizer() {
  const std::string name = "compute-sanitizer";
  const char* path = std::getenv("PATH");
  const char* home = std::getenv("CUDA_HOME");
  std::string folders = path ? path : "";
  if (home) folders += format(":{}/bin", home);
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const fs::path program = fs::path(folders.substr(begin, end - begin)) / name;
    if (end > begin && access(program.c_str(), X_OK) == 0) return program;
    begin = end + 1;
  }
  throw PartFailed("sanitizer: compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin");
}

struct Outcome {
  int exit_code = -1;  // −1: ended by a signal
  std::string output;
};

// Runs a program to its end; what it prints goes through this file.
Outcome run_program(const std::vector<std::string>& words, const fs::path& file) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, file.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int code = posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (code != 0) throw PartFailed(format("{}: {}", words[0], std::strerror(code)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::ifstream text(file);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, {std::istreambuf_iterator<char>(text), {}}};
}

// A folder for the processes' output, gone with it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = fs::temp_directory_path() / "flash3_sanitizer_XXXXXX";
    if (mkdtemp(name.data()) == nullptr)
      throw PartFailed(format("{}: {}", name, std::strerror(errno)));
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;  // what is left there does no harm
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// The exit code alone could be that of a tool that never looked.
bool found_nothing(const Outcome& o) {
  return o.exit_code == 0 && o.output.find("SUMMARY: 0 ") != std::string::npos;
}

// Hazards that are known to be none; 0 if there are others.
int known_hazards(const Outcome& o) {
  const Races races = check_races(o.output);
  const bool calls_passed = o.output.find(" passed, 0 failed") != std::string::npos;
  return o.exit_code == kFound && calls_passed && races.unknown.empty() ? races.known : 0;
}

}  // namespace

nlohmann::ordered_json run_sanitizer_tools(const VerifyOptions& options,
                                           const std::vector<std::vector<std::string>>& lists) {
  const fs::path sanitizer = find_sanitizer(), self = fs::read_symlink("/proc/self/exe");
  struct Process {
    const char* tool;
    const std::vector<std::string>* cases;
  };
  std::vector<Process> processes;  // the slowest tool first
  for (const char* tool : {"racecheck", "memcheck", "initcheck", "synccheck"})
    for (const auto& list : lists) processes.push_back({tool, &list});
  const int wanted = options.jobs > 0 ? options.jobs : available_cores() / kCoresAProcess;
  const int jobs = std::clamp(wanted, 1, static_cast<int>(processes.size()));

  const TemporaryFolder folder;
  Progress progress("sanitizer", processes.size());
  progress.print(format("{} lists of cases under each of 4 tools of {}, {} at a time", lists.size(),
                        sanitizer.string(), jobs));
  std::mutex mutex;
  std::atomic<size_t> next{0};
  std::string failure;  // the first one
  int64_t known = 0;
  const auto work = [&] {
    for (size_t i = 0; (i = next++) < processes.size();) {
      const auto& [tool, cases] = processes[i];
      std::vector<std::string> words = {
          sanitizer, "--tool", tool,        "--error-exitcode", std::to_string(kFound),
          self,      "verify", "--backend", options.backend,    "--quiet",
          "--jobs",  "1"};
      const bool races = std::strcmp(tool, "racecheck") == 0;
      if (races)
        words.insert(words.begin() + 5,
                     {"--racecheck-report", "hazard", "--print-limit", "1000000"});
      for (const std::string& id : *cases) words.insert(words.end(), {"--case", id});
      const Outcome o = run_program(words, folder.path() / std::to_string(i));
      const std::lock_guard lock(mutex);
      progress.step();
      if (found_nothing(o)) continue;
      if (const int hazards = races ? known_hazards(o) : 0; hazards > 0) {
        known += hazards;
        continue;
      }
      progress.print(format("FAIL  {}\n{}", join(words, " "), o.output));
      if (failure.empty()) failure = format("{}: exit code {}", tool, o.exit_code);
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int job = 0; job < jobs; ++job) workers.emplace_back(work);
  }
  if (!failure.empty()) throw PartFailed("sanitizer: " + failure);
  size_t cases = 0;
  for (const auto& list : lists) cases += list.size();
  progress.print(format("{} cases under each tool, nothing found but {} hazards known to be false",
                        cases, known));
  return {{"command", "compute-sanitizer --tool … flash3 verify --case …"},
          {"tools", kTools},
          {"passed", cases},
          {"failed", 0},
          {"hazards_that_are_none", known}};  // cli/record_parts.hpp
}

}  // namespace flash3::cli
