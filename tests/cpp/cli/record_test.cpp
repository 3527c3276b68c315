// SPDX-License-Identifier: Apache-2.0
// flash3 verify --record on the CPU, as a trial: what it notes, and when. What the gate makes of a
// record is in tests/gates/check_rules.py.
#include "program.hpp"

namespace flash3::cli {
namespace {

class RecordTest : public Cli {
 protected:
  Outcome record(const std::string& arguments) const {
    return flash3("verify --backend cpu --jobs 2 --record " + path("record.json") + " " +
                  arguments);
  }
  json noted() const { return json::parse(slurp(path("record.json"))); }

  // A compute-sanitizer on PATH that has the program list its cases, then says this and ends with
  // this code; racecheck with 99, if it has words of its own.
  void fake_sanitizer(const std::string& says, int exit_code,
                      const std::string& of_racecheck = "") const {
    const std::string program = path("compute-sanitizer");
    std::ofstream(program) << "#!/bin/sh\necho \"$@\" >>" << path("calls")
                           << "\ntool=$2\nwhile [ \"${1#-}\" != \"$1\" ]; do shift 2; done\n"
                           << "\"$@\" --list || exit 1\n";
    std::ofstream more(program, std::ios::app);
    if (!of_racecheck.empty())
      more << "[ $tool != racecheck ] || { echo '" << of_racecheck << "'; exit 99; }\n";
    more << "echo '" << says << "'\nexit " << exit_code << "\n";
    fs::permissions(program, fs::perms::owner_all);
  }
  Outcome with_path(const std::string& folder, const std::string& arguments) const {
    const std::string old = std::getenv("PATH");
    setenv("PATH", (folder + ":" + old).c_str(), 1);
    const Outcome o = record(arguments);
    setenv("PATH", old.c_str(), 1);
    return o;
  }
};

TEST_F(RecordTest, PartsComeOneByOne) {
  const Outcome first = record("--part quantize --filter /d2x1/");
  ASSERT_EQ(first.exit_code, 0) << first.out << first.err;
  EXPECT_NE(first.out.find("missing:\n  full: all of it\n  backward: all of it\n"),
            std::string::npos)
      << first.out;
  const json one = noted();
  EXPECT_EQ(one["backend"], "cpu");
  EXPECT_TRUE(one["kernels"].empty());
  ASSERT_EQ(one["parts"].size(), 1u);
  const json& part = one["parts"]["quantize"];
  EXPECT_EQ(part["command"], "flash3 verify --quantize --level quick");
  EXPECT_GT(part["passed"], 0);
  EXPECT_EQ(part["failed"], 0);
  for (const char* key : {"commit", "date", "device", "seconds"}) EXPECT_TRUE(part.contains(key));

  const Outcome second = record("--part full,backward --filter /q65/k65/ --filter /h2x1/");
  ASSERT_EQ(second.exit_code, 0) << second.out << second.err;
  EXPECT_EQ(noted()["parts"].size(), 3u);
  EXPECT_EQ(noted()["parts"]["quantize"], part) << "not run again";
}

TEST_F(RecordTest, AFailureIsNotNoted) {
  ASSERT_EQ(record("--part quantize --filter /d2x1/").exit_code, 0);
  const std::string before = slurp(path("record.json"));
  fake_sanitizer("========= ERROR SUMMARY: 1 error", 99);
  const Outcome o = with_path(folder_, "--part sanitizer");
  EXPECT_EQ(o.exit_code, 1) << o.out;
  EXPECT_NE(o.err.find("sanitizer: racecheck: exit code 99"), std::string::npos) << o.err;
  EXPECT_NE(o.out.find("ERROR SUMMARY: 1 error"), std::string::npos) << o.out;
  EXPECT_EQ(slurp(path("record.json")), before);
}

TEST_F(RecordTest, AToolThatDidNotLookIsAFailure) {
  fake_sanitizer("nothing to say", 0);
  EXPECT_EQ(with_path(folder_, "--part sanitizer").exit_code, 1);
  EXPECT_FALSE(fs::exists(path("record.json")));
}

TEST_F(RecordTest, SanitizerRunsEveryTool) {
  fake_sanitizer("========= ERROR SUMMARY: 0 errors", 0);
  const Outcome o = with_path(folder_, "--part sanitizer");
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  const json part = noted()["parts"]["sanitizer"];
  EXPECT_EQ(part["tools"].size(), 4u);
  EXPECT_GT(part["passed"], 40);
  const std::string calls = slurp(path("calls"));
  for (const std::string tool : part["tools"])
    EXPECT_NE(calls.find("--tool " + tool + " --error-exitcode 99 "), std::string::npos) << calls;
  EXPECT_NE(calls.find(" verify --backend cpu --quiet --jobs 1 --case "), std::string::npos);
}

// Nothing of such a file is run on, and it stays as it is.
TEST_F(RecordTest, RefusesWhatIsNoRecord) {
  const json good = {{"backend", "cpu"},
                     {"compiler", ""},
                     {"kernels", json::object()},
                     {"not_launched", json::array()},
                     {"parts", json::object()}};
  json bad_backend = good, bad_names = good, bad_parts = good, no_parts = good, bad_random = good,
       empty_random = good, no_seed = good;
  bad_backend["backend"] = 3;
  bad_names["not_launched"] = {1};
  bad_parts["parts"] = {{"full", "passed"}};
  no_parts.erase("parts");
  empty_random["parts"] = {{"random", json::object()}};
  no_seed["parts"] = {{"random", {{"runs", json::array({json::object()})}}}};
  bad_random["parts"] = {{"random", {{"runs", 7}}}};
  for (const auto& [text, why] :
       {std::pair<std::string, std::string>{"[]", "it is not a JSON object"},
        {"{", "is not JSON: "},
        {std::string(100, '['), "has more than 16 levels"},
        {bad_backend.dump(), "it has no text 'backend'"},
        {bad_names.dump(), "'not_launched' holds something that is not a name"},
        {bad_parts.dump(), "a part is not an object"},
        {no_parts.dump(), "it has no object 'parts'"},
        {bad_random.dump(), "is not a record of flash3 verify --record"},
        {no_seed.dump(), "is not a record of flash3 verify --record"},
        {empty_random.dump(), "is not a record of flash3 verify --record"}}) {
    std::ofstream(path("record.json")) << text;
    const Outcome o = record("--part random --random 0.001");
    EXPECT_EQ(o.exit_code, 2) << o.out << o.err;
    EXPECT_NE(o.err.find(why), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("record.json"), std::string::npos) << o.err;
    EXPECT_EQ(slurp(path("record.json")), text);
  }
}

TEST_F(RecordTest, NoSanitizer) {
  const std::string command = "env -u CUDA_HOME PATH=/nonexistent " FLASH3_BINARY
                              " verify --backend cpu --record " +
                              path("record.json") + " --part sanitizer 2>" + path("err");
  EXPECT_NE(std::system(command.c_str()), 0);
  EXPECT_NE(slurp(path("err")).find("neither on PATH nor in $CUDA_HOME/bin"), std::string::npos);
}

TEST_F(RecordTest, RepeatsEveryCase) {
  const Outcome o = record("--part repeat --filter /d64/ --filter /b300/");
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_EQ(noted()["parts"]["repeat"]["repetitions"], 2);
  EXPECT_EQ(noted()["parts"]["repeat"]["passed"], 2);
}

TEST_F(RecordTest, RandomProblemsAddUp) {
  for (const int runs : {1, 2}) {
    const Outcome o = record("--part random --random 0.3");
    ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
    EXPECT_NE(o.out.find("\n  random: "), std::string::npos) << o.out;
    EXPECT_NE(o.out.find(" of 100000 forward problems, "), std::string::npos) << o.out;
    const json part = noted()["parts"]["random"];
    ASSERT_EQ(part["runs"].size(), static_cast<size_t>(runs));
    EXPECT_EQ(part["runs"].back()["seed"], runs);
    EXPECT_EQ(part["passed"], part["forward"].get<int64_t>() + part["backward"].get<int64_t>() +
                                  part["quantize"].get<int64_t>());
  }
  const json before = noted();
  EXPECT_EQ(record("--part random --random 0.3 --seed 2").exit_code, 2);
  EXPECT_EQ(noted(), before);
  ASSERT_EQ(record("--part random --random 0.3 --seed 7").exit_code, 0);
  EXPECT_GT(noted()["parts"]["random"]["passed"], before["parts"]["random"]["passed"]);
}

// A slow machine does not reach the counts in one run: the next one has the next seed.
TEST_F(RecordTest, GoesOnWithTheNextSeed) {
  ASSERT_EQ(record("--part random --random 0.3").exit_code, 0);
  json file = noted();
  for (const char* part :
       {"full", "backward", "ragged", "ragged-backward", "masks", "masks-backward", "quantize",
        "decode", "accuracy", "repeat", "sanitizer"})
    file["parts"][part] = {{"passed", 1}, {"failed", 0}};
  json& random = file["parts"]["random"];
  random["forward"] = 100'000 - 3 * random["forward"].get<int64_t>();
  random["backward"] = 50'000;
  std::ofstream(path("record.json")) << file;
  const Outcome o = record("--random 0.3 --seed 50");
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("all parts are there"), std::string::npos) << o.out;
  const json runs = noted()["parts"]["random"]["runs"];
  ASSERT_GE(runs.size(), 3u) << runs;
  for (size_t i = 1; i < runs.size(); ++i) EXPECT_EQ(runs[i]["seed"], 49 + i);
}

TEST_F(RecordTest, RefusesWhatIsNoRecordOfThisBackend) {
  const std::string arguments = "verify --backend cpu --record " + path("record.json");
  std::ofstream(path("record.json")) << "{}";
  expect_usage_error(arguments, "is not a record of flash3 verify --record");
  std::ofstream(path("record.json"))
      << R"({"backend": "hopper", "compiler": "", "kernels": {}, "not_launched": [], "parts": {}})";
  expect_usage_error(arguments, "is a record of the hopper backend");
  expect_usage_error(arguments + " --part fulll", "part 'fulll' is not one of full, backward");
  expect_usage_error("verify --part full", "--part requires --record");
  expect_usage_error(arguments + " --backward", "excludes");
}

TEST_F(RecordTest, IsOfAGpuUnlessAskedOtherwise) {
  if (has_hopper()) GTEST_SKIP() << "it would begin";
  const Outcome o = flash3("verify --record " + path("record.json"));
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.err.find("hopper backend cannot run here"), std::string::npos) << o.err;
  EXPECT_FALSE(fs::exists(path("record.json")));
}

// cli/record_parts.hpp says which.
TEST_F(RecordTest, HazardsThatAreNoneAreCounted) {
  const std::string known =
      "========= Error: Potential WAR hazard detected at __shared__ 0x30de8 in block (0,0,0) :\n"
      "=========     Read Thread (383,0,0) at flash3::cuda::sm90::OperandsFp8<X>::v_scale(const Y "
      "&)\n"
      "=========     Write Thread (0,0,0) at flash3::cuda::copy_async(float *, const float "
      "*)+0xec80\n"
      "========= \n"
      "10 passed, 0 failed\n"
      "========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)";
  std::string other = known;
  other.replace(other.find("WAR"), 3, "RAW");
  fake_sanitizer("========= ERROR SUMMARY: 0 errors", 0, other);
  EXPECT_EQ(with_path(folder_, "--part sanitizer").exit_code, 1);

  fake_sanitizer("========= ERROR SUMMARY: 0 errors", 0, known);
  const Outcome o = with_path(folder_, "--part sanitizer");
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_EQ(noted()["parts"]["sanitizer"]["hazards_that_are_none"], 20);  // one a list
}

}  // namespace
}  // namespace flash3::cli
