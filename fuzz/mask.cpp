// SPDX-License-Identifier: Apache-2.0
// flash3_mask_make: masks from sources that hold anything, against their meaning pair by pair; then
// a forward and a backward that read them, against the oracle.
#include "flash3/mask.h"

#include "call.hpp"
#include "cases/internals.hpp"
#include "mask_params.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/mask_pairs.hpp"

namespace flash3::fuzz {
namespace {

constexpr Functions<flash3_forward_params> kForward = {
    flash3_forward_supported, flash3_forward_workspace, flash3_forward, flash3_forward_explain};
constexpr Functions<flash3_backward_params> kBackward = {
    flash3_backward_supported, flash3_backward_workspace, flash3_backward, flash3_backward_explain};

flash3_status ask_size(const flash3_mask_params& given, size_t* size, flash3_mask* described) {
  const OwnBlock<flash3_mask_params> block(given);
  const flash3_status status = flash3_mask_size(block.get(), size);
  check_status(status);
  const flash3_status also = flash3_mask_describe(block.get(), described);
  check_status(also);
  FUZZ_CHECK(also == status || (also == FLASH3_UNSUPPORTED && given.backend != FLASH3_BACKEND_CPU),
             flash3_last_error());
  FUZZ_CHECK(also != FLASH3_OK || described->size == *size, "a description has another size");
  return status;
}

// ---- what a mask holds ----

// The lists against the pairs, both ways round; empty: none may be seen.
class ListCheck {
 public:
  ListCheck(const flash3_mask_params& params, const flash3_mask& mask, const MaskPairs& pairs,
            bool empty)
      : memory_(MaskMemory::of({mask.batch, mask.heads, mask.seq_q, mask.seq_k, mask.ranges,
                                mask.blocks, mask.partial_blocks, mask.granularity},
                               mask.data)),
        params_(params),
        pairs_(pairs),
        empty_(empty) {}

  void run() const {
    const MaskShape& s = memory_.shape;
    int64_t blocks = 0, partial = 0;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h) {
        std::vector<std::vector<MaskBlock>> columns(static_cast<size_t>(s.k_blocks()));
        for (int64_t q = 0; q < s.q_blocks(); ++q) {
          const std::vector<MaskBlock> row = list(memory_.blocks, *memory_.list(b, h, q));
          check_row(b, h, q, row);
          blocks += static_cast<int64_t>(row.size());
          for (const MaskBlock& block : row) {
            partial += block.kind() == kMaskBits;
            columns[static_cast<size_t>(block.block())].push_back(
                block.as_seen_from(static_cast<int>(q)));
          }
        }
        for (int64_t k = 0; k < s.k_blocks(); ++k)
          check_column(columns[static_cast<size_t>(k)],
                       list(memory_.key_blocks, *memory_.key_list(b, h, k)));
      }
    FUZZ_CHECK(
        empty_ || (blocks == memory_.counts->blocks && partial == memory_.counts->partial_blocks),
        "the counts are not those of the lists");
  }

