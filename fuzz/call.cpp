// SPDX-License-Identifier: Apache-2.0
#include "call.hpp"

#include <numeric>

#include "cases/internals.hpp"

namespace flash3::fuzz {
namespace {

constexpr int kPadding = 3;  // elements before a tensor, and after a dimension of it

// Calls what(offset) for each element in order.
template <class What>
void for_each_element(const flash3_tensor& t, const What& what) {
  int64_t sizes[4] = {1, 1, 1, 1}, strides[4] = {};
  for (int d = 0; d < t.ndim; ++d)
    sizes[d] = t.shape[d], strides[d] = t.shape[d] > 1 ? t.stride[d] : 0;
  for (int64_t a = 0; a < sizes[0]; ++a)
    for (int64_t b = 0; b < sizes[1]; ++b)
      for (int64_t c = 0; c < sizes[2]; ++c)
        for (int64_t d = 0; d < sizes[3]; ++d)
          what(a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]);
}

}  // namespace

void check_status(flash3_status status) {
  FUZZ_CHECK(status >= FLASH3_OK && status < FLASH3_INTERNAL_ERROR, flash3_last_error());
  FUZZ_CHECK(status == FLASH3_OK || flash3_last_error()[0] != '\0', "a failure without a message");
}

Memory::Block* Memory::allocate(size_t size, size_t alignment, std::vector<Block>* where) {
  void* memory = nullptr;
  FUZZ_CHECK(posix_memalign(&memory, alignment, std::max<size_t>(size, 1)) == 0, "no memory");
  Block& block = where->emplace_back();
  block.memory.reset(static_cast<unsigned char*>(memory));
  block.size = size;
  return &block;
}

void Memory::fill_input(Block* block, flash3_dtype dtype) {
  // Bits of any kind, infinities and NaN among them, or numbers around 0.
  const bool any = bytes_.rarely();
  uint32_t state = bytes_.byte();
  const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  const size_t element = static_cast<size_t>(dtype_size(dtype));
  for (size_t i = 0; i < block->size / element; ++i) {
    if (any || dtype == FLASH3_FLOAT8_E4M3) {
      const uint32_t bits = next();
      std::memcpy(block->memory.get() + i * element, &bits, std::min<size_t>(element, 3));
    } else {
      store_float(block->memory.get(), dtype, static_cast<int64_t>(i),
                  static_cast<float>(next() % 512) / 128.f - 2.f);
    }
  }
  block->given.assign(block->memory.get(), block->memory.get() + block->size);
}

// Shape and strides. A tensor that is nowhere may have ones more than int64 holds: then they are
// any.
flash3_tensor Memory::describe(flash3_dtype dtype, const Shape& shape, bool output) {
  flash3_tensor t{};
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  const int last = t.ndim - 1;
  std::vector<int> order(shape.size());  // from the innermost dimension out
  std::iota(order.rbegin(), order.rend(), 0);
  const bool plain = bytes_.flag();
  if (!plain && t.ndim > 2) std::swap(order[1], order[size_t(bytes_.between(1, last))]);

  int64_t extent = 1;
  for (const int d : order) {
    const int64_t n = t.shape[d] = shape[size_t(d)];
    t.stride[d] = extent;
    if (n <= 1 && !plain && bytes_.rarely()) t.stride[d] = bytes_.odd();  // is never used
    if (n > 1 && d != last && !output && !plain && bytes_.rarely()) {
      t.stride[d] = 0;
      continue;
    }
    if (__builtin_mul_overflow(extent, std::max<int64_t>(n, 1), &extent)) extent = bytes_.odd();
    if (!plain && bytes_.flag() && extent < INT32_MAX) extent += bytes_.between(0, kPadding);
  }
  return t;
}

