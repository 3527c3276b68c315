// SPDX-License-Identifier: Apache-2.0
// A flash3_quantize call on the device and the same on the CPU, with a fill pattern around every
// tensor.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "cases/memory.hpp"
#include "cases/tensors.hpp"
#include "core/convert.hpp"
#include "core/fp8.hpp"
#include "device/device.hpp"

namespace flash3 {

using Bytes = std::vector<std::byte>;
inline constexpr std::byte kFillPattern{0xA5};
inline constexpr int64_t kGuard = 256;  // bytes of it around each tensor

enum class Rotary { kNone, kHalves, kInterleaved };

struct Options {
  flash3_dtype dtype = FLASH3_BFLOAT16;
  int64_t batch = 3, heads_q = 4, heads_k = 2;
  int64_t seq_q = 300, seq_k = 129;  // packed: rows of the tensors
  int64_t dim = 128, dim_v = 128;
  int scale_ndim = 3;
  bool rotate = false;
  Rotary rotary = Rotary::kNone;
  int64_t rotary_dim = 0;
  flash3_dtype table = FLASH3_FLOAT32;
  bool packed = false, used = false;
  int64_t pad = 0, out_pad = 0;  // elements between rows, and before the first
  bool heads_first = false;

  std::string text() const {
    std::string s = std::string(flash3_dtype_name(dtype)) + ", " + std::to_string(batch) + " of " +
                    std::to_string(seq_q) + " and " + std::to_string(seq_k) + ", d " +
                    std::to_string(dim) + " and " + std::to_string(dim_v) + ", scales of " +
                    std::to_string(scale_ndim);
    if (rotate) s += ", rotated";
    if (rotary != Rotary::kNone)
      s += (rotary == Rotary::kHalves ? ", rotary " : ", interleaved rotary ") +
           std::to_string(rotary_dim) + " " + flash3_dtype_name(table);
    if (packed) s += ", packed";
    if (used) s += ", used";
    return s + ", pads " + std::to_string(pad) + " " + std::to_string(out_pad) +
           (heads_first ? ", heads first" : "");
  }
};

// Lengths of the same batch, q's and k's.
struct Lengths {
  std::vector<int> cu_q, cu_k, used_q, used_k;
};

inline Lengths lengths_of(const Options& o, uint64_t seed) {
  Lengths made;
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  const auto below = [&](int64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return int((state >> 33) % uint64_t(n));
  };
  for (const auto& [seq, cu, used] :
       {std::tuple{o.seq_q, &made.cu_q, &made.used_q}, {o.seq_k, &made.cu_k, &made.used_k}}) {
    for (int64_t b = 0; b <= o.batch; ++b) cu->push_back(below(seq + 1));
    std::sort(cu->begin(), cu->end());
    for (int64_t b = 0; b < o.batch; ++b)
      used->push_back(below((o.packed ? (*cu)[size_t(b) + 1] - (*cu)[size_t(b)] : seq) + 1));
  }
  return made;
}

// The same bytes on the host and on the device.
class Twin {
 public:
  Twin(cases::Memory& memory, int64_t bytes)
      : memory_(memory),
        host(size_t(bytes + 2 * kGuard), kFillPattern),
        device_(memory.allocate(host.size())) {
    upload();
  }
  void upload() { memory_.copy_in(device_.get(), host.data(), host.size()); }
  void fill() {
    std::fill(host.begin(), host.end(), kFillPattern);
    upload();
  }
  std::byte* at(bool on_device) {
    return (on_device ? static_cast<std::byte*>(device_.get()) : host.data()) + kGuard;
  }
  Bytes downloaded() const {
    Bytes bytes(host.size());
    memory_.copy_out(bytes.data(), device_.get(), bytes.size());
    return bytes;
  }

 private:
  cases::Memory& memory_;

 public:
  Bytes host;

 private:
  std::shared_ptr<void> device_;
};

class Call {
 public:
  Call(cases::Memory& memory, const Options& o) : memory_(memory), o_(o) {
    const struct {
      int64_t seq, heads, dim;
    } sizes[] = {
        {o.seq_q, o.heads_q, o.dim}, {o.seq_k, o.heads_k, o.dim}, {o.seq_k, o.heads_k, o.dim_v}};
    for (int i = 0; i < 3; ++i) {
      const auto& s = sizes[i];
      in_[i] = make(o.dtype, s.seq, s.heads, s.dim, o.pad);
      out_[i] = make(FLASH3_FLOAT8_E4M3, s.seq, s.heads, s.dim, o.out_pad);
      scale_[i] = make_scale(s.seq, s.heads);
      fill(in_[i], uint64_t(i) + 1);
    }
    for (auto* table : {&cos_, &sin_}) {
      const int64_t positions = std::max(o.seq_q, o.seq_k) + 5, half = o.rotary_dim / 2;
      *table = {{nullptr, o.table, 2, {positions, half}, {half, 1}}, 0, nullptr};
      table->twin = std::make_unique<Twin>(memory, positions * half * 4);
      for (int64_t p = 0; p < positions; ++p)
        for (int64_t i = 0; i < half; ++i) {
          const double angle = double(p) * std::pow(1e4, -double(i) / double(half));
          store_float(table->twin->at(false), o.table, p * half + i,
                      float(table == &cos_ ? std::cos(angle) : std::sin(angle)));
        }
      table->twin->upload();
    }
    for (auto& t : lengths_) t = std::make_unique<Twin>(memory, (o.batch + 1) * 4);
    set_lengths(lengths_of(o, 1));
  }

