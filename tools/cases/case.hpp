// SPDX-License-Identifier: Apache-2.0
// One attention call to verify or to time, with an id that a person can read and type:
//
//   bf16/b2/q129/k1000/h4x2/d128/causal          h<heads_q>x<heads_k> (h4: MHA), d<dim>x<dim_v>
//   (d64) fp16/b1/q65/k65/h2/d40x72/w100:50/bhsd/outliers/nolse/scale0.5/seed7
//   bf16/b2/q129/k1000/h4x2/d128/causal/bwd/dlse/deterministic    the backward of the first
//   bf16/b9/q300/k300/h4x2/d64/causal/random/packed/sink    9 sequences of up to 300 tokens
//   bf16/b80/q7000/k7000/h16/d128/causal/lognormal65536:3/packed    65,536 tokens, the third draw
//   e4m3/b2/q129/k1000/h4x2/d128/causal/blockscales/outfp16    FP8 with scales, and a float16 out
//   bf16/b2/q129/k1000/h4x2/d128/causal/fp8      bfloat16, brought to FP8 by the call
//   e4m3/b1/q64/k9000/h2/d128/full/sums1         FP8 with sums in one level, or two: sums2
//   bf16/b2/q129/k1000/h4x2/d128/full/quantize/blockscales/rotate    flash3_quantize alone
//   bf16/b9/q1/k300/h8x2/d128/causal/random/usedk/paged16/leftpad/append1/rotary    decoding
//   bf16/b9/q1/k300/h8x2/d128/causal/usedk/paged16/append1/kv8/headscales    an FP8 cache, k and v
//   bf16/b9/q1/k300/h8x2/d128/causal/usedk/paged16/append1/kv8/rotate    q and k_new are rotated
//   bf16/b9/q7/k300/h8x2/d128/full/random/usedk/paged16/append7/tree    a tree of drafts
//   bf16/b8/q512/k4096/h8x2/d128/causal/mixed/packedq/usedk    decoding beside parts of prompts
//   bf16/b9/q1/k300/h16x1/d576x512/full/usedk/paged64/latent    latent attention: v is part of k
//   bf16/b9/q1/k300/h16x1/d64x512/full/usedk/paged64/qv    the same with q in two parts
//   bf16/b2/q129/k1000/h4x2/d128/causal/mask:ranges2.h    a mask as data (case_mask.hpp)
//   bf16/b2/q129/k1000/h4x2/d128/full/k:bhsd.at4/v:odd.heads0    k and v with layouts of their own
//   bf16/b2/q129/k1000/h4x2/d128/causal/max_logits=rows    a tensor of that name, with this shape
//
// The mask is full | causal | w<left>:<right> | causal+w<left>: (an empty side is unbounded). What
// follows it is optional and takes the defaults below.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cases/added_options.hpp"
#include "cases/case_mask.hpp"
#include "cases/internals.hpp"
#include "flash3/flash3.h"

