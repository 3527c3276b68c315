// SPDX-License-Identifier: Apache-2.0
// Times the kernels that make masks (cuda/mask/), all three of a mask in a CUDA graph, and says
// what the mask holds.
//
//   flash3_bench_masks
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cuda/mask/make_mask.hpp"
#include "device/device.hpp"
#include "device/planned_forward.hpp"

namespace flash3::cuda {
namespace {

constexpr int kSamples = 11, kGraphCalls = 20;

struct Point {
  std::string name;
  MaskProblem problem;
  std::vector<int> ints;       // of the source, or
  std::vector<uint8_t> bytes;  // likewise
};

MaskProblem problem_of(MaskSource source, int64_t seq, const MaskRule& rule, int64_t ranges = 1) {
  MaskProblem p;
  p.source = source;
  p.shape = {1, 1, seq, seq, ranges};
  p.shape.blocks = p.shape.all_blocks();
  for (Sequences* of : {&p.sequences_q, &p.sequences_k}) of->rows = of->max_length = seq;
  p.rule = rule;
  p.tensor.size = seq;
  p.tensor.stride_row = seq;
  return p;
}

Point band(const char* name, int64_t seq, const MaskRule& rule) {
  return {name, problem_of(MaskSource::kBand, seq, rule), {}, {}};
}

Point documents(const char* name, int64_t seq, int64_t length) {
  Point point{name, problem_of(MaskSource::kDocuments, seq, {.window_right = 0}), {}, {}};
  point.problem.tensor.stride_row = 0;
  point.problem.documents = (seq + length - 1) / length;
  for (int64_t i = 0; i < seq; ++i) point.ints.push_back(int(i / length));
  return point;
}

Point ranges(const char* name, int64_t seq, int64_t count) {
  Point point{name, problem_of(MaskSource::kRanges, seq, {.window_right = 0}, count), {}, {}};
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < seq; ++i) point.ints.push_back(int(i * r / count));
    for (int64_t i = 0; i < seq; ++i) point.ints.push_back(int(i * r / count + 500));
  }
  point.problem.shape.partial_blocks = point.problem.shape.blocks;
  return point;
}

// Of 16 blocks of 128, so many hold random bytes; the others are seen or not.
Point dense(const char* name, int64_t seq, uint64_t random_of_16) {
  Point point{name, problem_of(MaskSource::kDense, seq, {}), {}, {}};
  point.problem.shape.partial_blocks = point.problem.shape.blocks;
  point.bytes.resize(size_t(seq * seq));
  uint64_t state = 1;
  for (int64_t at = 0; at < seq * seq; ++at) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t block = uint64_t(at / seq / kMaskBlock * 131 + at % seq / kMaskBlock * 31);
    const bool random = block % 16 < random_of_16;
    point.bytes[size_t(at)] = uint8_t(random ? state >> 63 : block / 16 % 2);
  }
  return point;
}

// Of 16 blocks of 128, so many hold random bits; the others are seen or not.
Point bits(const char* name, int64_t seq, uint64_t random_of_16) {
  const Point of_bytes = dense(name, seq, random_of_16);
  Point point{name, of_bytes.problem, {}, std::vector<uint8_t>(size_t(seq * seq / 8))};
  point.problem.source = MaskSource::kBits;
  point.problem.tensor.size = point.problem.tensor.stride_row = seq / 8;
  for (size_t at = 0; at < of_bytes.bytes.size(); ++at)
    point.bytes[at / 8] |= uint8_t(of_bytes.bytes[at] << at % 8);
  return point;
}