 private:
  std::vector<MaskBlock> list(const MaskBlock* of, const MaskList& list) const {
    FUZZ_CHECK(list.count == 0 || (list.begin >= 0 && list.count > 0 &&
                                   int64_t{list.begin} + list.count <= memory_.shape.blocks),
               "a list lies outside of the lists");
    return {of + list.begin, of + list.begin + list.count};
  }
  static int quarter_of(int64_t i, int64_t j) {
    return 1 << (j % kBlock / 64 * 2 + i % kBlock / 64);
  }
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j, const MaskBlock& block) const {
    switch (block.kind()) {
      case kMaskFull: return true;
      case kMaskQuarters: return (block.quarters() & quarter_of(i, j)) != 0;
      case kMaskRange: {
        FUZZ_CHECK(block.data >= 0 && block.data < memory_.shape.ranges, "there is no such range");
        const MaskRange range = *memory_.range(block.data, b, h, i);
        return range.begin <= j && j < range.end;
      }
      case kMaskBits: {
        FUZZ_CHECK(block.data >= 0 && block.data < memory_.shape.partial_blocks,
                   "there are no such bits");
        const MaskBit at = mask_bit(static_cast<int>(i % kBlock), static_cast<int>(j % kBlock));
        return (memory_.words_of(block.data)[at.word] >> at.bit & 1) != 0;
      }
    }
    fail(__FILE__, __LINE__, "a block of no kind");
  }
  void check_row(int64_t b, int64_t h, int64_t q, const std::vector<MaskBlock>& row) const {
    const MaskShape& s = memory_.shape;
    // What a list says of tokens that a sequence does not have means nothing.
    const int64_t queries = tokens_of(params_.cu_seqlens_q, params_.seqused_q, b, s.seq_q).count;
    const int64_t keys = tokens_of(params_.cu_seqlens_k, params_.seqused_k, b, s.seq_k).count;
    size_t next = 0;
    for (int64_t k = 0; k < s.k_blocks(); ++k) {
      const bool listed = next < row.size() && row[next].block() == k;
      const MaskBlock block = listed ? row[next++] : MaskBlock{};
      int any = 0;  // quarters
      for (int64_t i = q * kBlock; i < std::min<int64_t>((q + 1) * kBlock, queries); ++i)
        for (int64_t j = k * kBlock; j < std::min<int64_t>((k + 1) * kBlock, keys); ++j) {
          const bool meant = !empty_ && pairs_.of(b, h)[i * s.seq_k + j] != 0;
          if (meant) any |= quarter_of(i, j);
          FUZZ_CHECK((listed && sees(b, h, i, j, block)) == meant,
                     "query " + std::to_string(i) + ", key " + std::to_string(j));
        }
      FUZZ_CHECK(listed == (any != 0), "a block is listed of which nothing is seen");
      FUZZ_CHECK(block.quarters() == any, "other quarters of a block are listed than are seen");
    }
    FUZZ_CHECK(next == row.size(), "blocks do not ascend");
  }
  static void check_column(const std::vector<MaskBlock>& expected,
                           const std::vector<MaskBlock>& column) {
    const auto same = [](const MaskBlock& x, const MaskBlock& y) {
      return x.bits == y.bits && x.data == y.data;
    };
    FUZZ_CHECK(std::equal(column.begin(), column.end(), expected.begin(), expected.end(), same),
               "the lists of blocks of keys are others");
  }

  const MaskMemory memory_;
  const flash3_mask_params& params_;
  const MaskPairs& pairs_;
  const bool empty_;
};

// ---- calls that read it ----

