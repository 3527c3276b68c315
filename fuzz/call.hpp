// SPDX-License-Identifier: Apache-2.0
// Calls of the C interface on bounded memory: every tensor lies in a heap block of its own, which
// ends where the tensor ends, so that AddressSanitizer sees a step too far, and a step into a gap
// between its elements is seen here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "core/fields.hpp"
#include "flash3/flash3.h"
#include "flash3/schedule.h"

namespace flash3::fuzz {

using Shape = std::vector<int64_t>;

// The memory of one call. A call that is only asked about has none (exists = false), and
// tensors may be larger than any memory.
class Memory {
 public:
  Memory(Bytes* bytes, bool exists) : bytes_(*bytes), exists_(exists) {}

  bool exists() const { return exists_; }

  // A tensor with gaps, in any order of dimensions; an input may be broadcast.
  flash3_tensor input(flash3_dtype dtype, const Shape& shape);
  // The same, which holds value() for each element, one after the other. distinct: it is not
  // broadcast.
  flash3_tensor input(flash3_dtype dtype, const Shape& shape, bool distinct,
                      const std::function<double()>& value);
  flash3_tensor output(flash3_dtype dtype, const Shape& shape);
  // One that a call reads and writes: before each it holds the same values, and afterwards others
  // only where they are allowed. Its rows may share memory, which no call may take.
  flash3_tensor state(flash3_dtype dtype, const Shape& shape);
  // The last two dimensions of state[first][second].
  void allow(const flash3_tensor& state, int64_t first, int64_t second);
  // An input of these int32, or of so many.
  flash3_tensor index(const std::vector<int32_t>& values);
  flash3_tensor index(int64_t size) const;

  // One that lives as long as this memory.
  flash3_schedule* schedule() { return &schedule_; }
  // The call must fail, though a question does not tell.
  void expect_refusal() { refusal_ = true; }
  bool expects_refusal() const { return refusal_; }

  // Mostly what the call needs: so many bytes, aligned to 256.
  void* workspace(size_t size);

  // As before any call, outputs with this value.
  void fill_outputs(unsigned char with);
  void check_inputs() const;
  // After a call that has failed: outputs and states are what fill_outputs() has left there.
  void check_unwritten(unsigned char fill) const;
  void keep_outputs();
  // After a second call, with another fill: nothing between elements was written, and what was is
  // the same. whole: all elements were.
  void check_outputs(unsigned char first_fill, unsigned char fill, bool whole) const;

 private:
  struct Block {
    std::unique_ptr<unsigned char, void (*)(void*)> memory{nullptr, std::free};
    size_t size = 0;
    std::vector<unsigned char> given;  // inputs and states: what they hold before a call
    std::vector<unsigned char> kept;   // outputs and states: what they held after the first
    std::vector<bool> may_change;      // outputs: the bytes of elements; states: the allowed ones
  };

  flash3_tensor describe(flash3_dtype dtype, const Shape& shape, bool output);
  Block* allocate(size_t size, size_t alignment, std::vector<Block>* where);
  Block* place(flash3_dtype dtype, const Shape& shape, bool output, std::vector<Block>* where,
               flash3_tensor* t);
  void fill_input(Block* block, flash3_dtype dtype);
  // The bytes of a tensor's elements may change.
  static void mark(const flash3_tensor& t, Block* block);

  Bytes& bytes_;
  const bool exists_;
  std::vector<Block> inputs_, outputs_, states_, workspaces_;
  flash3_schedule schedule_{};
  bool refusal_ = false;
};

// What forward and backward say alike, but for the tensors.
struct Sizes {
  int64_t batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v;
  bool packed_q, packed_k;
  int64_t rows_q, rows_k;  // of packed tensors

  Shape q(int64_t d) const { return side(packed_q, seq_q, rows_q, heads_q, d); }
  Shape k(int64_t d) const { return side(packed_k, seq_k, rows_k, heads_k, d); }
  Shape lse() const { return packed_q ? Shape{heads_q, rows_q} : Shape{batch, heads_q, seq_q}; }

