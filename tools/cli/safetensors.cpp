// SPDX-License-Identifier: Apache-2.0
#include "cli/safetensors.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "cases/printable.hpp"
#include "cli/safetensors_header.hpp"

namespace flash3::safetensors {
namespace {

using cases::in_quotes;
using cases::printable;

[[noreturn]] void fail(const std::string& what) { throw FileError(what); }

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
