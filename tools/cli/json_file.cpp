// SPDX-License-Identifier: Apache-2.0
#include "cli/json_file.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "cases/text.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"

namespace flash3::cli {
namespace {

using Json = nlohmann::ordered_json;
using cases::printable;

}  // namespace

Json read_json(const std::string& path, const JsonLimits& limits, uint64_t* comparisons) {
  const auto refuse = [&](const std::string& why) {
    throw FileError(format("{}: {}", printable(path), why));
  };
  const InputFile file(path);
  if (file.size() > limits.bytes)
    refuse(format("has {} bytes, and {} is the most for JSON", file.size(), limits.bytes));
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));

  uint64_t made = 0;
  std::vector<uint64_t> names(limits.depth + 1);  // so far, of the object at each depth
  const auto check = [&](int depth, Json::parse_event_t event, Json&) {
    const auto level = static_cast<size_t>(depth);
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (level >= limits.depth)
          refuse(format("has more than {} levels of arrays and objects", limits.depth));
        names[level + 1] = 0;
        break;
      case Json::parse_event_t::key:
        made += names[level]++;
        if (made > limits.comparisons) refuse("has objects of too many names");
        break;
      default: break;
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, check);
  } catch (const Json::exception& e) {
    constexpr size_t kMost = 200;  // the message holds what was read last
    refuse("is not JSON: " + cases::in_quotes(e.what(), kMost));
  }
  if (comparisons != nullptr) *comparisons = made;
  return json;
}

std::string json_text(const Json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

std::string report_text(const Json& report) {
  std::string text = "{";
  const char* separator = "\n ";
  for (const auto& [name, value] : report.items()) {
    text += separator + json_text(name, -1) + ": ";
    separator = ",\n ";
    const auto is_row = [](const Json& row) { return row.is_structured(); };
    if (value.empty() || !value.is_structured() ||
        !std::all_of(value.begin(), value.end(), is_row)) {
      text += json_text(value, -1);
      continue;
    }
    text += value.is_array() ? "[" : "{";
    const char* between = "\n  ";
    for (const auto& [key, row] : value.items()) {
      text += between + (value.is_array() ? "" : json_text(key, -1) + ": ") + json_text(row, -1);
      between = ",\n  ";
    }
    text += value.is_array() ? "\n ]" : "\n }";
  }
  return text + "\n}\n";
}

}  // namespace flash3::cli
