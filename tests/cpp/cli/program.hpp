// SPDX-License-Identifier: Apache-2.0
// The program as the command line's tests run it.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/safetensors.hpp"

namespace flash3::cli {

using nlohmann::json;
using safetensors::File;
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

inline std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("flash3_cli_test_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }

  Outcome flash3(const std::string& arguments, const char* program = FLASH3_BINARY) const {
    const std::string command =
        std::string(program) + " " + arguments + " >" + path("out") + " 2>" + path("err");
    const int status = std::system(command.c_str());
    Outcome o;
    o.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    o.out = slurp(path("out")), o.err = slurp(path("err"));
    return o;
  }

  // Whether the program finds a GPU that the hopper backend runs on.
  bool has_hopper() const {
    const json info = json::parse(flash3("info --json").out);
    for (const json& backend : info["backends"])
      if (backend["name"] == "hopper") return backend["available"] == true;
    return false;
  }

  // Exit code 2, nothing on stdout, and this in the message.
  void expect_usage_error(const std::string& arguments, const std::string& part) const {
    const Outcome o = flash3(arguments);
    EXPECT_EQ(o.exit_code, 2) << arguments << "\n" << o.out << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << arguments << "\n" << o.err;
  }

  // A file with q, k, v of these shapes, all values 1.
  std::string input(const std::string& name, const std::string& dtype, std::vector<int64_t> q,
                    std::vector<int64_t> k, std::vector<int64_t> v) const {
    File file;
    for (const auto& [tensor, shape] : {std::pair{"q", q}, std::pair{"k", k}, std::pair{"v", v}}) {
      size_t bytes = dtype == "F32" ? 4 : dtype == "I64" ? 8 : 2;
      for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
      std::vector<std::byte> data(bytes);
      for (size_t i = 0; i + 1 < bytes; i += 2)
        data[i] = std::byte{0x80}, data[i + 1] = std::byte{0x3F};
      file.tensors.push_back({tensor, dtype, shape, data});
    }
    safetensors::write(path(name), file);
    return path(name);
  }

  fs::path folder_;
};

}  // namespace flash3::cli
