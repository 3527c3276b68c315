// SPDX-License-Identifier: Apache-2.0
// safetensors files: a strict reader and a writer of our own. Format: 8 bytes little-endian header
// length, a JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__":
// {…}}, then the data. https://huggingface.co/docs/safetensors
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "flash3/flash3.h"

namespace flash3::safetensors {

// A file that is not what it should be; the message says what is wrong, and where.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Tensor {
  std::string name;
  std::string dtype;  // as in the file: "BF16"
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
};

struct File {
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;

  const Tensor* find(const std::string& name) const;
};

// Every rule of the format is checked: header length, JSON, unique names, known dtypes, sizes that
// match shapes without overflow, and data ranges that cover the rest of the file without overlaps
// or holes. Throws FileError.
File parse(std::span<const std::byte> bytes);
File read(const std::string& path);

std::vector<std::byte> serialize(const File& file);
void write(const std::string& path, const File& file);

// FLASH3_DTYPE_NONE for one that attention does not take.
flash3_dtype dtype_of(const std::string& name);
const char* dtype_name(flash3_dtype dtype);

}  // namespace flash3::safetensors