namespace flash3::cases {

// ---- how its tensors lie in memory ----

enum class Layout {
  kBatchSeq,    // "bshd": contiguous [batch, seq, heads, dim]
  kHeadsFirst,  // "bhsd": contiguous [batch, heads, seq, dim]
  kPadded,      // "padded": [batch, seq, heads, dim] with gaps of whole 16-byte units
  kOdd,         // "odd": gaps of odd sizes, and a base address that is aligned to one element only
};

// The tensors whose layout an id can give by itself. In flash3_quantize kDq, kDk and kDv are q_out,
// k_out and v_out, and the scales of blocks lie as kLse says.
enum class TensorName { kQ, kK, kV, kOut, kLse, kDout, kDlse, kDq, kDk, kDv };
inline constexpr size_t kTensorNames = 10;

// "k:bhsd.at3.gap8.heads0"
struct TensorLayout {
  Layout layout = Layout::kBatchSeq;
  int64_t offset = 0;      // "at<n>": elements from an aligned address to the first one
  int64_t gap = 0;         // "gap<n>": elements more from row to row (lse: from head to head)
  bool one_batch = false;  // "batch0", "rows0", "heads0": stride 0, all share the memory of one
  bool one_row = false;
  bool one_head = false;
  bool wild = false;  // "wild": what is never used, the stride of a dimension of size 0 or 1, is
                      // nonsense
  bool operator==(const TensorLayout&) const = default;
};

const char* short_name(Layout layout);
const char* short_name(TensorName name);
std::optional<Layout> parse_layout(std::string_view name);

std::string to_text(TensorName name, const TensorLayout& layout);
// False if text names no tensor and layout.
bool parse_layout(std::string_view text, TensorName* name, TensorLayout* layout);

// Views without data: [batch, seq, heads, dim], and [batch, heads, seq] float32.
flash3_tensor view_of(flash3_dtype dtype, int64_t batch, int64_t seq, int64_t heads, int64_t dim,
                      const TensorLayout& layout);
flash3_tensor lse_view_of(int64_t batch, int64_t heads, int64_t seq, const TensorLayout& layout);

// Without its first dimension, of size 1.
flash3_tensor packed(flash3_tensor t);

// ---- the case ----

enum class Distribution {
  kNormal,    // "normal": N(0, 1)
  kOutliers,  // "outliers": N(0, 1) + N(0, 100) · Bernoulli(0.001), as in the FlashAttention-3
              // paper
  kSpecial,   // "special": N(0, 1) with a few infinities and NaNs
};

// How long the sequences of a batch are, at most seq_q and seq_k.
enum class Lengths {
  kAll,         // all of them that long
  kRandom,      // "random": from 0 to that, and now and then 0 or 1
  kGiant,       // "giant": one in the middle that long, the others at most 40
  kEdges,       // "edges": a multiple of some kernel's tile, or one more or less
  kEmpty,       // "empty": none has a token; packed tensors have no row
  kMixed,       // "mixed": of q alone, every other one that long and the others 1: k's are kAll
  kLogUniform,  // "loguniform": from 1/64 of that to that, each power of two with the same share
  // "lognormal<tokens>:<draw>": long-tailed, as log_normal_lengths() draws them; none is longer
  // than that, and sequences that the draw has no tokens left for are empty.
  kLogNormal,
};

// "sink"
enum class Sink { kNone, kFloat32, k16 };  // "sink16": in the tensors' dtype

// The scales of FP8 tensors: "onescale", "headscales", "blockscales"
enum class Scales { kNone, kTensor, kHead, kBlock };

// "rotary", "rotary2": of halves, or interleaved
enum class Rotary { kNone, kHalves, kInterleaved };

struct Case {
  flash3_dtype dtype = FLASH3_BFLOAT16;
  int64_t batch = 1, seq_q = 1, seq_k = 1, heads_q = 1, heads_k = 1;
  int64_t head_dim = 64, head_dim_v = 64;
  bool causal = false;
  bool window = false;  // window_left and window_right count; negative: unbounded
  int64_t window_left = -1, window_right = -1;

  Layout layout = Layout::kBatchSeq;
  // The layouts of single tensors: "<tensor>:<layout>".
  std::array<std::optional<TensorLayout>, kTensorNames> own_layouts{};
  Distribution distribution = Distribution::kNormal;
  bool want_lse = true;
  float softmax_scale = 0.f;  // 0: the default
  uint64_t seed = 1;

  // Ragged batches: at least one of the four below. Both sides: "packed", "used".
  Lengths lengths = Lengths::kAll;
  int64_t tokens = 0, draw = 0;             // of kLogNormal
  bool packed_q = false, packed_k = false;  // "packedq", "packedk": cu_seqlens
  bool used_q = false, used_k = false;      // "usedq", "usedk": seqused
  bool max_known = true;                    // "nomax": max_seqlen is 0
  bool fill = false;                        // "fill": fill_padding
  int64_t front = 0;  // "front<n>": rows of packed tensors before the first sequence

  // A KV cache; k's lengths are then seqused_k, before anything is appended.
  int64_t page_size = 0;        // "paged<n>"
  bool batch_idx = false;       // "batchidx"
  bool leftpad = false;         // "leftpad"
  int64_t append = 0;           // "append<n>"; those below, and rotary, go with it
  bool append_packed = false;   // "packednew": up to so many, by cu_seqlens_k_new
  bool rotary_offsets = false;  // "offsets"
  // "newe4m3" …: of what is appended to an FP8 cache; none: q's dtype.
  flash3_dtype new_dtype = FLASH3_DTYPE_NONE;

  bool tree = false;  // "tree": tree_mask, of drafts that draw_tree() plants

  bool kv8 = false;  // "kv8": k and v are e4m3, q is not

  bool latent = false;  // "latent": v is the first head_dim_v elements of the rows of k
  bool qv = false;      // "qv": a second part of q, which meets v

  Sink sink = Sink::kNone;
  float softcap = 0.f;  // "softcap<x>"; 0: none
  int64_t chunk = 0;    // "chunk<n>"; 0: none
  float dropout = 0.f;  // "dropout<p>"; 0: none. The seed is that below, unless `added` has one
  AddedOptions added;   // "<field>=<n>", "<field>=<shape>"
  CaseMask mask;        // "mask:<source>"; what is above of a mask is the band of it

  Scales scales = Scales::kNone;
  std::array<std::optional<Scales>, 3> own_scales{};  // "<q|k|v>:<scales>": of one tensor
  // "outfp16" …; none: bf16 for e4m3, else dtype. 16 bits and "outfp32": as it is before rounding.
  flash3_dtype out_dtype = FLASH3_DTYPE_NONE;
  bool fp8 = false;  // "fp8": compute in FP8
  int sums = 0;      // "sums<n>": fp8_sums

