// SPDX-License-Identifier: Apache-2.0
// The JSON of a safetensors header, token by token: what has no place in one ends the parsing where
// it stands, so that time and memory are bounded by the header's length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "cli/safetensors.hpp"

namespace flash3::safetensors {

// The handler of nlohmann's SAX interface, without its header, which takes seconds to compile.
// Every function throws FileError at the first token that breaks the format.
class HeaderParser {
 public:
  std::vector<TensorInfo> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
  uint64_t tokens = 0;

  bool null();
  bool boolean(bool);
  bool number_integer(int64_t);  // a negative one
  bool number_unsigned(uint64_t value);
  bool number_float(double, const std::string&);
  bool string(std::string& text);
  bool binary(auto&) { reject(); }  // which text has none of
  bool start_object(size_t);
  bool key(std::string& text);
  bool end_object();
  bool start_array(size_t);
  bool end_array();
  bool parse_error(size_t position, const std::string& token, const std::exception& e);

 private:
  // Where in the header the next token stands.
  enum class Place { kBefore, kTop, kMetadata, kEntry, kShape, kOffsets, kAfter };
  enum class Field { kNone, kDtype, kShape, kOffsets };

  [[noreturn]] void reject();  // a value that cannot stand here
  std::string where() const;   // "tensor 'name': "
  void finish_entry();

  Place place_ = Place::kBefore;
  Field field_ = Field::kNone;
  std::string name_;  // the last key at the top, or in the metadata
  TensorInfo tensor_;
  std::vector<uint64_t> offsets_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

}  // namespace flash3::safetensors
