// SPDX-License-Identifier: Apache-2.0
// What `flash3 run` makes of a file and of its options, --cu-seqlens among them, and the call that
// it leads to. The input: options by numbers, two lists of cu_seqlens with their lengths before
// them, then the file.
#include "cli/run_input.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "bytes.hpp"
#include "cases/tensors.hpp"

namespace {

using namespace flash3;

// A file without a folder.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& content)
      : descriptor_(memfd_create("input", MFD_CLOEXEC)) {
    FUZZ_CHECK(descriptor_ >= 0, "no file");
    FUZZ_CHECK(
        write(descriptor_, content.data(), content.size()) == static_cast<ssize_t>(content.size()),
        "not written");
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

cli::RunOptions draw_options(fuzz::Bytes* bytes) {
  cli::RunOptions options;
  options.layout = bytes->pick<const char*>({"", "bshd", "bhsd", "x"});
  options.sink = bytes->pick<const char*>({"", "", "sink", "q"});
  options.causal = bytes->flag();
  const uint8_t sides = bytes->byte();
  if (sides & 1) options.has_left = true, options.window_left = bytes->odd();
  if (sides & 2) options.has_right = true, options.window_right = bytes->odd();
  if (sides & 4) options.chunk = bytes->odd();
  if (sides & 8) options.softcap = bytes->raw<float>();
  if (sides & 16) options.softmax_scale = bytes->raw<float>();
  if (sides & 32) options.compute = "fp8";
  options.cu_seqlens = bytes->text(bytes->byte());
  if (!options.cu_seqlens.empty()) options.cu_seqlens_k = bytes->text(bytes->byte());
  return options;
}

// What load_input() accepts is a call that runs, where it is a small one.
void compute(const cli::Input& in) {
  constexpr int64_t kMostElements = 1 << 16;
  const std::vector<int64_t> shape = out_shape(in);
  flash3_tensor out = cli::view_of(nullptr, in.c.dtype, shape, in.c.layout);
  const auto elements = static_cast<size_t>(cases::span_of(out));
  const auto rows = static_cast<double>(in.c.seq_k) * static_cast<double>(in.c.heads_q + 1);
  if (elements > kMostElements || static_cast<double>(elements + 1) * rows > kMostElements) return;
  std::vector<std::byte> memory(elements * static_cast<size_t>(cases::element_size(in.c.dtype)));
  out.data = memory.data();
  auto params = cases::make_params(in.c, in.q, in.k, in.v, out, {}, in.extra());
  params.backend = FLASH3_BACKEND_CPU;
  params.num_threads = 1;
  FUZZ_CHECK(flash3_forward_workspace(&params, &params.workspace_size) == FLASH3_OK,
             flash3_last_error());
  const std::unique_ptr<void, void (*)(void*)> workspace(
      std::aligned_alloc(256, params.workspace_size + 256), std::free);
  params.workspace = workspace.get();
  FUZZ_CHECK(flash3_forward(&params) == FLASH3_OK, flash3_last_error());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  cli::RunOptions options = draw_options(&bytes);
  const MemoryFile file(bytes.text(bytes.left()));
  options.input = file.path();
  try {
    compute(cli::load_input(options));
  } catch (const cli::UsageError& e) {
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
  } catch (const safetensors::FileError& e) {
    FUZZ_CHECK(e.what()[0] != '\0', "a failure without a message");
  }
  return 0;
}