  void set_lengths(const Lengths& lengths) {
    const std::vector<int>* all[] = {&lengths.cu_q, &lengths.cu_k, &lengths.used_q,
                                     &lengths.used_k};
    for (int i = 0; i < 4; ++i) {
      std::memcpy(lengths_[i]->at(false), all[i]->data(), all[i]->size() * 4);
      lengths_[i]->upload();
    }
  }

  void set_element(int tensor, int64_t batch, int64_t row, int64_t head, int64_t dim, float x) {
    const flash3_tensor& t = in_[tensor].view;
    store_float(in_[tensor].data(false), t.dtype,
                batch * t.stride[0] + row * t.stride[1] + head * t.stride[2] + dim, x);
    in_[tensor].twin->upload();
  }

  flash3_quantize_params params(bool on_device) {
    flash3_quantize_params p{};
    p.struct_size = sizeof p;
    p.q = in_[0].at(on_device), p.k = in_[1].at(on_device), p.v = in_[2].at(on_device);
    p.q_out = out_[0].at(on_device), p.k_out = out_[1].at(on_device);
    p.v_out = out_[2].at(on_device);
    p.q_scale = scale_[0].at(on_device), p.k_scale = scale_[1].at(on_device);
    p.v_scale = scale_[2].at(on_device);
    p.rotate = o_.rotate;
    p.rotation_seed = 0x5EED;
    if (o_.rotary != Rotary::kNone) {
      p.rotary_cos = cos_.at(on_device), p.rotary_sin = sin_.at(on_device);
      p.rotary_interleaved = o_.rotary == Rotary::kInterleaved;
      p.rotary_offset_q = 5, p.rotary_offset_k = 2;
    }
    const auto lengths = [&](int i, int64_t count) {
      return flash3_tensor{lengths_[i]->at(on_device), FLASH3_INT32, 1, {count}, {1}};
    };
    if (o_.packed) {
      p.cu_seqlens_q = lengths(0, o_.batch + 1);
      p.cu_seqlens_k = lengths(1, o_.batch + 1);
    }
    if (o_.used) {
      p.seqused_q = lengths(2, o_.batch);
      p.seqused_k = lengths(3, o_.batch);
    }
    p.backend = on_device ? FLASH3_BACKEND_HOPPER : FLASH3_BACKEND_CPU;
    p.stream = on_device ? memory_.stream() : nullptr;
    return p;
  }

  void fill_results() {
    for (int i = 0; i < 3; ++i) out_[i].twin->fill(), scale_[i].twin->fill();
  }
  void run_on_device() {
    const flash3_quantize_params p = params(true);
    size_t bytes = 1;
    ASSERT_EQ(flash3_quantize_workspace(&p, &bytes), FLASH3_OK) << flash3_last_error();
    ASSERT_EQ(bytes, 0u);
    ASSERT_EQ(flash3_quantize(&p), FLASH3_OK) << flash3_last_error();
    memory_.finish();
  }
  // Whether q and k are rotated on the tensor cores, as the call itself says.
  bool rotates_on_tensor_cores() {
    const flash3_quantize_params p = params(true);
    char text[4096];
    size_t size = sizeof text;
    EXPECT_EQ(flash3_quantize_explain(&p, text, &size), FLASH3_OK) << flash3_last_error();
    return std::string_view(text).find("_rotated") != std::string_view::npos;
  }
  // Codes of one tensor that may be the CPU's neighbours: those that the tensor cores' sums, which
  // are rounded elsewhere, take across the border between two. `flash3 verify --quantize` holds
  // each to the exact values.
  static int64_t neighbours_allowed(int64_t codes) { return 2 + codes / 20000; }
  static bool are_neighbours(std::byte a, std::byte b) {
    const auto place = [](std::byte code) {
      const int size = int(code & std::byte{0x7F});
      return (code & std::byte{0x80}) == std::byte{0} ? size : -size;
    };
    return std::abs(place(a)) < kE4m3Nan && std::abs(place(b)) < kE4m3Nan &&
           std::abs(place(a) - place(b)) <= 1;
  }

