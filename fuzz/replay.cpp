// SPDX-License-Identifier: Apache-2.0
// Feeds the files that are named, or that lie in the folders that are named, to a fuzz target: its
// corpus as a test, without libFuzzer.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" __attribute__((weak)) int LLVMFuzzerInitialize(int* argc, char*** argv);

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_of(const fs::path& path) {
  std::vector<fs::path> files;
  if (!fs::is_directory(path)) return {path};
  for (const fs::directory_entry& entry : fs::directory_iterator(path))
    if (entry.is_regular_file()) files.push_back(entry.path());
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  if (LLVMFuzzerInitialize) LLVMFuzzerInitialize(&argc, &argv);
  size_t count = 0;
  for (int i = 1; i < argc; ++i)
    for (const fs::path& path : files_of(argv[i])) {
      std::ifstream stream(path, std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
      if (!stream) {
        std::fprintf(stderr, "%s: cannot be read\n", path.c_str());
        return 1;
      }
      std::fprintf(stderr, "%s\n", path.c_str());  // the last one before a crash
      // Memory of its own and of exactly this size.
      const std::vector<uint8_t> data(bytes.begin(), bytes.end());
      LLVMFuzzerTestOneInput(data.data(), data.size());
      ++count;
    }
  std::fprintf(stderr, "%zu inputs\n", count);
  return count > 0 ? 0 : 1;  // an empty corpus would test nothing
}
