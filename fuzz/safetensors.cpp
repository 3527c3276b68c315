// SPDX-License-Identifier: Apache-2.0
// safetensors files: what parses is what serialize() writes, and reads back as the same.
#include "cli/safetensors.hpp"

#include "bytes.hpp"

namespace {

using namespace flash3;

bool same(const safetensors::Tensor& a, const safetensors::Tensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.data == b.data;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  safetensors::File file;
  try {
    file = safetensors::parse(std::as_bytes(std::span(data, size)));
  } catch (const safetensors::FileError& e) {
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
    return 0;
  }
  // Ranges may come in any order in a header; serialize() takes the tensors in theirs.
  const safetensors::File again = safetensors::parse(safetensors::serialize(file));
  FUZZ_CHECK(again.metadata == file.metadata, "other metadata");
  FUZZ_CHECK(again.tensors.size() == file.tensors.size(), "other tensors");
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    FUZZ_CHECK(same(again.tensors[i], file.tensors[i]), file.tensors[i].name);
    FUZZ_CHECK(file.find(file.tensors[i].name) == &file.tensors[i], file.tensors[i].name);
  }
  return 0;
}