  // The CPU's results against those on the device, all bytes of them.
  void expect_same_as_cpu() {
    const flash3_quantize_params p = params(false);
    ASSERT_EQ(flash3_quantize(&p), FLASH3_OK) << flash3_last_error();
    const char* const names[] = {"q", "k", "v"};
    const bool may_differ = rotates_on_tensor_cores();
    for (int i = 0; i < 3; ++i)
      for (const auto& [name, made] : {std::pair{"_scale", &scale_[i]}, {"_out", &out_[i]}}) {
        const Bytes& want = made->twin->host;
        const Bytes got = made->twin->downloaded();
        int64_t neighbours =
            may_differ && made == &out_[i] && i < 2 ? neighbours_allowed(int64_t(got.size())) : 0;
        auto at = std::mismatch(got.begin(), got.end(), want.begin());
        while (at.first != got.end() && are_neighbours(*at.first, *at.second) && neighbours-- > 0)
          at = std::mismatch(at.first + 1, got.end(), at.second + 1);
        if (at.first == got.end()) continue;
        ADD_FAILURE() << o_.text() << ": " << names[i] << name << " differs at byte "
                      << at.first - got.begin() - kGuard << " of " << got.size() - 2 * kGuard
                      << ": " << int(*at.first) << " and not " << int(*at.second);
        return;
      }
  }
  // Nothing around the results has been written; what is in them is not looked at.
  void expect_guards() {
    for (int i = 0; i < 3; ++i)
      for (const Made* made : {&scale_[i], &out_[i]}) {
        const Bytes got = made->twin->downloaded();
        const auto is_fill = [](std::byte b) { return b == kFillPattern; };
        EXPECT_TRUE(std::all_of(got.begin(), got.begin() + kGuard, is_fill)) << o_.text();
        EXPECT_TRUE(std::all_of(got.end() - kGuard, got.end(), is_fill)) << o_.text();
      }
  }

 private:
  struct Made {
    flash3_tensor view;
    int64_t offset;  // bytes
    std::unique_ptr<Twin> twin;

    std::byte* data(bool on_device) const { return twin->at(on_device) + offset; }
    flash3_tensor at(bool on_device) const {
      flash3_tensor t = view;
      t.data = data(on_device);
      return t;
    }
  };

  Made make(flash3_dtype dtype, int64_t seq, int64_t heads, int64_t dim, int64_t pad) {
    const int64_t size = dtype == FLASH3_FLOAT8_E4M3 ? 1 : 2, row = dim + pad;
    const int64_t seq_stride = o_.heads_first ? row : row * heads,
                  head_stride = o_.heads_first ? row * seq : row;
    Made made{};
    if (o_.packed)
      made.view = {nullptr, dtype, 3, {seq, heads, dim}, {seq_stride, head_stride, 1}};
    else
      made.view = {nullptr,
                   dtype,
                   4,
                   {o_.batch, seq, heads, dim},
                   {seq * heads * row, seq_stride, head_stride, 1}};
    made.offset = pad * size;
    const int64_t rows = (o_.packed ? 1 : o_.batch) * seq * heads;
    made.twin = std::make_unique<Twin>(memory_, (rows * row + pad) * size);
    return made;
  }
  Made make_scale(int64_t seq, int64_t heads) {
    Made made{};
    std::vector<int64_t> shape = {1};
    if (o_.scale_ndim == 2) shape = {o_.batch, o_.heads_k};
    if (o_.scale_ndim == 3)
      shape = {o_.packed ? 1 : o_.batch, heads,
               o_.packed ? seq / kScaleBlock + o_.batch : ceil_div(seq, kScaleBlock)};
    made.view.dtype = FLASH3_FLOAT32;
    made.view.ndim = o_.scale_ndim;
    int64_t count = 1;
    for (int d = o_.scale_ndim - 1; d >= 0; --d) {
      made.view.shape[d] = shape[size_t(d)];
      made.view.stride[d] = count;
      count *= shape[size_t(d)];
    }
    made.twin = std::make_unique<Twin>(memory_, count * 4);
    return made;
  }
  // Normal numbers whose size differs from block to block by powers of two, some zeros, outliers.
  void fill(const Made& made, uint64_t seed) {
    const auto count = int64_t(made.twin->host.size() - size_t(2 * kGuard)) / 2;
    cases::fill_normal(made.twin->at(false), o_.dtype, count, seed);
    for (int64_t i = 0; i < count; ++i) {
      float x = load_float(made.twin->at(false), o_.dtype, i);
      x *= std::ldexp(1.f, int(i / 20000 % 9) - 4);
      if (i % 997 == 0) x *= 100.f;
      if (i % 13 == 0) x = i % 2 == 0 ? 0.f : -0.f;
      store_float(made.twin->at(false), o_.dtype, i, x);
    }
    made.twin->upload();
  }

  cases::Memory& memory_;
  const Options o_;
  Made in_[3], out_[3], scale_[3], cos_, sin_;
  std::unique_ptr<Twin> lengths_[4];
};

}  // namespace flash3