// An output against an oracle's contiguous values. An oracle has 0 without a bound for the rows of
// no token, which the call fills.
void check_values(const char* name, const flash3_tensor& t, const std::vector<double>& values,
                  const std::vector<float>& bounds) {
  size_t i = 0;
  int64_t stride[4] = {}, size[4] = {1, 1, 1, 1};
  for (int d = 0; d < t.ndim; ++d) size[d] = t.shape[d], stride[d] = t.stride[d];
  for (int64_t a = 0; a < size[0]; ++a)
    for (int64_t b = 0; b < size[1]; ++b)
      for (int64_t c = 0; c < size[2]; ++c)
        for (int64_t d = 0; d < size[3]; ++d, ++i) {
          const double got = load_float(
              t.data, t.dtype, a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
          const bool right = got == values[i] ||  // −∞ too
                             (values[i] == 0 && bounds[i] == 0 && std::isinf(got) && got < 0) ||
                             std::abs(got - values[i]) <= static_cast<double>(bounds[i]);
          FUZZ_CHECK(right, std::string(name) + "[" + std::to_string(i) + "] = " +
                                std::to_string(got) + ", not " + std::to_string(values[i]));
        }
}

template <class Params>
void draw_call(Bytes* bytes, const flash3_mask_params& made, const Lengths& lengths,
               const flash3_mask* mask, Params* p) {
  p->struct_size = sizeof *p;
  p->mask = mask;
  lengths.give(p);
  p->fill_padding = lengths.any();
  p->backend = FLASH3_BACKEND_CPU;
  p->num_threads = bytes->pick({1, 2, 3});
  if (bytes->flag()) return;
  // The band of the mask may be said again.
  p->causal = made.causal, p->window = made.window, p->chunk = made.chunk;
  p->window_left = made.window_left, p->window_right = made.window_right;
  p->mask_alignment = made.mask_alignment;
}

struct Heads {
  int64_t k, dim, dim_v;
};

// Tensors of the call.
Sizes sizes_of(const flash3_mask_params& p, const Lengths& l, const Heads& heads) {
  return {p.batch,     p.seq_q,         p.seq_k,         p.heads_q, heads.k, heads.dim,
          heads.dim_v, l.cu_q.ndim > 0, l.cu_k.ndim > 0, l.rows_q,  l.rows_k};
}

struct Inputs {
  flash3_dtype dtype;
  flash3_tensor q, k, v, sink;
};

Inputs draw_inputs(Bytes* bytes, Memory* memory, const Sizes& s) {
  const auto normal = [state = bytes->raw<uint32_t>()]() mutable {
    return static_cast<double>((state = state * 1664525u + 1013904223u) >> 20) / 1024. - 2.;
  };
  Inputs in{bytes->pick({FLASH3_FLOAT32, FLASH3_BFLOAT16, FLASH3_FLOAT16}), {}, {}, {}, {}};
  in.q = memory->input(in.dtype, s.q(s.dim), false, normal);
  in.k = memory->input(in.dtype, s.k(s.dim), false, normal);
  in.v = memory->input(in.dtype, s.k(s.dim_v), false, normal);
  if (bytes->rarely()) in.sink = memory->input(FLASH3_FLOAT32, {s.heads_q}, true, normal);
  return in;
}

// A mask that may be anything is read in bounds; one that is whole gives what the oracle gives.
void attend(Bytes* bytes, const flash3_mask_params& p, const Lengths& lengths,
            const flash3_mask& mask, const MaskPairs* pairs) {
  Heads heads{p.heads_q, bytes->pick<int64_t>({8, 1, 3, 16, 40}), 0};
  if (p.heads_q > 0 && p.heads_q % 2 == 0 && bytes->flag()) heads.k = p.heads_q / 2;
  heads.dim_v = bytes->flag() ? heads.dim : bytes->between(1, 20);
  Memory memory(bytes, true);
  const Sizes sizes = sizes_of(p, lengths, heads);
  const Inputs in = draw_inputs(bytes, &memory, sizes);
  flash3_forward_params forward{};
  draw_call(bytes, p, lengths, &mask, &forward);
  forward.q = in.q, forward.k = in.k, forward.v = in.v, forward.sink = in.sink;
  forward.out = memory.output(in.dtype, sizes.q(sizes.dim_v));
  forward.lse = memory.output(FLASH3_FLOAT32, sizes.lse());
  FUZZ_CHECK(flash3_forward_supported(&forward) == FLASH3_OK, flash3_last_error());
  const bool ran = call(kForward, bytes, &memory, forward, true);

  ForwardProblem problem;
  FUZZ_CHECK(make_forward_problem(&forward, Pointers::kRequired, &problem).ok(), "no problem");
  const MaskPairs none{
      mask.batch, mask.heads, mask.seq_q, mask.seq_k,
      std::vector<uint8_t>(static_cast<size_t>(mask.batch * mask.heads * mask.seq_q * mask.seq_k))};
  const ReferenceForward ref = attention_ref(problem, 1, pairs ? pairs : &none);
  if (pairs && ran) {
    check_values("out", forward.out, ref.out, ref.out_bound);
    check_values("lse", forward.lse, ref.lse, ref.lse_bound);
  }

  Memory again(bytes, true);
  flash3_backward_params backward{};
  draw_call(bytes, p, lengths, &mask, &backward);
  backward.deterministic = bytes->flag();
  backward.q = in.q, backward.k = in.k, backward.v = in.v, backward.sink = in.sink;
  const auto one_by_one = [](const std::vector<double>& values) {
    return [&values, i = size_t{0}]() mutable { return values[i++]; };
  };
  const auto shape = [](const flash3_tensor& t) { return Shape(t.shape, t.shape + t.ndim); };
  backward.out = again.input(in.dtype, shape(forward.out), true, one_by_one(ref.out));
  backward.lse = again.input(FLASH3_FLOAT32, shape(forward.lse), true, one_by_one(ref.lse));
  backward.dout = again.input(in.dtype, shape(forward.out), false, [] { return 0.75; });
  backward.dq = again.output(in.dtype, shape(in.q));
  backward.dk = again.output(in.dtype, shape(in.k));
  backward.dv = again.output(in.dtype, shape(in.v));
  FUZZ_CHECK(flash3_backward_supported(&backward) == FLASH3_OK, flash3_last_error());
  const bool ran_backward = call(kBackward, bytes, &again, backward, true);
  memory.check_inputs();
  if (!pairs || !ran_backward) return;
  BackwardProblem of_backward;
  FUZZ_CHECK(make_backward_problem(&backward, Pointers::kRequired, &of_backward).ok(),
             "no problem");
  const ReferenceBackward gradients = attention_backward_ref(of_backward, 1, pairs);
  check_values("dq", backward.dq, gradients.dq, gradients.dq_bound);
  check_values("dk", backward.dk, gradients.dk, gradients.dk_bound);
  check_values("dv", backward.dv, gradients.dv, gradients.dv_bound);
}

// A call takes a mask with the fields that it was made with, and no other.
void bend(Bytes* bytes, const flash3_mask_params& p, const Lengths& lengths,
          const flash3_mask& mask) {
  flash3_mask bent = mask;
  constexpr size_t kFirst = offsetof(flash3_mask, key), kWords = (sizeof bent - kFirst) / 4;
  for (int64_t n = bytes->between(1, 3); n > 0; --n) {
    const int64_t value = bytes->odd();
    const auto word = static_cast<size_t>(bytes->between(0, kWords - 1));
    std::memcpy(reinterpret_cast<char*>(&bent) + kFirst + 4 * word, &value,
                word + 1 < kWords && bytes->flag() ? 8 : 4);
  }
  // These mean the same.
  const auto normalised = [](flash3_mask m) {
    m.window_left = std::max<int64_t>(m.window_left, -1);
    m.window_right = std::max<int64_t>(m.window_right, -1);
    m.mask_alignment = m.mask_alignment == FLASH3_ALIGN_TOP_LEFT;
    return m;
  };
  const flash3_mask given = normalised(bent), made = normalised(mask);
  const bool same = std::memcmp(&given, &made, sizeof given) == 0;
  Memory memory(bytes, true);
  const Sizes sizes = sizes_of(p, lengths, {p.heads_q, 8, 8});
  const Inputs in = draw_inputs(bytes, &memory, sizes);
  flash3_forward_params forward{};
  draw_call(bytes, p, lengths, &bent, &forward);
  forward.q = in.q, forward.k = in.k, forward.v = in.v;
  forward.out = memory.output(in.dtype, sizes.q(sizes.dim_v));
  if (flash3_forward_workspace(&forward, &forward.workspace_size) == FLASH3_OK)
    forward.workspace = memory.workspace(forward.workspace_size);
  memory.fill_outputs(0);
  const flash3_status status = flash3_forward(&forward);
  check_status(status);
  FUZZ_CHECK((status == FLASH3_OK) == same, flash3_last_error());
  if (!same) memory.check_unwritten(0);
}

// What no call has made may stand in a mask's memory: nothing outside of it is read then.
void spoil(Bytes* bytes, const flash3_mask& mask) {
  const int64_t words = static_cast<int64_t>(mask.size / 4);
  for (int64_t n = bytes->between(1, 12); n > 0; --n) {
    const auto value = static_cast<int32_t>(bytes->odd());
    const int64_t at = bytes->flag() ? bytes->raw<uint32_t>() % words
                                     : std::min<int64_t>(bytes->between(64, 255), words - 1);
    std::memcpy(static_cast<char*>(mask.data) + 4 * at, &value, 4);
  }
}

void make_and_use(Bytes* bytes, Memory* memory, const Lengths& lengths,
                  const flash3_mask_params& p) {
  constexpr size_t kMostBytes = size_t{1} << 26;
  flash3_mask mask{}, described{};
  const bool valid = ask_size(p, &mask.size, &described) == FLASH3_OK;
  FUZZ_CHECK(mask.size < kMostBytes, "a small mask needs too much memory");
  const bool enough = !bytes->rarely();
  if (!enough && mask.size > 0) mask.size = bytes->raw<uint32_t>() % mask.size;
  mask.data = memory->workspace(mask.size);
  const flash3_mask given = mask;
  const flash3_status status = flash3_mask_make(&p, &mask);
  check_status(status);
  memory->check_inputs();
  if (status != FLASH3_OK) {
    FUZZ_CHECK(std::memcmp(&given, &mask, sizeof mask) == 0, "a call that failed has written");
    return;
  }
  FUZZ_CHECK(valid && enough, "a mask is made that should not be");
  described.data = mask.data, described.size = mask.size;
  FUZZ_CHECK(std::memcmp(&described, &mask, sizeof mask) == 0, "a mask is not as described");

  int64_t blocks = 0, partial = 0, documents = 0;
  FUZZ_CHECK(flash3_mask_used(&mask, nullptr, &blocks, &partial, &documents) == FLASH3_OK,
             flash3_last_error());
  const bool empty =
      blocks > mask.blocks || partial > mask.partial_blocks || documents > mask.documents;
  FUZZ_CHECK(!empty || p.max_blocks > 0 || p.max_partial_blocks > 0 || p.max_documents > 0,
             "a mask lacks room");
  if (!lengths.sound) return attend(bytes, p, lengths, mask, nullptr);
  const MaskPairs pairs = mask_pairs(p);
  ListCheck(p, mask, pairs, empty).run();
  if (empty) return attend(bytes, p, lengths, mask, nullptr);
  attend(bytes, p, lengths, mask, &pairs);
  // A call without any element reads no mask.
  if (p.batch * p.heads_q * p.seq_q > 0 && bytes->flag()) bend(bytes, p, lengths, mask);
  if (!bytes->flag()) return;
  spoil(bytes, mask);
  attend(bytes, p, lengths, mask, nullptr);
}

}  // namespace
}  // namespace flash3::fuzz

// The first byte says what follows: a struct's own bytes, a mask, or a question of any size; the
// last two numbers are a mask and a question with lengths.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace flash3::fuzz;
  Bytes bytes(data, size);
  size_t of_mask = 0;
  flash3_mask described{};
  const int64_t kind = bytes.between(0, 6);
  if (kind == 4) {
    ask_size(raw_params<flash3_mask_params>(&bytes), &of_mask, &described);
    return 0;
  }
  const bool exists = kind != 2 && kind != 6;
  Memory memory(&bytes, exists);
  Lengths lengths;
  flash3_mask_params params = draw_params(&bytes, &memory, kind > 4, &lengths);
  if (kind == 3 || (!exists && bytes.flag())) patch(&bytes, &params);
  if (exists && kind != 3)
    make_and_use(&bytes, &memory, lengths, params);
  else
    ask_size(params, &of_mask, &described);
  return 0;
}