  bool quantize = false;           // "quantize"; the three below are of that call
  std::array<bool, 3> left_out{};  // "noq", "nok", "nov": not brought to FP8
  bool rotate = false;             // "rotate"; or of a forward's q and of what it appends
  Rotary rotary = Rotary::kNone;   // or of an append

  bool backward = false;   // "bwd"; those below are of a backward call, and say so by themselves
  bool want_dlse = false;  // "dlse": a gradient of lse is given
  bool deterministic = false;  // "deterministic"
  bool want_dsink = true;      // "nodsink": the sink's gradient is not wanted
  bool want_dadded = false;    // "dadded": those of the tensors of `added` are, where there are any
  bool float32_gradients = false;  // "gradfp32": dq, dk and dv of 16-bit tensors in float32

  flash3_dtype dtype_of_out() const {
    if (out_dtype != FLASH3_DTYPE_NONE) return out_dtype;
    return dtype == FLASH3_FLOAT8_E4M3 ? FLASH3_BFLOAT16 : dtype;
  }
  flash3_dtype dtype_of_kv() const { return kv8 ? FLASH3_FLOAT8_E4M3 : dtype; }
  flash3_dtype dtype_of_new() const { return new_dtype != FLASH3_DTYPE_NONE ? new_dtype : dtype; }
  flash3_dtype dtype_of_gradients() const { return float32_gradients ? FLASH3_FLOAT32 : dtype; }
  TensorLayout layout_of(TensorName name) const {
    const auto& own = own_layouts[static_cast<size_t>(name)];
    return own ? *own : TensorLayout{.layout = layout, .offset = layout == Layout::kOdd ? 1 : 0};
  }
  Scales scales_of(TensorName name) const {  // of q, k or v
    if (kv8 && name == TensorName::kQ) return Scales::kNone;
    return own_scales[static_cast<size_t>(name)].value_or(scales);
  }
  bool is_left_out(TensorName name) const { return left_out[static_cast<size_t>(name)]; }
  bool is_ragged() const { return packed_q || packed_k || used_q || used_k; }
  bool has_cache() const { return page_size > 0 || batch_idx || leftpad || append > 0; }
  // Whether k and v are memory for more keys than count, be it without what only a cache has.
  bool reads_cache() const {
    return has_cache() || (used_k && !used_q && !packed_k && !backward && !quantize);
  }
  bool operator==(const Case&) const = default;
};

std::string to_id(const Case& c);

// The case that id names; nothing, and the reason in *error, if it names none. Checks the spelling
// only: whether sizes make sense is for the library to say.
std::optional<Case> parse_id(std::string_view id, std::string* error);

const char* short_name(flash3_dtype dtype);  // "bf16"
const char* short_name(Distribution distribution);
std::optional<flash3_dtype> parse_dtype(std::string_view name);  // "bf16" or "bfloat16"

Mask mask_of(const Case& c, int64_t len_q, int64_t len_k);

// The functions below take the sequences of a ragged case from its seed, unless they are given.
struct CaseSequences;

// Query tokens of the batch, and the (query, key) pairs that the mask lets through in one head.
int64_t queries(const Case& c, const CaseSequences* given = nullptr);
int64_t visible_pairs(const Case& c, const CaseSequences* given = nullptr);

// Floating point operations of the matrix products over the visible pairs: forward 2·pairs·(D + Dv)
// a head, backward 2·pairs·(3D + 2Dv), which is 2.5 times as many where D = Dv. By the field's
// convention a causal square counts as half of the full one. Of a mask as data those that its band
// lets through: mask.hpp counts what the mask does.
double flops(const Case& c, const CaseSequences* given = nullptr);
// Multiply-adds of a pair in one head.
int64_t products_of_pair(const Case& c);

// Bytes of the tokens of q, k, v and out, each moved once, and of lse; backward: of their gradients
// too. In a cache the rows that count do, with those that the call appends, and k_new and v_new.
double tensor_bytes(const Case& c, const CaseSequences* given = nullptr);
// The bytes of k and v alone, without k_new and v_new.
double kv_bytes(const Case& c, const CaseSequences* given = nullptr);

// About what checking the case takes of the host's memory: all rows of its tensors, of those that a
// call writes some copies, and their reference in float64 with its bounds.
double host_bytes(const Case& c);

// The keys of a query's own sequence, masked or not: the mean over all queries. A dense
// self-attention of this length has the same cost per token.
double cost_per_token(const Case& c, const CaseSequences* given = nullptr);

// Bytes of the score matrix that is never stored.
double score_matrix_bytes(const Case& c, const CaseSequences* given = nullptr);

}  // namespace flash3::cases
