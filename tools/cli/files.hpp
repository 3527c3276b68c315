// SPDX-License-Identifier: Apache-2.0
// Files that the program reads, whose size is known before a byte is read, and files that it
// writes, which appear under their names when they are whole.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace flash3::cli {

// A file that is not there, or not what it should be; the message names it and says what is wrong.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A regular file. Its size is that at the time it was opened.
class InputFile {
 public:
  explicit InputFile(const std::string& path);  // throws FileError
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  // Fills `into` from this offset. Throws FileError if the file ends before, or cannot be read.
  void read(uint64_t offset, std::span<std::byte> into) const;
  uint64_t bytes_read() const { return bytes_read_; }  // so far

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
  mutable uint64_t bytes_read_ = 0;
};

// What is written goes to another file in the same folder; commit() gives it its name. Without a
// commit nothing has changed: a file of that name is as it was. What is no regular file, such as a
// pipe, is written to directly.
class OutputFile {
 public:
  // Throws FileError if no file can be made there.
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // All throw std::system_error if that fails, for example on a full disk.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();
  // All of it at once.
  void finish(std::string_view text) {
    write(text);
    commit();
  }

 private:
  [[noreturn]] void fail(const std::string& besides = "") const;  // says errno

  std::string path_, target_, temporary_;  // no temporary_: written to directly
  int descriptor_ = -1;
};

// Whether both are one regular file, or would be if they were written.
bool is_same_file(const std::string& a, const std::string& b);

// Names of a file in order, so that one that occurs twice is found in n log n comparisons.

struct NameIndex {
  std::vector<size_t> order;  // of the items, by name
  size_t repeated = 0;        // an item whose name another has too; their number: none
  uint64_t comparisons = 0;   // that this took

  // name(item): its name.
  template <class Items, class Name>
  NameIndex(const Items& items, Name name) : order(items.size()), repeated(items.size()) {
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      ++comparisons;
      return name(items[a]) < name(items[b]);
    });
    for (size_t i = 1; i < order.size() && repeated == items.size(); ++i, ++comparisons)
      if (name(items[order[i - 1]]) == name(items[order[i]])) repeated = order[i];
  }
  NameIndex() = default;
};

}  // namespace flash3::cli
