// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cases/text.hpp"

namespace flash3::safetensors {
namespace {

using cases::in_quotes;
using cases::printable;

constexpr size_t kMaxDims = 8;
constexpr const char* kMetadataName = "__metadata__";

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

// The JSON of a safetensors header, token by token: what has no place in one ends the parsing where
// it stands, so that time and memory are bounded by the header's length.
//
// It is the handler of nlohmann's SAX interface. Every function throws FileError at the first token
// that breaks the format.
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

std::string HeaderParser::where() const { return "tensor " + in_quotes(name_) + ": "; }

void HeaderParser::reject() {
  switch (place_) {
    case Place::kBefore:
    case Place::kAfter: fail("the header is not a JSON object");
    case Place::kMetadata: fail("__metadata__ " + in_quotes(name_) + " is not a string");
    case Place::kShape: fail(where() + "shape holds something that is not a size");
    case Place::kOffsets: fail(where() + "data_offsets is not a pair of offsets");
    case Place::kTop:
      if (name_ == kMetadataName) fail("__metadata__ is not an object");
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
    place_ = name_ == kMetadataName ? Place::kMetadata : Place::kEntry;
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

// The ranges, in order, must follow each other from 0 to the end of the data.
void check_ranges(Header* header, uint64_t data_size) {
  std::vector<const TensorInfo*> order;
  for (const TensorInfo& t : header->tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [&](const TensorInfo* a, const TensorInfo* b) {
    ++header->comparisons;
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t at = 0;
  for (const TensorInfo* t : order) {
    const auto refuse = [&](const std::string& what) {
      fail("tensor " + in_quotes(t->name) + ": data " + what);
    };
    if (t->end > data_size)
      refuse("ends at byte " + std::to_string(t->end) + ", but the file holds " +
             std::to_string(data_size) + " bytes of data");
    if (t->begin != at)
      refuse("begins at byte " + std::to_string(t->begin) + ", expected " + std::to_string(at) +
             (t->begin < at ? " (overlap)" : " (hole)"));
    at = t->end;
  }
  if (at != data_size)
    fail(std::to_string(data_size - at) + " bytes after the last tensor belong to none");
}

template <class Items, class Name>
cli::NameIndex index_of(const Items& items, Name name, uint64_t* comparisons) {
  cli::NameIndex index(items, name);
  if (index.repeated < items.size())
    fail("the header names " + in_quotes(name(items[index.repeated])) + " twice");
  *comparisons += index.comparisons;
  return index;
}

Header read_header(const cli::InputFile& file) {
  try {
    std::vector<std::byte> start(std::min<uint64_t>(file.size(), kLengthBytes));
    file.read(0, start);
    start.resize(kLengthBytes + header_length(start, file.size()));
    file.read(kLengthBytes, std::span(start).subspan(kLengthBytes));
    return parse(start, file.size());
  } catch (const FileError& e) {
    throw FileError(printable(file.path()) + ": not a valid safetensors file: " + e.what());
  }
}

}  // namespace

const TensorInfo* Header::find(const std::string& name) const {
  const auto at = std::lower_bound(by_name.order.begin(), by_name.order.end(), name,
                                   [&](size_t i, const auto& n) { return tensors[i].name < n; });
  return at != by_name.order.end() && tensors[*at].name == name ? &tensors[*at] : nullptr;
}

uint64_t header_length(std::span<const std::byte> start, uint64_t file_size) {
  if (file_size < kLengthBytes || start.size() < kLengthBytes)
    fail("has " + std::to_string(file_size) + " bytes; the header length alone takes 8");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | std::to_integer<uint64_t>(start[i]);
  if (length > kMaxHeader)
    fail("header length is " + std::to_string(length) + ", more than the format's limit of " +
         std::to_string(kMaxHeader));
  if (length > file_size - kLengthBytes)
    fail("header length is " + std::to_string(length) + ", but only " +
         std::to_string(file_size - kLengthBytes) + " bytes follow");
  return length;
}

Header parse(std::span<const std::byte> start, uint64_t file_size) {
  const uint64_t length = header_length(start, file_size);
  const auto text = start.subspan(kLengthBytes, length);
  if (text.empty() || text[0] != std::byte{'{'}) fail("the header is not a JSON object");
  HeaderParser parser;
  const char* const begin = reinterpret_cast<const char*>(text.data());
  nlohmann::json::sax_parse(begin, begin + text.size(), &parser);

  Header header;
  header.data = kLengthBytes + length;
  header.tokens = parser.tokens;
  header.tensors = std::move(parser.tensors);
  header.by_name = index_of(
      header.tensors, [](const TensorInfo& t) -> const std::string& { return t.name; },
      &header.comparisons);
  const auto key_of = [](const auto& entry) -> const std::string& { return entry.first; };
  index_of(parser.metadata, key_of, &header.comparisons);
  for (auto& entry : parser.metadata) header.metadata.insert(std::move(entry));
  check_ranges(&header, file_size - header.data);
  return header;
}

Reader::Reader(const std::string& path) : file_(path), header_(read_header(file_)) {}

std::vector<std::byte> Reader::read(const TensorInfo& tensor) const {
  std::vector<std::byte> bytes(tensor.bytes());
  file_.read(header_.data + tensor.begin, bytes);
  return bytes;
}

std::string header_of(const std::vector<Tensor>& tensors, const Metadata& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const Tensor& t : tensors) {
    header[t.name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {at, at + t.data.size()}}};
    at += t.data.size();
  }
  // Names come from files and arguments, and may be no UTF-8.
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  std::string start;
  for (size_t i = 0; i < kLengthBytes; ++i)
    start += static_cast<char>(uint64_t{text.size()} >> (8 * i) & 0xFF);
  return start + text;
}

void write(cli::OutputFile* file, const std::vector<Tensor>& tensors, const Metadata& metadata) {
  file->write(header_of(tensors, metadata));
  for (const Tensor& t : tensors) file->write(t.data);
}

flash3_dtype dtype_of(const std::string& name) {
  if (name == "F16") return FLASH3_FLOAT16;
  if (name == "BF16") return FLASH3_BFLOAT16;
  if (name == "F32") return FLASH3_FLOAT32;
  return FLASH3_DTYPE_NONE;
}

const char* dtype_name(flash3_dtype dtype) {
  switch (dtype) {
    case FLASH3_FLOAT16: return "F16";
    case FLASH3_BFLOAT16: return "BF16";
    default: return "F32";
  }
}

}  // namespace flash3::safetensors