 private:
  Shape side(bool packed, int64_t seq, int64_t rows, int64_t heads, int64_t d) const {
    return packed ? Shape{rows, heads, d} : Shape{batch, seq, heads, d};
  }
};

// Sizes of a small call, or of a huge one.
Sizes draw_sizes(Bytes* bytes, const Memory& memory);

// Sequences' lengths; sets the rows of packed tensors.
template <class Params>
void draw_sequences(Bytes* bytes, Memory* memory, Sizes* sizes, Params* p) {
  const auto side = [&](bool packed, int64_t seq, int64_t* rows, flash3_tensor* cu,
                        flash3_tensor* used, int64_t* longest) {
    const bool has_used = bytes->between(0, 3) == 3;
    if (!memory->exists()) {
      *rows = std::max<int64_t>(bytes->odd(), 0);
      if (packed) *cu = memory->index(sizes->batch + 1), *longest = bytes->odd();
      if (has_used) *used = memory->index(sizes->batch);
      return;
    }
    std::vector<int32_t> bounds{static_cast<int32_t>(packed && bytes->rarely() ? 2 : 0)}, counts;
    for (int64_t b = 0; b < sizes->batch; ++b) {
      const auto n = static_cast<int32_t>(packed ? bytes->between(0, seq) : seq);
      bounds.push_back(bounds.back() + n);
      counts.push_back(static_cast<int32_t>(bytes->between(0, n)));
    }
    *rows = bounds.back() + bytes->between(0, 3);
    if (bytes->rarely()) bounds[size_t(bytes->between(0, sizes->batch))] = bytes->raw<int32_t>();
    if (bytes->rarely() && sizes->batch > 0) counts[0] = bytes->raw<int32_t>();
    if (packed) *cu = memory->index(bounds);
    if (packed && bytes->flag()) *longest = bytes->rarely() ? bytes->odd() : seq;
    if (has_used) *used = memory->index(counts);
  };
  side(sizes->packed_q, sizes->seq_q, &sizes->rows_q, &p->cu_seqlens_q, &p->seqused_q,
       &p->max_seqlen_q);
  side(sizes->packed_k, sizes->seq_k, &sizes->rows_k, &p->cu_seqlens_k, &p->seqused_k,
       &p->max_seqlen_k);
}

// Flags and numbers: plain ones, and any.
inline int64_t draw_number(Bytes* bytes) {
  return bytes->rarely() ? bytes->odd() : bytes->between(-1, 40);
}
template <class Params>
void draw_window(Bytes* bytes, Params* p) {
  const auto flag = [&] {
    return bytes->rarely() ? bytes->raw<int32_t>() : int32_t{bytes->flag()};
  };
  p->causal = flag();
  p->window = flag();
  if (p->window) p->window_left = draw_number(bytes), p->window_right = draw_number(bytes);
}
template <class Params>
void draw_options(Bytes* bytes, Params* p) {
  const auto real = [&] {
    return bytes->rarely() ? bytes->raw<float>() : static_cast<float>(bytes->byte()) / 64.f;
  };
  if (bytes->flag()) p->softmax_scale = real();
  draw_window(bytes, p);
  if (bytes->between(0, 3) == 3) p->softcap = real();
  if (bytes->between(0, 3) == 3) p->chunk = draw_number(bytes);
}

template <class Params>
void draw_machine(Bytes* bytes, Params* p) {
  p->backend = bytes->rarely() ? bytes->raw<int32_t>() : bytes->pick({2, 0, 2, 1});
  p->num_threads = bytes->rarely() ? bytes->raw<int32_t>() : bytes->pick({1, 2, 3, 0});
}

// Fields that nothing here knows by name, mostly left out: any small number, or anything; a tensor
// of one of its shapes.
template <class Params>
void draw_added(Bytes* bytes, Memory* memory, const Sizes& sizes, Params* p) {
  for (const ParamField& field : added_fields<Params>()) {
    if (field.is_context || !bytes->rarely()) continue;
    if (field.kind == FieldKind::kTensor) {
      const auto dtype = field.dtype == FLASH3_DTYPE_NONE ? FLASH3_FLOAT32 : field.dtype;
      const int64_t which = bytes->between(0, count_words(field.shapes) - 1);
      const Shape shape =
          shape_of_added(word_at(field.shapes, which), sizes.batch, sizes.heads_q, sizes.lse(),
                         sizes.packed_k ? sizes.rows_k : sizes.seq_k, bytes->between(0, 5));
      *field.tensor(p) =
          field.is_written ? memory->output(dtype, shape) : memory->input(dtype, shape);
      continue;
    }
    const int64_t value = bytes->flag() ? bytes->between(0, 3) : bytes->odd();
    if (field.kind == FieldKind::kFloat) field.set(p, static_cast<float>(value));
    if (field.kind == FieldKind::kInt32) field.set(p, static_cast<int32_t>(value));
    if (field.kind == FieldKind::kInt64 || field.kind == FieldKind::kUint64) field.set(p, value);
  }
}

// The four functions of a kind of call.
template <class Params>
struct Functions {
  flash3_status (*supported)(const Params*);
  flash3_status (*workspace)(const Params*, size_t*);
  flash3_status (*run)(const Params*);
  flash3_status (*explain)(const Params*, char*, size_t*);
};

void check_status(flash3_status status);

// A copy of params in a block of as many bytes as struct_size says.
template <class Params>
class OwnBlock {
 public:
  explicit OwnBlock(const Params& given) {
    constexpr size_t kMostRead = 4096;  // src/core/params.hpp: kPlausibleParamsSize
    const size_t size = std::clamp(given.struct_size, sizeof given.struct_size, kMostRead);
    block_.reset(new unsigned char[size]());
    std::memcpy(block_.get(), &given, std::min(size, sizeof given));
  }
  const Params* get() const { return reinterpret_cast<const Params*>(block_.get()); }

