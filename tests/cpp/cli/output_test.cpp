// SPDX-License-Identifier: Apache-2.0
// What the program writes: a stdout that takes nothing, files that are whole or not there, text of
// others, and what is left of a run that is stopped.
#include <fcntl.h>

#include <csignal>

#include "program.hpp"

namespace flash3::cli {
namespace {

constexpr const char* kSmall = "--case fp32/b1/q1/k1/h1/d1/full";

class CliOutput : public Cli {
 protected:
  // Files that a run has left, other than those of the tests.
  bool left_overs() const {
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.path().filename().string().starts_with(".flash3-")) return true;
    return false;
  }

  // Starts the program, sends it SIGINT once it has printed this, and waits for it.
  Outcome interrupted(std::vector<std::string> arguments, const std::string& after) const {
    arguments.insert(arguments.begin(), FLASH3_BINARY);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGINT, SIG_DFL);
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]), close(ends[1]);
      const int err = open(path("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(err, STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    Outcome o;
    bool sent = false;
    char text[4096];
    for (ssize_t n = 0; (n = read(ends[0], text, sizeof text)) > 0;) {
      o.out.append(text, static_cast<size_t>(n));
      if (sent || o.out.find(after) == std::string::npos) continue;
      kill(child, SIGINT);
      sent = true;
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(sent) << o.out;
    o.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    o.err = slurp(path("err"));
    return o;
  }
};

TEST_F(CliOutput, StdoutThatTakesNothingIsAFailure) {
  for (const char* command : {"info", "--help", "--version", "verify --backend cpu --list"})
    for (const auto& [where, why] :
         {std::pair{" >/dev/full", "No space left on device"}, {" >&-", "Bad file descriptor"}}) {
      const Outcome o = flash3(std::string(command) + where);
      EXPECT_EQ(o.exit_code, 1) << command << where;
      EXPECT_EQ(o.err, std::string("flash3: stdout cannot be written: ") + why + "\n");
    }
}

// And a closed descriptor is not taken by a file of the run's.
TEST_F(CliOutput, ClosedStdoutDoesNotEndUpInAFile) {
  const std::string file = input("in", "F32", {1, 2, 1, 8}, {1, 2, 1, 8}, {1, 2, 1, 8});
  const Outcome o = flash3("run --backend cpu -i " + file + " -o " + path("o") + " >&-");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_EQ(stored(path("o"), "out").shape, (std::vector<int64_t>{1, 2, 1, 8}));
}

TEST_F(CliOutput, AReaderThatLeavesIsNoMessage) {
  const std::string command = "(" FLASH3_BINARY " verify --backend cpu --list --level full 2>" +
                              path("err") + "; echo $? >" + path("code") + ") | head -1 >" +
                              path("out");
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(slurp(path("code")), "141\n");
  EXPECT_EQ(slurp(path("err")), "");
  EXPECT_EQ(slurp(path("out")).find("bf16/"), 0u);
}

TEST_F(CliOutput, AFullDiskLeavesTheOldFile) {
  const std::string data = FLASH3_DATA_DIR "/minilm_layer5.safetensors";
  const std::string run = "run --backend cpu -i " + data + " -o " + path("o");
  const std::string limit = "ulimit -f 8; ";  // of 512 bytes, or of 1024
  Outcome o = flash3(run, limit);
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_EQ(o.err, "flash3: " + path("o") + ": cannot be written: File too large\n");
  EXPECT_FALSE(fs::exists(path("o")));
  std::ofstream(path("o")) << "old";
  o = flash3(run, limit);
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_EQ(slurp(path("o")), "old");
  EXPECT_FALSE(left_overs());
}

TEST_F(CliOutput, AFileIsOpenedBeforeTheWork) {
  const std::string bench = std::string("bench --backend cpu --samples 1 --sample-ms 0 ") + kSmall;
  for (const char* option : {" --json ", " --csv ", " --share "}) {
    const Outcome o = flash3(bench + option + "/nonexistent/x");
    EXPECT_EQ(o.exit_code, 2) << option;
    EXPECT_EQ(o.err, "flash3: /nonexistent/x: cannot be written: No such file or directory\n");
    EXPECT_EQ(o.out.find("fp32/b1"), std::string::npos) << "a case ran";
    expect_usage_error(bench + option + folder_.string(), "it is a folder");
    expect_usage_error(bench + option + "''", "the name of a file is empty");
  }
  expect_usage_error(bench + " --json " + path("r") + " --csv " + path("./r"),
                     "is named for two of the results' files");
  expect_usage_error("verify --record ''", "the name of a file is empty");
  expect_usage_error("trace --output '' x", "the name of a file is empty");
  EXPECT_FALSE(left_overs());
}

TEST_F(CliOutput, AFileKeepsItsPermissionsAndItsLink) {
  std::ofstream(path("r.json")).close();
  fs::permissions(path("r.json"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("r.json", path("link"));
  const std::string bench = std::string("bench --backend cpu --samples 1 --sample-ms 0 ") + kSmall;
  EXPECT_EQ(flash3(bench + " --json " + path("link") + " --csv /dev/null").exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(json::parse(slurp(path("r.json")))["results"].size(), 1u);
  EXPECT_EQ(fs::status(path("r.json")).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(CliOutput, TheInputIsNotTheOutput) {
  const std::string file = input("in", "F32", {1, 2, 1, 8}, {1, 2, 1, 8}, {1, 2, 1, 8});
  const std::string before = slurp(file);
  fs::create_symlink("in", path("link"));
  fs::create_hard_link(file, path("hard"));
  for (const char* name : {"in", "./in", "link", "hard"})
    expect_usage_error("run --backend cpu -i " + file + " -o " + path(name),
                       "is the file of --input, which it would replace");
  expect_usage_error("run --backend cpu -i " + file + " -o ''", "the name of a file is empty");
  expect_usage_error("run --backend cpu -i ''", "the name of a file is empty");
  EXPECT_EQ(slurp(file), before);
}

TEST_F(CliOutput, AnInterruptWritesWhatIsThere) {
  constexpr size_t kCases = 3000;  // seconds, were they all to run
  std::vector<std::string> arguments = {
      "bench", "--backend", "cpu",          "--samples", "1",          "--sample-ms",
      "0",     "--json",    path("r.json"), "--csv",     path("r.csv")};
  for (size_t i = 0; i < kCases; ++i)
    arguments.insert(arguments.end(), {"--case", "fp32/b1/q1/k1/h1/d1/full"});
  const Outcome o = interrupted(arguments, "\nfp32/b1/q1/k1/h1/d1/full");
  EXPECT_EQ(o.exit_code, 130) << o.err;
  const json r = json::parse(slurp(path("r.json")));
  EXPECT_GE(r["results"].size(), 1u);
  EXPECT_LT(r["results"].size(), kCases);
  EXPECT_EQ(r["metadata"]["interrupted"], true);
  EXPECT_EQ(slurp(path("r.csv")).find("case,"), 0u);
  EXPECT_FALSE(left_overs());
}

TEST_F(CliOutput, AnInterruptEndsVerify) {
  Outcome o = interrupted({"verify", "--backend", "cpu", "--random", "600", "--seed", "1"}, "seed");
  EXPECT_EQ(o.exit_code, 130) << o.err;
  EXPECT_NE(o.out.find(" passed, 0 failed\n"), std::string::npos) << o.out;
  o = interrupted({"verify", "--backend", "cpu", "--filter", "/d64/", "--jobs", "1"}, "\nok ");
  EXPECT_EQ(o.exit_code, 130) << o.err;
  EXPECT_NE(o.out.find(" not run\n"), std::string::npos) << o.out;
}

// A run that cannot print its results stops, and has nothing to put in an older file's place.
TEST_F(CliOutput, WithoutStdoutABenchStops) {
  std::ofstream(path("r.json")) << "old";
  const Outcome o = flash3(std::string("bench --backend cpu --samples 1 --sample-ms 0 ") + kSmall +
                           " --json " + path("r.json") + " >/dev/full");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.err.find("stdout cannot be written"), std::string::npos) << o.err;
  EXPECT_EQ(slurp(path("r.json")), "old");
}

// Red text, a line of one's own, a C1 sequence, and a byte that is no UTF-8.
constexpr const char* kHostile = "\x1b[31mred\nflash3: fine\u009b1m\x9b";
constexpr const char* kEscaped = R"(\x1b[31mred\x0aflash3: fine\xc2\x9b1m\x9b)";

TEST_F(CliOutput, TextOfArgumentsIsEscaped) {
  const std::string word = std::string("'") + kHostile + "'";
  for (const std::string& arguments :
       {word, "--" + word, "info " + word, "info --" + word, "run -i " + word, "explain " + word,
        "explain bf16/" + word, "compare " + word + " x", "verify --level " + word,
        "verify --backend " + word, "verify --jobs " + word, "verify --filter " + word,
        "bench --suite " + word, "bench --dtype " + word, "verify --record x --part " + word,
        "bench --json x/" + word, "run --cu-seqlens " + word + " -i x"}) {
    const Outcome o = flash3(arguments);
    EXPECT_NE(o.exit_code, 0) << arguments;
    EXPECT_EQ((o.out + o.err).find_first_of("\x1b\x9b"), std::string::npos) << o.out << o.err;
    EXPECT_EQ(o.err.find("flash3: fine\n"), std::string::npos) << o.err;
    EXPECT_EQ(o.err.find("\nflash3: fine"), std::string::npos) << o.err;
  }
  EXPECT_EQ(flash3("run -i " + word).err, std::string("flash3: ") + kEscaped + ": no such file\n");
}

TEST_F(CliOutput, TextOfFilesIsEscaped) {
  const std::vector<std::byte> ones(32);
  const std::string text = "\x1b[31mred\nflash3: fine\u009b1m";  // JSON has no other bytes
  const std::vector<int64_t> shape = {1, 1, 1, 8};
  store(path("in"),
        {{"q", "F32", shape, ones}, {"k", "F32", shape, ones}, {"v", "F32", shape, ones}},
        {{"description", text}});
  Outcome o = flash3("run --backend cpu -i " + path("in"));
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find(R"(\x1b[31mred\x0aflash3: fine\xc2\x9b1m)"), std::string::npos) << o.out;
  store(path("layout"), {}, {{"layout", text}});
  expect_usage_error("run -i " + path("layout"), R"(layout '\x1b[31mred\x0a)");

  const json report = {
      {"metadata", {{"commit", text}, {"device", text}, {"date", text}}},
      {"machine", {{text, text}}},
      {"results", json::array({{{"case", text}, {"median_ms", 1}, {"p10_ms", 1}, {"p90_ms", 1}}})}};
  json other = report;
  other["machine"] = {{text, "another"}};
  std::ofstream(path("a.json")) << report.dump();
  std::ofstream(path("b.json")) << other.dump();
  o = flash3("compare " + path("a.json") + " " + path("b.json"));
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_EQ(o.out.find('\x1b'), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("\nflash3: fine"), std::string::npos) << o.out;
}

// JSON has escapes of its own, and no bytes that are no UTF-8.
TEST_F(CliOutput, JsonIsEscapedAsJson) {
  const std::string name = path("\u009b\x9b");
  fs::copy_file(input("in", "F32", {1, 2, 1, 8}, {1, 2, 1, 8}, {1, 2, 1, 8}), name);
  const Outcome o = flash3("run --backend cpu --json -i " + name);
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find(R"(\u009b\ufffd)"), std::string::npos) << o.out;
  EXPECT_EQ(json::parse(o.out)["input"], path("\u009b\ufffd"));
}

}  // namespace
}  // namespace flash3::cli
