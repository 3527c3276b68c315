// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace flash3::safetensors {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxDims = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<const char*, int> kDtypeSizes[] = {
    {"F16", 2}, {"BF16", 2}, {"F32", 4},  {"F64", 8},     {"I8", 1},
    {"U8", 1},  {"I16", 2},  {"U16", 2},  {"I32", 4},     {"U32", 4},
    {"I64", 8}, {"U64", 8},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

struct Entry {
  Tensor tensor;
  uint64_t begin = 0, end = 0;
};

// User text inside a message: no control characters, not too long.
std::string in_quotes(const std::string& text) {
  std::string out = "'";
  for (const char c : text.substr(0, 60)) out += static_cast<unsigned char>(c) < 32 ? '?' : c;
  return out + (text.size() > 60 ? "…'" : "'");
}

[[noreturn]] void fail(const std::string& what) { throw FileError(what); }

uint64_t header_length(std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes)
    fail("has " + std::to_string(bytes.size()) + " bytes; the header length alone takes 8");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | std::to_integer<uint64_t>(bytes[i]);
  if (length > kMaxHeader)
    fail("header length is " + std::to_string(length) + ", more than the format's limit of " +
         std::to_string(kMaxHeader));
  if (length > bytes.size() - kLengthBytes)
    fail("header length is " + std::to_string(length) + ", but only " +
         std::to_string(bytes.size() - kLengthBytes) + " bytes follow");
  return length;
}

Json parse_header(std::span<const std::byte> bytes) {
  const char* text = reinterpret_cast<const char*>(bytes.data());
  if (bytes.empty() || text[0] != '{') fail("the header is not a JSON object");
  std::set<std::string> names;
  const auto reject_duplicates = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key &&
        !names.insert(parsed.get<std::string>()).second)
      fail("the header names " + in_quotes(parsed.get<std::string>()) + " twice");
    return true;
  };
  try {
    return Json::parse(text, text + bytes.size(), reject_duplicates);
  } catch (const Json::exception& e) {
    fail(std::string("the header is not valid JSON: ") + e.what());
  }
}

bool is_offset(const Json& value) { return value.is_number_unsigned(); }

Entry parse_entry(const std::string& name, const Json& value) {
  const std::string where = "tensor " + in_quotes(name) + ": ";
  if (!value.is_object()) fail(where + "its header entry is not an object");
  for (const auto& [key, unused] : value.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      fail(where + "unknown field " + in_quotes(key));
  Entry entry;
  entry.tensor.name = name;

  const auto dtype = value.find("dtype");
  if (dtype == value.end() || !dtype->is_string()) fail(where + "dtype is missing");
  entry.tensor.dtype = dtype->get<std::string>();
  const auto known =
      std::find_if(std::begin(kDtypeSizes), std::end(kDtypeSizes),
                   [&](const auto& candidate) { return candidate.first == entry.tensor.dtype; });
  if (known == std::end(kDtypeSizes))
    fail(where + "unknown dtype " + in_quotes(entry.tensor.dtype));

  const auto shape = value.find("shape");
  if (shape == value.end() || !shape->is_array()) fail(where + "shape is missing");
  if (shape->size() > kMaxDims) fail(where + "more than 8 dimensions");
  // Strides follow from the other dimensions where one is 0, too.
  uint64_t size = static_cast<uint64_t>(known->second), largest = size;
  for (const Json& dim : *shape) {
    if (!is_offset(dim) || dim.get<uint64_t>() > uint64_t{1} << 62)
      fail(where + "shape holds something that is not a size");
    const uint64_t n = dim.get<uint64_t>();
    if (n != 0 && largest > uint64_t{std::numeric_limits<int64_t>::max()} / n)
      fail(where + "its shape overflows 64 bits");
    largest *= n != 0 ? n : 1;
    size *= n;
    entry.tensor.shape.push_back(static_cast<int64_t>(n));
  }

  const auto offsets = value.find("data_offsets");
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2 ||
      !is_offset((*offsets)[0]) || !is_offset((*offsets)[1]))
    fail(where + "data_offsets is not a pair of offsets");
  entry.begin = (*offsets)[0].get<uint64_t>();
  entry.end = (*offsets)[1].get<uint64_t>();
  if (entry.begin > entry.end)
    fail(where + "data_offsets begin at " + std::to_string(entry.begin) + " and end at " +
         std::to_string(entry.end));
  if (entry.end - entry.begin != size)
    fail(where + "data_offsets span " + std::to_string(entry.end - entry.begin) +
         " bytes, but dtype and shape take " + std::to_string(size));
  return entry;
}

