// SPDX-License-Identifier: Apache-2.0
#include "cli/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cases/text.hpp"

namespace flash3::cli {
namespace {

namespace fs = std::filesystem;
using cases::printable;

std::string reason() { return std::strerror(errno); }

// What a new file's permissions are.
mode_t new_file_mode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  // Without waiting for a writer of a pipe, which is no regular file anyway.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor_ < 0 && errno == ENOENT) throw FileError(printable(path) + ": no such file");
  if (descriptor_ < 0) throw FileError(printable(path) + ": cannot be read: " + reason());
  struct stat about {};
  if (fstat(descriptor_, &about) != 0 || !S_ISREG(about.st_mode)) {
    close(descriptor_);
    throw FileError(printable(path) + ": not a regular file");
  }
  size_ = static_cast<uint64_t>(about.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      bytes_read_(other.bytes_read_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

void InputFile::read(uint64_t offset, std::span<std::byte> into) const {
  while (!into.empty()) {
    const ssize_t got = pread(descriptor_, into.data(), into.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(printable(path_) + ": cannot be read: " + reason());
    if (got == 0) throw FileError(printable(path_) + ": has become shorter while it was read");
    offset += static_cast<uint64_t>(got);
    bytes_read_ += static_cast<uint64_t>(got);
    into = into.subspan(static_cast<size_t>(got));
  }
}

OutputFile::OutputFile(const std::string& path) : path_(path), target_(path) {
  const auto refuse = [&](const std::string& why) {
    throw FileError(printable(path) + ": cannot be written: " + why);
  };
  if (path.empty()) throw FileError("the name of the file to write is empty");
  struct stat about {};
  const bool exists = stat(path.c_str(), &about) == 0;
  if (!exists && errno != ENOENT) refuse(reason());
  if (exists && S_ISDIR(about.st_mode)) refuse("it is a folder");
  if (exists && !S_ISREG(about.st_mode)) {
    descriptor_ = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor_ < 0) refuse(reason());
    return;
  }
  if (exists && access(path.c_str(), W_OK) != 0) refuse(reason());
  std::error_code error;
  if (const fs::path resolved = fs::canonical(path, error); !error) target_ = resolved;
  temporary_ = (fs::path(target_).parent_path() / ".flash3-XXXXXX").string();
  descriptor_ = mkostemp(temporary_.data(), O_CLOEXEC);
  if (descriptor_ < 0) refuse(reason());
  // Where that fails the file system has no permissions of single files.
  static_cast<void>(fchmod(descriptor_, exists ? about.st_mode & 0777 : new_file_mode()));
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void OutputFile::fail(const std::string& besides) const {
  throw std::system_error(errno, std::generic_category(),
                          printable(path_) + ": cannot be written" + besides);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail();
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void OutputFile::commit() {
  // Some file systems tell only now that there was no room. What is no file has nothing to sync.
  if (fsync(descriptor_) != 0 && errno != EINVAL && errno != EROFS) fail();
  if (close(std::exchange(descriptor_, -1)) != 0) fail();
  if (temporary_.empty()) return;
  if (rename(temporary_.c_str(), target_.c_str()) != 0) {
    const std::string kept = std::exchange(temporary_, "");
    fail(" (what was to be written is in " + printable(kept) + ")");
  }
  temporary_.clear();
}

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  for (const std::string& path : {a, b})
    if (fs::exists(path, error) && !fs::is_regular_file(path, error)) return false;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path full_a = fs::weakly_canonical(a, error), full_b = fs::weakly_canonical(b, error);
  return !full_a.empty() && full_a == full_b;
}

}  // namespace flash3::cli
