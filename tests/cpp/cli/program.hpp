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
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

// A tensor of a file.
struct Stored {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
};

inline Stored stored(const std::string& path, const std::string& name) {
  const safetensors::Reader file(path);
  const safetensors::TensorInfo* t = file.header().find(name);
  if (t == nullptr) {
    ADD_FAILURE() << path << " holds no " << name;
    return {};
  }
  return {t->dtype, t->shape, file.read(*t)};
}

inline void store(const std::string& path, const std::vector<safetensors::Tensor>& tensors,
                  const safetensors::Metadata& metadata = {}) {
  OutputFile file(path);
  safetensors::write(&file, tensors, metadata);
  file.commit();
}

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

  // before: shell commands, such as a ulimit. Where arguments have a `>` of their own, that is
  // where stdout goes.
  Outcome flash3(const std::string& arguments, const std::string& before = "",
                 const char* program = FLASH3_BINARY) const {
    const std::string command =
        before + "exec " + program + " >" + path("out") + " 2>" + path("err") + " " + arguments;
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
    std::vector<std::vector<std::byte>> data;
    std::vector<safetensors::Tensor> tensors;
    for (const auto& [tensor, shape] : {std::pair{"q", q}, std::pair{"k", k}, std::pair{"v", v}}) {
      size_t bytes = dtype == "F32" ? 4 : dtype == "I64" ? 8 : 2;
      for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
      std::vector<std::byte>& values = data.emplace_back(bytes);
      for (size_t i = 0; i + 1 < bytes; i += 2)
        values[i] = std::byte{0x80}, values[i + 1] = std::byte{0x3F};
      tensors.push_back({tensor, dtype, shape, values});
    }
    store(path(name), tensors);
    return path(name);
  }

  fs::path folder_;
};

}  // namespace flash3::cli
