// SPDX-License-Identifier: Apache-2.0
// flash3 verify --record: runs all that the kernels must pass before a release, and notes in a file
// what has passed, with the hashes of the machine code that it was passed with. The file is for
// gate.kernels_verified (tests/gates/check_verified.py).
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"
#include "cli/progress.hpp"
#include "cli/record_parts.hpp"
#include "device/device.hpp"

namespace flash3::cli {
namespace {

using cases::printable;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// {name: hash}
Json hashes(const std::vector<KernelCode>& kernels) {
  Json map = Json::object();
  for (const KernelCode& k : kernels) map[k.name] = k.hash;
  return map;
}

Json names(const std::vector<KernelCode>& kernels) {
  Json list = Json::array();
  for (const KernelCode& k : kernels) list.push_back(k.name);
  return list;
}

class Record {
 public:
  // The record in this file as far as it is of this program's kernels; a new one without it.
  Record(std::string path, flash3_backend backend) : path_(std::move(path)), backend_(backend) {
    if (backend == FLASH3_BACKEND_HOPPER) kernels_ = own_machine_code();
    begin();
    const OutputFile can_be_written(path_);  // hours before it is
    if (!fs::exists(path_)) return;
    const Json old = read();
    if (old["backend"] != json_["backend"])
      throw UsageError(format("{} is a record of the {} backend", printable(path_),
                              printable(old["backend"].get<std::string>())));
    if (old["compiler"] != json_["compiler"] || old["kernels"] != json_["kernels"])
      print("{} is of other machine code than this program's: a new record begins\n",
            printable(path_));
    else
      json_ = old;
  }

  // Whether launches are seen, before hours are spent on parts that would count for nothing.
  void check_launch_log(const VerifyOptions& options) const {
    VerifyOptions one = options;
    one.cases = {"bf16/b1/q9/k9/h1/d64/full"};
    device::start_launch_log();
    verify_cases(one);
    const std::set<std::string> launched = device::stop_launch_log();
    if (std::none_of(kernels_.begin(), kernels_.end(),
                     [&](const KernelCode& k) { return launched.contains(k.function); }))
      throw std::runtime_error(format(
          "no kernel of this program is among those that it launched: {}", join(launched, ", ")));
  }

  // What it lacks of a part, in words; "" if nothing.
  std::string missing(const RecordPart& part) const {
    const Json& parts = json_["parts"];
    if (!parts.contains(part.name)) return "all of it";
    return part.missing ? part.missing(parts[part.name]) : "";
  }

  void run(const RecordPart& part, const VerifyOptions& options) {
    print("\n== {}\n", part.name);
    const auto start = std::chrono::steady_clock::now();
    device::start_launch_log();
    const Json result = part.run(options, json_["parts"].value(part.name, Json::object()));
    const std::set<std::string> launched = device::stop_launch_log();
    throw_if_stopped();  // not all of the part has run
    const Json about = metadata(backend_);
    Json entry{{"command", result["command"]}};
    for (const char* key : {"commit", "date", "device", "driver"})
      if (about.contains(key)) entry[key] = about[key];
    entry["seconds"] =
        std::chrono::round<std::chrono::seconds>(std::chrono::steady_clock::now() - start).count();
    entry.update(result);
    json_["parts"][part.name] = entry;
    if (part.checks_results) note_launched(launched);
    write();
  }

  // A kernel that no part with checked results has launched counts as not verified.
  void print_summary() const {
    std::string list;
    for (const RecordPart& part : record_parts())
      if (const std::string what = missing(part); !what.empty())
        list += format("\n  {}: {}", part.name, what);
    print("\n{}: {} kernels, {} not launched", printable(path_), json_["kernels"].size(),
          json_["not_launched"].size());
    for (const Json& name : json_["not_launched"]) print("\n  {}", name.get<std::string>());
    print("\n{}\n", list.empty() ? "all parts are there" : "missing:" + list);
  }

