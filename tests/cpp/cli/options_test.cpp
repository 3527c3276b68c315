// SPDX-License-Identifier: Apache-2.0
// The arguments of the program, without the program.
#include <gtest/gtest.h>

#include <sstream>

#include "cases/case.hpp"
#include "cli/commands.hpp"

namespace flash3::cli {
namespace {

// What stderr says of these words, split at spaces; "" if a command would run.
std::string message(const std::string& line) {
  std::istringstream text(line);
  std::vector<std::string> words{"flash3"};
  for (std::string word; text >> word;) words.push_back(word);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const auto nothing = [](const auto&) { return 0; };
  std::ostringstream out, err;
  const int code =
      parse_and_run(static_cast<int>(argv.size()), argv.data(), "version",
                    {nothing, nothing, nothing, nothing, nothing, nothing, nothing}, out, err);
  EXPECT_EQ(code, err.str().empty() ? 0 : kExitUsage) << line;
  return err.str();
}

// No comparison holds for NaN, and so no rule of the kind "not below" refuses it.
TEST(Options, NumbersAreFiniteAndInRange) {
  const char* const options[] = {"verify --random=",
                                 "verify --jobs=",
                                 "verify --threads=",
                                 "verify --repeat=",
                                 "verify --random 1 --count=",
                                 "verify --accuracy --length=",
                                 "bench --sample-ms=",
                                 "bench --sustained=",
                                 "bench --samples=",
                                 "bench --threads=",
                                 "compare a b --at-least=",
                                 "run -i x --threads=",
                                 "trace x --block="};
  for (const std::string option : options) {
    for (const char* number : {"nan", "-nan", "inf", "-inf", "1e999", "x", "1x", "-1"})
      EXPECT_NE(message(option + number).find("is not a number in the range"), std::string::npos)
          << option << number << ": " << message(option + number);
    EXPECT_EQ(message(option + "1"), "");
  }
  EXPECT_EQ(message("verify --random -0.5"),
            "flash3: --random: '-0.5' is not a number in the range 0.001 to 10000000\n"
            "Run with --help for more information.\n");
}

// A number that float32 does not have would be another, or the default.
TEST(Options, ScalesAreWhatFloat32Has) {
  for (const std::string option : {"--softmax-scale", "--softcap"}) {
    for (const char* number : {"nan", "inf", "-inf", "1e-60", "1e-46", "1e39", "x"})
      EXPECT_EQ(message("run -i x " + option + " " + number)
                    .find("flash3: " + option + ": '" + number + "' is neither 0 nor a number of "),
                0u)
          << number;
    for (const char* number : {"0", "1e-37", "0.125", "20", "-3"})
      EXPECT_EQ(message("run -i x " + option + " " + number), "") << number;
  }
  for (const char* option : {"softcapnan", "softcapinf", "scalenan", "scaleinf", "scale1e-60"}) {
    std::string error;
    EXPECT_FALSE(cases::parse_id(std::string("bf16/b1/q1/k1/h1/d8/full/") + option, &error));
    EXPECT_NE(error.find(std::string("found '") + option + "'"), std::string::npos) << error;
  }
}

TEST(Options, TheNearestNameIsTold) {
  EXPECT_EQ(
      message("frobnicate"),
      "flash3: there is no command 'frobnicate'; did you mean compare? The commands are info, "
      "run, bench, compare, verify, explain, trace\n");
  EXPECT_NE(message("verfy --list").find("did you mean verify?"), std::string::npos);
  EXPECT_NE(message("bench --jsn x").find("--jsn; did you mean --json?"), std::string::npos);
  EXPECT_NE(message("verify --fliter=x").find("did you mean --filter?"), std::string::npos);
  EXPECT_EQ(message("info --frobnicate").find("did you mean"), std::string::npos);
  EXPECT_NE(message("x" + std::string(1'000'000, 'y')).find("…'; did you mean"), std::string::npos);
}

}  // namespace
}  // namespace flash3::cli
