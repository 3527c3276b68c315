// SPDX-License-Identifier: Apache-2.0
// The reader takes good files, and names what is wrong with bad ones. Every rule of the format.
#include "cli/safetensors.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

namespace flash3::safetensors {
namespace {

std::vector<std::byte> file_of(const std::string& header, size_t data_bytes) {
  std::vector<std::byte> bytes(8 + header.size() + data_bytes);
  const uint64_t length = header.size();
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(length >> (8 * i));
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  for (size_t i = 0; i < data_bytes; ++i) bytes[8 + header.size() + i] = static_cast<std::byte>(i);
  return bytes;
}

std::string error_of(std::span<const std::byte> bytes) {
  try {
    parse(bytes);
  } catch (const FileError& e) {
    return e.what();
  }
  return "";
}

std::string error_of(const std::string& header, size_t data_bytes) {
  return error_of(file_of(header, data_bytes));
}

void expect_error(const std::string& header, size_t data_bytes, const std::string& part) {
  const std::string error = error_of(header, data_bytes);
  EXPECT_NE(error.find(part), std::string::npos) << header << "\n  gave: " << error;
}

File sample() {
  File file;
  file.metadata = {{"layout", "bshd"}, {"quote", "\"ü\n"}};
  file.tensors.push_back({"q", "BF16", {1, 2, 3, 1}, std::vector<std::byte>(12, std::byte{7})});
  file.tensors.push_back({"empty", "F16", {0, 5}, {}});
  file.tensors.push_back({"k", "F32", {}, std::vector<std::byte>(4, std::byte{9})});
  return file;
}

TEST(Safetensors, WhatIsWrittenReadsBack) {
  const File in = sample(), out = parse(serialize(in));
  EXPECT_EQ(out.metadata, in.metadata);
  ASSERT_EQ(out.tensors.size(), in.tensors.size());
  for (const Tensor& t : in.tensors) {
    const Tensor* found = out.find(t.name);
    ASSERT_NE(found, nullptr) << t.name;
    EXPECT_EQ(found->dtype, t.dtype);
    EXPECT_EQ(found->shape, t.shape);
    EXPECT_EQ(found->data, t.data);
  }
  EXPECT_EQ(out.find("absent"), nullptr);
}

TEST(Safetensors, OrderAndPaddingAreFree) {
  const File file = parse(file_of(R"({"b":{"shape":[2],"data_offsets":[4,6],"dtype":"U8"},
      "a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )",
                                  6));
  EXPECT_EQ(file.find("b")->data, (std::vector<std::byte>{std::byte{4}, std::byte{5}}));
  EXPECT_TRUE(parse(file_of("{}", 0)).tensors.empty());
}

TEST(Safetensors, HeaderLength) {
  EXPECT_NE(error_of(std::vector<std::byte>(7)).find("has 7 bytes"), std::string::npos);
  auto bytes = serialize(sample());
  bytes[7] = std::byte{0xFF};
  EXPECT_NE(error_of(bytes).find("more than the format's limit"), std::string::npos);
  bytes[7] = std::byte{0};
  bytes[2] = std::byte{1};
  EXPECT_NE(error_of(bytes).find("bytes follow"), std::string::npos);
}

TEST(Safetensors, HeaderText) {
  expect_error("", 0, "not a JSON object");
  expect_error("[]", 0, "not a JSON object");
  expect_error("{", 0, "not valid JSON");
  expect_error("{}x", 0, "not valid JSON");
  expect_error("{\"\xff\":1}", 0, "not valid JSON");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                   "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
               1, "names 'a' twice");
  expect_error(R"({"__metadata__":[]})", 0, "__metadata__ is not an object");
  expect_error(R"({"__metadata__":{"a":1}})", 0, "is not a string");
  const std::string deep(200'000, '[');
  expect_error("{\"a\":" + deep + std::string(200'000, ']') + "}", 0, "not an object");
  expect_error("{\"a\":" + deep, 0, "not valid JSON");
}

TEST(Safetensors, Entries) {
  expect_error(R"({"a":1})", 0, "not an object");
  expect_error(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "dtype is missing");
  expect_error(R"({"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype 'X9'");
  expect_error(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "shape is missing");
  expect_error(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "not a size");
  expect_error(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1, "not a size");
  expect_error(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
               "more than 8 dimensions");
  expect_error(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
               "overflows");
  expect_error(R"({"a":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0,
               "overflows");
  expect_error(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "not a pair");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "not a pair");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1, "not a pair");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "begin at 1");
  expect_error(R"({"a":{"dtype":"F16","shape":[3],"data_offsets":[0,5]}})", 5,
               "span 5 bytes, but dtype and shape take 6");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}})", 1,
               "unknown field 'x'");
}

TEST(Safetensors, Ranges) {
  const std::string a = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  expect_error(a + "}", 3, "ends at byte 4, but the file holds 3");
  expect_error(a + "}", 5, "1 bytes behind the last tensor");
  expect_error(a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6, "(overlap)");
  expect_error(a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})", 9, "(hole)");
  expect_error(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})",
      1, "but the file holds 1");
}

// Anything but a good file or a FileError ends this test.
TEST(Safetensors, MutatedFilesNeverCrash) {
  const auto good = serialize(sample());
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 30'000; ++round) {
    auto bytes = good;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes && !bytes.empty(); ++i) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<std::byte>(random()); break;
        case 1: bytes[at] = static_cast<std::byte>("{}[]:,\"0192-e."[random() % 14]); break;
        case 2: bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at)); break;
        default: bytes.resize(at + 1); break;
      }
    }
    accepted += error_of(bytes).empty();
  }
  EXPECT_GT(accepted, 0);  // changes inside the data are no errors
  EXPECT_LT(accepted, 15'000);
}

TEST(Safetensors, FilesOnDisk) {
  const auto folder = std::filesystem::temp_directory_path();
  const std::string path = folder / ("flash3_safetensors_test_" + std::to_string(getpid()));
  write(path, sample());
  EXPECT_EQ(read(path).tensors.size(), 3u);
  std::filesystem::resize_file(path, 40);
  try {
    read(path);
    ADD_FAILURE() << "a truncated file was read";
  } catch (const FileError& e) {
    EXPECT_EQ(std::string(e.what()).find(path + ": not a valid safetensors file"), 0u) << e.what();
  }
  std::filesystem::remove(path);
  EXPECT_THROW(read(path), FileError);
  EXPECT_THROW(read(folder), FileError);
  EXPECT_THROW(write("/nonexistent/x", sample()), FileError);
}

}  // namespace
}  // namespace flash3::safetensors