 private:
  void begin() {
    json_ = {{"backend", flash3_backend_name(backend_)},
             {"compiler", kernel_compiler()},
             {"kernels", hashes(kernels_)},
             {"not_launched", names(kernels_)},
             {"parts", Json::object()}};
  }

  Json read() const {
    const Json json = read_json(path_);
    const auto demand = [&](bool holds, const std::string& rule) {
      if (!holds)
        throw UsageError(
            format("{} is not a record of flash3 verify --record: {}", printable(path_), rule));
    };
    demand(json.is_object(), "it is not a JSON object");
    for (const char* name : {"backend", "compiler"})
      demand(json.contains(name) && json[name].is_string(), format("it has no text '{}'", name));
    for (const char* name : {"kernels", "parts"})
      demand(json.contains(name) && json[name].is_object(), format("it has no object '{}'", name));
    demand(json.contains("not_launched") && json["not_launched"].is_array(),
           "it has no list 'not_launched'");
    for (const Json& name : json["not_launched"])
      demand(name.is_string(), "'not_launched' holds something that is not a name");
    for (const Json& part : json["parts"]) demand(part.is_object(), "a part is not an object");
    for (const RecordPart& part : record_parts())
      if (part.missing && json["parts"].contains(part.name)) part.missing(json["parts"][part.name]);
    return json;
  }

  void note_launched(const std::set<std::string>& functions) {
    Json left = Json::array();
    for (const KernelCode& k : kernels_) {
      const Json& old = json_["not_launched"];
      const bool was_left = std::find(old.begin(), old.end(), Json(k.name)) != old.end();
      if (was_left && !functions.contains(k.function)) left.push_back(k.name);
    }
    json_["not_launched"] = left;
  }

  // Whole or not at all: a run that is cut short leaves the last part's file.
  void write() const { OutputFile(path_).finish(json_.dump(2) + "\n"); }

  std::string path_;
  flash3_backend backend_;
  std::vector<KernelCode> kernels_;  // those of the CPU have no record to keep
  Json json_;
};

// The parts that are asked for, once; without any all that the record lacks, until it does not.
void run_parts(const VerifyOptions& options, Record* record) {
  const auto& wanted = options.parts;
  for (const RecordPart& part : record_parts()) {
    if (std::find(wanted.begin(), wanted.end(), part.name) != wanted.end())
      record->run(part, options);
    // A part that takes several runs has the asked seed in the first of them.
    for (VerifyOptions asked = options; wanted.empty() && !record->missing(part).empty();
         asked.seed.reset())
      record->run(part, asked);
  }
}

void check_names(const std::vector<std::string>& wanted) {
  std::vector<std::string> known;
  for (const RecordPart& part : record_parts()) known.push_back(part.name);
  for (const std::string& name : wanted)
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError(
          format("part {} is not one of {}", cases::in_quotes(name), join(known, ", ")));
}

}  // namespace

int record(const VerifyOptions& options) {
  check_names(options.parts);
  VerifyOptions asked = options;
  if (asked.backend == "auto") asked.backend = "hopper";  // never by chance a trial
  const flash3_backend backend = resolve_backend(asked.backend);
  if (backend == FLASH3_BACKEND_HOPPER && !asked.filters.empty())
    throw UsageError("--filter with --record: a record is of all cases");
  try {
    Record record(options.record, backend);
    if (backend == FLASH3_BACKEND_HOPPER) record.check_launch_log(asked);
    run_parts(asked, &record);
    record.print_summary();
  } catch (const Json::exception& e) {  // what an older or another program noted of a part
    throw UsageError(format("{} is not a record of flash3 verify --record: {}",
                            printable(options.record), e.what()));
  } catch (const PartFailed& e) {
    print(stderr, "flash3: {}; nothing is noted in {}\n", e.what(), printable(options.record));
    return kExitFailure;
  }
  return 0;
}

}  // namespace flash3::cli