// The ranges, in order, must follow each other from 0 to the end of the data.
void check_ranges(const std::vector<Entry>& entries, uint64_t data_size) {
  std::vector<const Entry*> order;
  for (const Entry& e : entries) order.push_back(&e);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t at = 0;
  for (const Entry* e : order) {
    const std::string where = "tensor " + in_quotes(e->tensor.name) + ": ";
    if (e->end > data_size)
      fail(where + "data ends at byte " + std::to_string(e->end) + ", but the file holds " +
           std::to_string(data_size) + " bytes of data");
    if (e->begin != at)
      fail(where + "data begins at byte " + std::to_string(e->begin) + ", expected " +
           std::to_string(at) + (e->begin < at ? " (overlap)" : " (hole)"));
    at = e->end;
  }
  if (at != data_size)
    fail(std::to_string(data_size - at) + " bytes behind the last tensor belong to none");
}

}  // namespace

const Tensor* File::find(const std::string& name) const {
  for (const Tensor& t : tensors)
    if (t.name == name) return &t;
  return nullptr;
}

File parse(std::span<const std::byte> bytes) {
  const uint64_t length = header_length(bytes);
  const Json header = parse_header(bytes.subspan(kLengthBytes, length));
  const auto data = bytes.subspan(kLengthBytes + length);

  File file;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) {
      entries.push_back(parse_entry(name, value));
      continue;
    }
    if (!value.is_object()) fail("__metadata__ is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) fail("__metadata__ " + in_quotes(key) + " is not a string");
      file.metadata[key] = text.get<std::string>();
    }
  }
  check_ranges(entries, data.size());
  for (Entry& e : entries) {
    const auto range = data.subspan(e.begin, e.end - e.begin);
    e.tensor.data.assign(range.begin(), range.end());
    file.tensors.push_back(std::move(e.tensor));
  }
  return file;
}

File read(const std::string& path) {
  std::error_code error;
  const auto kind = std::filesystem::status(path, error).type();
  if (kind == std::filesystem::file_type::not_found) throw FileError(path + ": no such file");
  const auto size = std::filesystem::file_size(path, error);
  if (kind != std::filesystem::file_type::regular || error)
    throw FileError(path + ": not a regular file");
  std::ifstream stream(path, std::ios::binary);
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!stream) throw FileError(path + ": cannot be read");
  try {
    return parse(bytes);
  } catch (const FileError& e) {
    throw FileError(path + ": not a valid safetensors file: " + e.what());
  }
}

std::vector<std::byte> serialize(const File& file) {
  Json header = Json::object();
  if (!file.metadata.empty()) header[kMetadata] = file.metadata;
  uint64_t at = 0;
  for (const Tensor& t : file.tensors) {
    header[t.name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {at, at + t.data.size()}}};
    at += t.data.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned

  std::vector<std::byte> bytes;
  bytes.reserve(kLengthBytes + text.size() + at);
  for (size_t i = 0; i < kLengthBytes; ++i)
    bytes.push_back(static_cast<std::byte>(uint64_t{text.size()} >> (8 * i) & 0xFF));
  const auto append = [&](std::span<const std::byte> part) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  };
  append(std::as_bytes(std::span(text)));
  for (const Tensor& t : file.tensors) append(t.data);
  return bytes;
}

void write(const std::string& path, const File& file) {
  const auto bytes = serialize(file);
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  stream.close();
  if (!stream) throw FileError(path + ": cannot be written");
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