Memory::Block* Memory::place(flash3_dtype dtype, const Shape& shape, bool output,
                             std::vector<Block>* where, flash3_tensor* t) {
  *t = describe(dtype, shape, output);
  if (!exists_) return nullptr;
  // Up to the last element, not up to where the next would be.
  int64_t elements = std::count(shape.begin(), shape.end(), 0) > 0 ? 0 : 1;
  for (int d = 0; d < t->ndim && elements > 0; ++d)
    if (t->shape[d] > 1) elements += (t->shape[d] - 1) * t->stride[d];
  const int64_t before = bytes_.between(0, kPadding);
  const auto element = static_cast<size_t>(dtype_size(dtype));
  Block* block = allocate(static_cast<size_t>(before + elements) * element, 64, where);
  t->data = block->memory.get() + static_cast<size_t>(before) * element;
  return block;
}

void Memory::mark(const flash3_tensor& t, Block* block) {
  const int64_t element = dtype_size(t.dtype);
  const auto first =
      block->may_change.begin() + (static_cast<unsigned char*>(t.data) - block->memory.get());
  for_each_element(t, [&](int64_t at) { std::fill_n(first + at * element, element, true); });
}

flash3_tensor Memory::input(flash3_dtype dtype, const Shape& shape) {
  flash3_tensor t;
  if (Block* block = place(dtype, shape, false, &inputs_, &t)) fill_input(block, dtype);
  return t;
}

flash3_tensor Memory::input(flash3_dtype dtype, const Shape& shape, bool distinct,
                            const std::function<double()>& value) {
  flash3_tensor t;
  Block* const block = place(dtype, shape, distinct, &inputs_, &t);
  if (!block) return t;
  std::memset(block->memory.get(), 0xFF, block->size);
  const auto store = [&](int64_t at) {
    const double x = value();
    if (dtype == FLASH3_INT32)
      static_cast<int32_t*>(t.data)[at] = static_cast<int32_t>(x);
    else if (dtype == FLASH3_UINT8)
      static_cast<uint8_t*>(t.data)[at] = static_cast<uint8_t>(x);
    else
      store_float(t.data, dtype, at, static_cast<float>(x));
  };
  for_each_element(t, store);
  block->given.assign(block->memory.get(), block->memory.get() + block->size);
  return t;
}

flash3_tensor Memory::output(flash3_dtype dtype, const Shape& shape) {
  flash3_tensor t;
  if (Block* block = place(dtype, shape, true, &outputs_, &t)) {
    block->may_change.assign(block->size, false);
    mark(t, block);
  }
  return t;
}

flash3_tensor Memory::state(flash3_dtype dtype, const Shape& shape) {
  flash3_tensor t;
  const bool distinct = !bytes_.rarely();
  if (Block* block = place(dtype, shape, distinct, &states_, &t)) {
    fill_input(block, dtype);
    block->may_change.assign(block->size, false);
  }
  return t;
}

void Memory::allow(const flash3_tensor& state, int64_t first, int64_t second) {
  const auto* data = static_cast<const unsigned char*>(state.data);
  const auto holds = [&](const Block& block) {
    return data >= block.memory.get() && data < block.memory.get() + block.size;
  };
  const auto block = std::find_if(states_.begin(), states_.end(), holds);
  if (block == states_.end()) return;  // it has no elements
  flash3_tensor row = state;
  row.data = static_cast<unsigned char*>(state.data) +
             (first * state.stride[0] + second * state.stride[1]) * dtype_size(state.dtype);
  row.shape[0] = row.shape[1] = 1;
  mark(row, &*block);
}

flash3_tensor Memory::index(int64_t size) const {
  flash3_tensor t{};
  t.dtype = FLASH3_INT32;
  t.ndim = 1;
  t.shape[0] = size;
  t.stride[0] = 1;
  return t;
}

flash3_tensor Memory::index(const std::vector<int32_t>& values) {
  Block* block = allocate(values.size() * sizeof(int32_t), 64, &inputs_);
  if (!values.empty()) std::memcpy(block->memory.get(), values.data(), block->size);
  block->given.assign(block->memory.get(), block->memory.get() + block->size);
  flash3_tensor t = index(static_cast<int64_t>(values.size()));
  t.data = block->memory.get();
  return t;
}

void* Memory::workspace(size_t size) {
  Block* block = allocate(size, 256, &workspaces_);
  std::memset(block->memory.get(), 0xFF, size);  // NaN: what is read before it is written shows
  return size > 0 || bytes_.flag() ? block->memory.get() : nullptr;
}

