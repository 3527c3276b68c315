// SPDX-License-Identifier: Apache-2.0
// safetensors files: what parses has a header that header_of() writes, and reads back as the same.
#include "cli/safetensors.hpp"

#include <algorithm>

#include "bytes.hpp"

namespace {

using namespace flash3;

bool same(const safetensors::TensorInfo& a, const safetensors::TensorInfo& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin == b.begin &&
         a.end == b.end;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  safetensors::Header header;
  try {
    header = safetensors::parse(bytes, size);
  } catch (const safetensors::FileError& e) {
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
    return 0;
  }
  // Tensors may stand in a header in any order; header_of() takes them in that of their data.
  std::vector<safetensors::TensorInfo> in_order = header.tensors;
  std::sort(in_order.begin(), in_order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::vector<safetensors::Tensor> tensors;
  for (const auto& t : in_order)
    tensors.push_back({t.name, t.dtype, t.shape, bytes.subspan(header.data + t.begin, t.bytes())});
  const std::string start = safetensors::header_of(tensors, header.metadata);
  const safetensors::Header again =
      safetensors::parse(std::as_bytes(std::span(start)), start.size() + (size - header.data));
  FUZZ_CHECK(again.metadata == header.metadata, "other metadata");
  FUZZ_CHECK(again.tensors.size() == header.tensors.size(), "other tensors");
  for (const safetensors::TensorInfo& t : header.tensors) {
    FUZZ_CHECK(header.find(t.name) == &t, t.name);
    FUZZ_CHECK(again.find(t.name) != nullptr && same(*again.find(t.name), t), t.name);
  }
  return 0;
}
