// SPDX-License-Identifier: Apache-2.0
// The reader takes good files, and names what is wrong with bad ones. Every rule of the format.
#include "cli/safetensors.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
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
    parse(bytes, bytes.size());
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

const std::vector<std::byte> kSevens(12, std::byte{7}), kNines(4, std::byte{9});
const Metadata kMetadata = {{"layout", "bshd"}, {"quote", "\"ü\n"}};
const std::vector<Tensor> kTensors = {
    {"q", "BF16", {1, 2, 3, 1}, kSevens}, {"empty", "F16", {0, 5}, {}}, {"k", "F32", {}, kNines}};

std::vector<std::byte> sample() {
  const std::string header = header_of(kTensors, kMetadata);
  std::vector<std::byte> bytes(header.size());
  std::memcpy(bytes.data(), header.data(), header.size());
  for (const Tensor& t : kTensors) bytes.insert(bytes.end(), t.data.begin(), t.data.end());
  return bytes;
}

class SafetensorsFile : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::string error() const {
    try {
      const Reader file(path_);
    } catch (const FileError& e) {
      return e.what();
    }
    return "";
  }
  const std::string path_ = std::filesystem::temp_directory_path() /
                            ("flash3_safetensors_test_" + std::to_string(getpid()));
};

TEST_F(SafetensorsFile, WhatIsWrittenReadsBack) {
  cli::OutputFile file(path_);
  write(&file, kTensors, kMetadata);
  EXPECT_FALSE(std::filesystem::exists(path_)) << "before it is whole";
  file.commit();
  const Reader out(path_);
  EXPECT_EQ(out.header().metadata, kMetadata);
  ASSERT_EQ(out.header().tensors.size(), kTensors.size());
  for (const Tensor& t : kTensors) {
    const TensorInfo* found = out.header().find(t.name);
    ASSERT_NE(found, nullptr) << t.name;
    EXPECT_EQ(found->dtype, t.dtype);
    EXPECT_EQ(found->shape, t.shape);
    EXPECT_EQ(out.read(*found), std::vector<std::byte>(t.data.begin(), t.data.end()));
  }
  EXPECT_EQ(out.header().find("absent"), nullptr);
}

TEST(Safetensors, OrderAndPaddingAreFree) {
  const auto bytes = file_of(R"({"b":{"shape":[2],"data_offsets":[4,6],"dtype":"U8"},
      "a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )",
                             6);
  const Header header = parse(bytes, bytes.size());
  EXPECT_EQ(bytes[header.data + header.find("b")->begin], std::byte{4});
  EXPECT_EQ(header.find("b")->bytes(), 2u);
  EXPECT_TRUE(parse(file_of("{}", 0), 10).tensors.empty());
}

TEST(Safetensors, HeaderLength) {
  EXPECT_NE(error_of(std::vector<std::byte>(7)).find("has 7 bytes"), std::string::npos);
  auto bytes = sample();
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
  expect_error(R"({"__metadata__":{"m":"1","n":"2","m":"3"}})", 0, "names 'm' twice");
  expect_error(R"({"a\u001b[31m":1})", 0, R"(tensor 'a\x1b[31m': )");
  expect_error(R"({"__metadata__":[]})", 0, "__metadata__ is not an object");
  expect_error(R"({"__metadata__":{"a":1}})", 0, "is not a string");
  const std::string deep(200'000, '[');
  expect_error("{\"a\":" + deep + std::string(200'000, ']') + "}", 0, "not an object");
  expect_error("{\"a\":" + deep, 0, "not an object");
}

TEST(Safetensors, Entries) {
  expect_error(R"({"a":1})", 0, "not an object");
  expect_error(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "dtype is missing");
  expect_error(R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype is not a string");
  expect_error(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
               "has dtype twice");
  expect_error(R"({"a":{"dtype":"U8","shape":{},"data_offsets":[0,1]}})", 1, "not an array");
  expect_error(R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "not a size");
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
  expect_error(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "data_offsets is missing");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "not a pair");
  expect_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "not a pair");
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
  expect_error(a + "}", 5, "1 bytes after the last tensor");
  expect_error(a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6, "(overlap)");
  expect_error(a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})", 9, "(hole)");
  expect_error(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})",
      1, "but the file holds 1");
}