void Memory::fill_outputs(unsigned char with) {
  for (Block& block : outputs_) std::memset(block.memory.get(), with, block.size);
  for (Block& block : states_)
    std::copy(block.given.begin(), block.given.end(), block.memory.get());
}

void Memory::check_inputs() const {
  for (const Block& block : inputs_)
    FUZZ_CHECK(std::equal(block.given.begin(), block.given.end(), block.memory.get()),
               "an input has changed");
}

void Memory::check_unwritten(unsigned char fill) const {
  for (const Block& block : outputs_)
    FUZZ_CHECK(std::all_of(block.memory.get(), block.memory.get() + block.size,
                           [&](unsigned char x) { return x == fill; }),
               "a call that failed has written");
  for (const Block& block : states_)
    FUZZ_CHECK(std::equal(block.given.begin(), block.given.end(), block.memory.get()),
               "a call that failed has written");
}

void Memory::keep_outputs() {
  for (std::vector<Block>* blocks : {&outputs_, &states_})
    for (Block& block : *blocks)
      block.kept.assign(block.memory.get(), block.memory.get() + block.size);
}

void Memory::check_outputs(unsigned char first_fill, unsigned char fill, bool whole) const {
  for (const Block& block : outputs_)
    for (size_t i = 0; i < block.size; ++i) {
      const unsigned char a = block.kept[i], b = block.memory.get()[i];
      const bool left = a == first_fill && b == fill;
      FUZZ_CHECK(block.may_change[i] || left, "a byte that belongs to no element was written");
      FUZZ_CHECK(
          a == b || (left && !(whole && block.may_change[i])),
          a == b || !left ? "two calls wrote different bytes" : "an element was not written");
    }
  for (const Block& block : states_) {
    FUZZ_CHECK(std::equal(block.kept.begin(), block.kept.end(), block.memory.get()),
               "two calls wrote different bytes");
    for (size_t i = 0; i < block.size; ++i)
      FUZZ_CHECK(block.may_change[i] || block.memory.get()[i] == block.given[i],
                 "a byte was written where nothing is to be appended");
  }
}

namespace {

Sizes draw_huge_sizes(Bytes* bytes) {
  const auto size = [&] {
    return bytes->flag() ? bytes->between(0, 3) : std::max<int64_t>(bytes->odd(), 0);
  };
  Sizes s{};
  s.batch = std::min<int64_t>(size(), INT32_MAX);
  s.seq_q = size(), s.seq_k = size(), s.heads_k = size();
  s.heads_q = s.heads_k;
  if (const int64_t group = size(); s.heads_k < INT32_MAX && group < INT32_MAX) s.heads_q *= group;
  s.dim = bytes->between(1, 256), s.dim_v = bytes->between(1, 256);
  return s;
}

Sizes draw_small_sizes(Bytes* bytes) {
  constexpr int64_t kMostElements = 1 << 13;
  Sizes s{};
  s.batch = bytes->between(0, 3);
  s.heads_k = bytes->between(0, 3);
  s.heads_q = bytes->rarely() ? bytes->between(0, 5) : s.heads_k * bytes->between(0, 3);
  s.dim = bytes->rarely() ? bytes->between(0, 300)
                          : bytes->pick({8, 64, 1, 7, 16, 33, 40, 128, 192, 256});
  s.dim_v = bytes->flag() ? s.dim : bytes->between(1, 256);
  const int64_t row =
      std::max<int64_t>(1, s.batch * std::max(s.heads_q, s.heads_k) * std::max(s.dim, s.dim_v));
  const int64_t most = std::clamp<int64_t>(kMostElements / row, 3, 600);
  s.seq_q = bytes->between(0, most);
  s.seq_k = bytes->flag() ? s.seq_q : bytes->between(0, most);
  return s;
}

}  // namespace

Sizes draw_sizes(Bytes* bytes, const Memory& memory) {
  Sizes s = memory.exists() ? draw_small_sizes(bytes) : draw_huge_sizes(bytes);
  const uint8_t packed = bytes->byte();
  s.packed_q = packed & 1, s.packed_k = packed & 2;
  return s;
}

}  // namespace flash3::fuzz