 private:
  std::unique_ptr<unsigned char[]> block_;
};

// Asks what can be asked.
template <class Params>
flash3_status ask(const Functions<Params>& f, const Params& given, size_t* workspace) {
  const OwnBlock<Params> block(given);
  const Params* const params = block.get();

  const flash3_status status = f.supported(params);
  check_status(status);
  *workspace = 0;
  const flash3_status answered = f.workspace(params, workspace);
  check_status(answered);
  FUZZ_CHECK(answered == status, flash3_last_error());

  size_t length = 0;
  const flash3_status explained = f.explain(params, nullptr, &length);
  check_status(explained);
  FUZZ_CHECK(explained == status, flash3_last_error());
  if (status != FLASH3_OK) return status;
  for (const size_t room : {size_t{0}, size_t{1}, length / 2, length}) {
    const std::unique_ptr<char[]> buffer(new char[room]);
    size_t told = room;
    FUZZ_CHECK(f.explain(params, buffer.get(), &told) == FLASH3_OK, flash3_last_error());
    FUZZ_CHECK(told == length, "explain's length depends on the buffer");
    FUZZ_CHECK(room == 0 ||
                   std::memchr(buffer.get(), 0, room) == buffer.get() + std::min(room, length) - 1,
               "explain's text is not ended where it is cut");
  }
  return status;
}

// A struct's own bytes, but for pointers that the library follows as it follows that to the struct.
template <class Params>
Params raw_params(Bytes* bytes) {
  auto p = bytes->raw<Params>();
  if constexpr (requires { p.schedule; }) p.schedule = nullptr;
  if constexpr (requires { p.mask; }) p.mask = nullptr;
  return p;
}

// Some fields become anything: for questions alone, as their tensors lie nowhere any more.
template <class Params>
void patch(Bytes* bytes, Params* p) {
  const Params before = *p;
  for (int64_t n = bytes->between(1, 4); n > 0; --n) {
    const auto word = static_cast<size_t>(bytes->between(0, sizeof *p / 4 - 1));
    const int64_t value = bytes->odd();
    std::memcpy(reinterpret_cast<char*>(p) + 4 * word, &value,
                word + 1 < sizeof *p / 4 && bytes->flag() ? 8 : 4);
  }
  if constexpr (requires { p->schedule; }) p->schedule = before.schedule;
  if constexpr (requires { p->mask; }) p->mask = before.mask;
}

// A call on its memory, twice; whether it ran. whole: no element of an output may be left as it
// was.
template <class Params>
bool call(const Functions<Params>& f, Bytes* bytes, Memory* memory, Params params, bool whole) {
  constexpr unsigned char kFirst = 0xA5, kSecond = 0x3C;
  constexpr size_t kMostBytes = size_t{1} << 28;
  const flash3_status supported = ask(f, params, &params.workspace_size);
  FUZZ_CHECK(supported != FLASH3_OK || params.workspace_size < kMostBytes,
             "a small call needs too much workspace");
  const size_t needed = params.workspace_size;
  if (bytes->rarely()) params.workspace_size = static_cast<size_t>(bytes->between(0, 4096));
  const bool enough = params.workspace_size >= needed;
  params.workspace = memory->workspace(params.workspace_size);

  for (const unsigned char fill : {kFirst, kSecond}) {
    memory->fill_outputs(fill);
    const flash3_status status = f.run(&params);
    check_status(status);
    memory->check_inputs();
    if (status != FLASH3_OK) {
      memory->check_unwritten(fill);
      return false;
    }
    FUZZ_CHECK(supported == FLASH3_OK && enough && !memory->expects_refusal(),
               "a call runs that should not");
    if (fill == kFirst) memory->keep_outputs();
  }
  memory->check_outputs(kFirst, kSecond, whole);
  return true;
}

// What a target does with its input. The first byte says what follows: a struct's own bytes, a
// call, or one that is only asked about, of any size, with fields that are anything.
template <class Params, class Make>
int run_target(const Functions<Params>& f, const uint8_t* data, size_t size, const Make& make) {
  Bytes bytes(data, size);
  size_t workspace = 0;
  const int64_t kind = bytes.between(0, 4);
  if (kind == 4) {
    ask(f, raw_params<Params>(&bytes), &workspace);
    return 0;
  }
  Memory memory(&bytes, kind != 2);
  bool whole = true;
  Params params = make(&bytes, &memory, &whole);
  if (kind == 3 || (kind == 2 && bytes.flag())) patch(&bytes, &params);
  if (kind < 2)
    call(f, &bytes, &memory, params, whole);
  else
    ask(f, params, &workspace);
  return 0;
}

}  // namespace flash3::fuzz