// Anything but a good file or a FileError ends this test.
TEST(Safetensors, MutatedFilesNeverCrash) {
  const auto good = sample();
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

TEST_F(SafetensorsFile, OnDisk) {
  EXPECT_EQ(error(), path_ + ": no such file");
  const auto bytes = sample();
  std::ofstream(path_, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  EXPECT_EQ(error(), "");
  const Reader file(path_);
  std::filesystem::resize_file(path_, 40);
  EXPECT_EQ(error().find(path_ + ": not a valid safetensors file"), 0u) << error();
  try {  // another process cut it off after its header was read
    file.read(*file.header().find("k"));
    ADD_FAILURE() << "read past the end";
  } catch (const FileError& e) {
    EXPECT_EQ(e.what(), path_ + ": has become shorter while it was read");
  }
  EXPECT_THROW(Reader(std::filesystem::temp_directory_path()), FileError);
  EXPECT_THROW(cli::OutputFile("/nonexistent/x"), FileError);
}

// The limits that SECURITY.md names. Work is counted: how long it takes depends on the machine.

std::vector<std::byte> many_names(size_t count) {
  std::string header = "{";
  for (size_t i = 0; i < count; ++i)
    header += (i > 0 ? "," : "") + std::string("\"layer") + std::to_string(i * 7919 % count) +
              R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(i) + "," +
              std::to_string(i + 1) + "]}";
  return file_of(header + "}", count);
}

TEST(SafetensorsLimits, WorkGrowsWithTheHeader) {
  for (const size_t count : {1000, 40'000}) {
    const auto bytes = many_names(count);
    const Header header = parse(bytes, bytes.size());
    ASSERT_EQ(header.tensors.size(), count);
    const double logarithm = std::log2(static_cast<double>(count));
    EXPECT_LE(header.tokens, 15 * count + 2);
    EXPECT_LE(static_cast<double>(header.comparisons), 4 * static_cast<double>(count) * logarithm);
  }
}

TEST(SafetensorsLimits, OneNameAmongManyTwice) {
  std::string header = "{";
  for (const char* name : {"z", "a", "m", "b", "z", "c"})
    header += (header.size() > 1 ? ",\"" : "\"") + std::string(name) +
              R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_error(header + "}", 0, "names 'z' twice");
}

// Brackets end where the format has none, however many follow: the rest of these 20 million is not
// even JSON.
TEST(SafetensorsLimits, Depth) {
  expect_error("{\"a\":" + std::string(20'000'000, '['), 0, "not an object");
  expect_error(R"({"a":{"shape":)" + std::string(1000, '['), 0, "not a size");
  expect_error(R"({"__metadata__":{"a":)" + std::string(1000, '{'), 0, "is not a string");
}

// Where a file states a wrong size, only the eight bytes of the length are read.
TEST_F(SafetensorsFile, SizesAreCheckedBeforeAnythingIsRead) {
  const std::string zeros(16, '\0');
  for (const auto& [length, message] :
       {std::pair(kMaxHeader + 1, "more than the format's limit of 100000000"),
        {uint64_t{1} << 63, "more than the format's limit"},
        {uint64_t{90'000'000}, "bytes follow"}}) {
    std::vector<std::byte> start(kLengthBytes);
    for (size_t i = 0; i < kLengthBytes; ++i) start[i] = static_cast<std::byte>(length >> (8 * i));
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(start.data()), std::streamsize{kLengthBytes})
        .write(zeros.data(), 16);
    EXPECT_NE(error().find(message), std::string::npos) << error();
  }
  // 30 GB of zeros: its header has no byte.
  std::ofstream(path_, std::ios::trunc).close();
  std::filesystem::resize_file(path_, uint64_t{30} << 30);
  EXPECT_NE(error().find("not a JSON object"), std::string::npos) << error();
}

TEST_F(SafetensorsFile, OnlyWhatIsAskedForIsRead) {
  constexpr uint64_t kBytes = uint64_t{1} << 33;
  const std::string text = R"({"big":{"dtype":"U8","shape":[)" + std::to_string(kBytes) +
                           R"(],"data_offsets":[4,)" + std::to_string(kBytes + 4) +
                           R"(]},"k":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})";
  const auto start = file_of(text, 0);
  std::ofstream(path_, std::ios::binary)
      .write(reinterpret_cast<const char*>(start.data()),
             static_cast<std::streamsize>(start.size()));
  std::filesystem::resize_file(path_, start.size() + 4 + kBytes);
  const Reader file(path_);
  EXPECT_EQ(file.read(*file.header().find("k")).size(), 4u);
  EXPECT_EQ(file.file().bytes_read(), start.size() + 4);
}

}  // namespace
}  // namespace flash3::safetensors
