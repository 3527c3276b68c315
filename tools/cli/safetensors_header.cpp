// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors_header.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "cases/printable.hpp"

namespace flash3::safetensors {
namespace {

using cases::in_quotes;

constexpr size_t kMaxDims = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<const char*, int> kDtypeSizes[] = {
    {"F16", 2}, {"BF16", 2}, {"F32", 4},  {"F64", 8},     {"I8", 1},
    {"U8", 1},  {"I16", 2},  {"U16", 2},  {"I32", 4},     {"U32", 4},
    {"I64", 8}, {"U64", 8},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

[[noreturn]] void fail(const std::string& what) { throw FileError(what); }

// Bytes that dtype and shape take.
uint64_t size_of(const TensorInfo& t, const std::string& where) {
  const auto known = std::find_if(std::begin(kDtypeSizes), std::end(kDtypeSizes),
                                  [&](const auto& each) { return each.first == t.dtype; });
  if (known == std::end(kDtypeSizes)) fail(where + "unknown dtype " + in_quotes(t.dtype));
  // Strides follow from the other dimensions where one is 0, too.
  uint64_t size = static_cast<uint64_t>(known->second), largest = size;
  for (const int64_t dim : t.shape) {
    const auto n = static_cast<uint64_t>(dim);
    if (n != 0 && largest > uint64_t{std::numeric_limits<int64_t>::max()} / n)
      fail(where + "its shape overflows 64 bits");
    largest *= n != 0 ? n : 1;
    size *= n;
  }
  return size;
}

}  // namespace

std::string HeaderParser::where() const { return "tensor " + in_quotes(name_) + ": "; }

void HeaderParser::reject() {
  switch (place_) {
    case Place::kBefore:
    case Place::kAfter: fail("the header is not a JSON object");
    case Place::kMetadata: fail("__metadata__ " + in_quotes(name_) + " is not a string");
    case Place::kShape: fail(where() + "shape holds something that is not a size");
    case Place::kOffsets: fail(where() + "data_offsets is not a pair of offsets");
    case Place::kTop:
      if (name_ == kMetadata) fail("__metadata__ is not an object");
      fail(where() + "its header entry is not an object");
    case Place::kEntry: break;
  }
  if (field_ == Field::kDtype) fail(where() + "dtype is not a string");
  if (field_ == Field::kShape) fail(where() + "shape is not an array of sizes");
  fail(where() + "data_offsets is not a pair of offsets");
}

bool HeaderParser::null() { reject(); }
bool HeaderParser::boolean(bool) { reject(); }
bool HeaderParser::number_integer(int64_t) { reject(); }
bool HeaderParser::number_float(double, const std::string&) { reject(); }

bool HeaderParser::number_unsigned(uint64_t value) {
  ++tokens;
  if (place_ == Place::kShape && value <= uint64_t{1} << 62) {
    if (tensor_.shape.size() == kMaxDims) fail(where() + "more than 8 dimensions");
    tensor_.shape.push_back(static_cast<int64_t>(value));
  } else if (place_ == Place::kOffsets && offsets_.size() < 2) {
    offsets_.push_back(value);
  } else {
    reject();
  }
  return true;
}

bool HeaderParser::string(std::string& text) {
  ++tokens;
  if (place_ == Place::kMetadata)
    metadata.emplace_back(std::move(name_), std::move(text));
  else if (place_ == Place::kEntry && field_ == Field::kDtype)
    tensor_.dtype = std::move(text), has_dtype_ = true;
  else
    reject();
  return true;
}

bool HeaderParser::start_object(size_t) {
  ++tokens;
  if (place_ == Place::kBefore) {
    place_ = Place::kTop;
  } else if (place_ == Place::kTop) {
    place_ = name_ == kMetadata ? Place::kMetadata : Place::kEntry;
    tensor_ = {}, offsets_.clear();
    has_dtype_ = has_shape_ = has_offsets_ = false;
  } else {
    reject();
  }
  return true;
}

bool HeaderParser::key(std::string& text) {
  ++tokens;
  if (place_ != Place::kEntry) {
    name_ = std::move(text);
    return true;
  }
  field_ = text == "dtype"          ? Field::kDtype
           : text == "shape"        ? Field::kShape
           : text == "data_offsets" ? Field::kOffsets
                                    : Field::kNone;
  if (field_ == Field::kNone) fail(where() + "unknown field " + in_quotes(text));
  const bool twice = field_ == Field::kDtype   ? has_dtype_
                     : field_ == Field::kShape ? has_shape_
                                               : has_offsets_;
  if (twice) fail(where() + "has " + text + " twice");
  return true;
}

bool HeaderParser::end_object() {
  ++tokens;
  if (place_ == Place::kEntry) finish_entry();
  place_ = place_ == Place::kTop ? Place::kAfter : Place::kTop;
  return true;
}

bool HeaderParser::start_array(size_t) {
  ++tokens;
  if (place_ != Place::kEntry || field_ == Field::kDtype) reject();
  const bool shape = field_ == Field::kShape;
  place_ = shape ? Place::kShape : Place::kOffsets;
  (shape ? has_shape_ : has_offsets_) = true;
  return true;
}

bool HeaderParser::end_array() {
  ++tokens;
  if (place_ == Place::kOffsets && offsets_.size() != 2) reject();
  place_ = Place::kEntry;
  return true;
}

void HeaderParser::finish_entry() {
  if (!has_dtype_) fail(where() + "dtype is missing");
  if (!has_shape_) fail(where() + "shape is missing");
  if (!has_offsets_) fail(where() + "data_offsets is missing; it must be a pair of offsets");
  const uint64_t begin = offsets_[0], end = offsets_[1];
  const uint64_t size = size_of(tensor_, where());
  if (begin > end)
    fail(where() + "data_offsets begin at " + std::to_string(begin) + " and end at " +
         std::to_string(end));
  if (end - begin != size)
    fail(where() + "data_offsets span " + std::to_string(end - begin) +
         " bytes, but dtype and shape take " + std::to_string(size));
  tensor_.begin = begin, tensor_.end = end;
  tensor_.name = std::move(name_);
  tensors.push_back(std::move(tensor_));
}

bool HeaderParser::parse_error(size_t, const std::string&, const std::exception& e) {
  constexpr size_t kMost = 200;  // the message holds what was read last
  fail("the header is not valid JSON: " + in_quotes(e.what(), kMost));
}

}  // namespace flash3::safetensors