Point blocks(const char* name, int64_t seq, int64_t size, int64_t step) {
  Point point{name, problem_of(MaskSource::kBlocks, seq, {}), {}, {}};
  MaskProblem& p = point.problem;
  p.shape.partial_blocks = p.shape.blocks;
  p.block_rows = p.block_keys = size;
  const int64_t all = seq / size, most = all / step;
  p.tensor.size = most, p.tensor.stride_row = most;
  p.counts.size = all;
  for (int64_t row = 0; row < all; ++row)
    for (int64_t n = 0; n < most; ++n) point.ints.push_back(int(n * step + row % step));
  for (int64_t row = 0; row < all; ++row) point.ints.push_back(int(most));  // the counts
  return point;
}

Status bench(Point& point, cases::Memory& memory) {
  MaskProblem& p = point.problem;
  const size_t bytes = point.ints.size() * sizeof(int) + point.bytes.size();
  const auto source = memory.allocate(bytes);
  if (!point.ints.empty()) memory.copy_in(source.get(), point.ints.data(), bytes);
  if (!point.bytes.empty()) memory.copy_in(source.get(), point.bytes.data(), bytes);
  p.tensor.data = source.get();
  if (p.source == MaskSource::kBlocks)
    p.counts.data =
        static_cast<const int*>(source.get()) + int64_t(point.ints.size()) - p.counts.size;
  const auto mask = memory.allocate(mask_bytes(p.shape, p.documents));
  p.data = mask.get();
  p.stream = memory.stream();

  Status status;
  const auto replay = memory.record([&] {
    for (int i = 0; i < kGraphCalls && status.ok(); ++i) status = launch_make_mask(p);
  });
  FLASH3_CHECK(std::move(status));
  replay();  // warms up
  memory.finish();
  std::vector<double> seconds;
  for (int sample = 0; sample < kSamples; ++sample)
    seconds.push_back(memory.time(replay) / kGraphCalls);
  std::ranges::nth_element(seconds, seconds.begin() + kSamples / 2);
  MaskCounts counts{};
  FLASH3_CHECK(read_mask_counts(p.shape, p.data, p.stream, &counts));
  if (counts.blocks == 0 || counts.overflow)
    return invalid_argument(point.name + " has become an empty mask");
  const double median = seconds[kSamples / 2];
  std::printf("%-40s %9.2f us  %8.1f GB/s of the source  %7d blocks %7d with bits\n",
              point.name.c_str(), median * 1e6, double(bytes) / median * 1e-9, counts.blocks,
              counts.partial_blocks);
  std::fflush(stdout);
  return {};
}

int run() {
  Device device;
  Status status = sm90::current_hopper(&device);
  std::unique_ptr<cases::Memory> memory;
  if (status.ok()) memory = device::make_device_memory();
  const auto add = [&](Point point) {
    if (status.ok()) status = bench(point, *memory);
  };
  if (status.ok()) std::printf("%s\n", device_name(device).c_str());
  add(band("band 65536, all", 65536, {}));
  add(band("band 65536, causal", 65536, {.window_right = 0}));
  add(documents("documents of 2000, 65536, causal", 65536, 2000));
  add(documents("one document, 65536, causal", 65536, 65536));
  add(documents("documents of 2000, 1048576, causal", 1048576, 2000));
  add(ranges("2 ranges, 65536, causal", 65536, 2));
  add(ranges("8 ranges, 65536, causal", 65536, 8));
  add(dense("dense 16384, none with bits", 16384, 0));
  add(dense("dense 16384, 1 of 8 with bits", 16384, 2));
  add(dense("dense 16384, all with bits", 16384, 16));
  add(dense("dense 16376, all with bits", 16376, 16));
  add(bits("bits 16384, none with bits", 16384, 0));
  add(bits("bits 16384, all with bits", 16384, 16));
  add(blocks("blocks of 128, 1 of 4, 65536", 65536, 128, 4));
  add(blocks("blocks of 64, 1 of 4, 65536", 65536, 64, 4));
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.code() == FLASH3_UNSUPPORTED ? 77 : 1;  // 77: skipped
}

}  // namespace
}  // namespace flash3::cuda

int main() { return flash3::cuda::run(); }
