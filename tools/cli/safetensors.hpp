// SPDX-License-Identifier: Apache-2.0
// safetensors files: a strict reader and a writer of our own. Format: 8 bytes little-endian header
// length, a JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__":
// {…}}, then the data. https://huggingface.co/docs/safetensors
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/files.hpp"
#include "flash3/flash3.h"

namespace flash3::safetensors {

using cli::FileError;

inline constexpr uint64_t kMaxHeader = 100'000'000;  // bytes; the format's own limit
inline constexpr size_t kLengthBytes = 8;            // before the header

using Metadata = std::map<std::string, std::string>;

// What a header tells of a tensor.
struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "BF16"
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // of its bytes, counted from the first after the header

  uint64_t bytes() const { return end - begin; }
};

struct Header {
  std::vector<TensorInfo> tensors;  // in the header's order
  Metadata metadata;
  uint64_t data = 0;  // where the file's data begins

  const TensorInfo* find(const std::string& name) const;

  cli::NameIndex by_name;  // of tensors
  // What reading the header took: values, brackets and names of its JSON, and comparisons.
  uint64_t tokens = 0, comparisons = 0;
};

// The header's length, from a file's first 8 bytes and its size. Throws FileError.
uint64_t header_length(std::span<const std::byte> start, uint64_t file_size);
// start: of a file of this size, at least its header. Every rule of the format is checked: header
// length, JSON, unique names, known dtypes, sizes that match shapes without overflow, and data
// ranges that cover the rest of the file without overlaps or holes. Throws FileError.
Header parse(std::span<const std::byte> start, uint64_t file_size);

// A file whose header has been read and checked; of its data only what is asked for is read.
class Reader {
 public:
  explicit Reader(const std::string& path);  // throws FileError, with the path

  const cli::InputFile& file() const { return file_; }
  const Header& header() const { return header_; }
  std::vector<std::byte> read(const TensorInfo& tensor) const;

 private:
  cli::InputFile file_;
  Header header_;
};

// A tensor to be written.
struct Tensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// All that comes before the data.
std::string header_of(const std::vector<Tensor>& tensors, const Metadata& metadata);
void write(cli::OutputFile* file, const std::vector<Tensor>& tensors, const Metadata& metadata);

// FLASH3_DTYPE_NONE for one that attention does not take.
flash3_dtype dtype_of(const std::string& name);
const char* dtype_name(flash3_dtype dtype);

}  // namespace flash3::safetensors
