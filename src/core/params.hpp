// SPDX-License-Identifier: Apache-2.0
// What the checks of all kinds of calls begin with: reading the params of the C interface, and the
// fields that every call has. For the files of core/ that make problems alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/tensor_checks.hpp"
#include "flash3/dropout.h"
#include "flash3/mask.h"

namespace flash3 {

// Names and dimensions of a call's tensors: packed on the side of q, of k, on both or neither.
struct Layout {
  bool packed_q, packed_k;
  // What k and v are that are not packed.
  const char* k_words = "[batch, seq_k, heads_k, head_dim]";
  const char* v_words = "[batch, seq_k, heads_k, head_dim_v]";
  const char* k_packed_by = "cu_seqlens_k";

  Field q(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[total_q, heads_q, head_dim]", 3, t}
                    : Field{name, "[batch, seq_q, heads_q, head_dim]", 4, t, "cu_seqlens_q"};
  }
  Field out(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[total_q, heads_q, head_dim_v]", 3, t}
                    : Field{name, "[batch, seq_q, heads_q, head_dim_v]", 4, t, "cu_seqlens_q"};
  }
  Field lse(const char* name, const flash3_tensor& t) const {
    return packed_q ? Field{name, "[heads_q, total_q]", 2, t}
                    : Field{name, "[batch, heads_q, seq_q]", 3, t, "cu_seqlens_q"};
  }
  Field k(const char* name, const flash3_tensor& t) const {
    return packed_k ? Field{name, "[total_k, heads_k, head_dim]", 3, t}
                    : Field{name, k_words, 4, t, k_packed_by};
  }
  Field v(const char* name, const flash3_tensor& t) const {
    return packed_k ? Field{name, "[total_k, heads_k, head_dim_v]", 3, t}
                    : Field{name, v_words, 4, t, k_packed_by};
  }
};

template <class Params>
SequenceFields sequences_of_q(const Params& p) {
  return {{"cu_seqlens_q", "[batch + 1]", 1, p.cu_seqlens_q},
          {"seqused_q", "[batch]", 1, p.seqused_q},
          "max_seqlen_q",
          p.max_seqlen_q};
}

template <class Params>
SequenceFields sequences_of_k(const Params& p) {
  SequenceFields fields{{"cu_seqlens_k", "[batch + 1]", 1, p.cu_seqlens_k},
                        {"seqused_k", "[batch]", 1, p.seqused_k},
                        "max_seqlen_k",
                        p.max_seqlen_k};
  if constexpr (requires { p.page_table; }) fields.paged = is_given(p.page_table);
  return fields;
}

// The number of sequences, where q or k tells it.
inline Extent batch_of(const Field& tensor, const SequenceFields& sequences) {
  return sequences.packed() ? Extent{sequences.cu, 0, 1} : Extent{tensor, 0};
}

inline const char* params_name(const flash3_forward_params&) { return "flash3_forward_params"; }
inline const char* params_name(const flash3_backward_params&) { return "flash3_backward_params"; }
inline const char* params_name(const flash3_quantize_params&) { return "flash3_quantize_params"; }
inline const char* params_name(const flash3_merge_params&) { return "flash3_merge_params"; }
inline const char* params_name(const flash3_mask_params&) { return "flash3_mask_params"; }
inline const char* params_name(const flash3_dropout_mask_params&) {
  return "flash3_dropout_mask_params";
}

// What the params took in their first version. Fields are only ever added at the end, so a caller
// built against any version passes at least this much.
template <class Params>
constexpr size_t kFirstParamsSize =
    offsetof(Params, workspace_size) + sizeof(Params::workspace_size);

template <>
inline constexpr size_t kFirstParamsSize<flash3_mask_params> =
    offsetof(flash3_mask_params, stream) + sizeof(void*);
template <>
inline constexpr size_t kFirstParamsSize<flash3_dropout_mask_params> =
    offsetof(flash3_dropout_mask_params, stream) + sizeof(void*);

// No version will come near this: a struct_size beyond it was never set, and reading that far would
// crash.
inline constexpr size_t kPlausibleParamsSize = 4096;

// Fields that a newer header has and this library has not must be zero: they ask for nothing.
template <class Params>
Status read_params(const Params* given, Params* params) {
  const char* type = params_name(*params);
  if (!given) return invalid_argument(message("params is null; it must point to a ", type));
  const size_t size = given->struct_size;
  if (size < kFirstParamsSize<Params> || size > kPlausibleParamsSize)
    return invalid_argument(message("struct_size = ", size, " but ", type, " takes ",
                                    sizeof *params, " bytes; set struct_size = sizeof(", type,
                                    ")"));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof *params; i < size; ++i)
    if (bytes[i] != 0)
      return unsupported(message("struct_size = ", size, " but this library knows ", sizeof *params,
                                 " bytes, and byte ", i,
                                 " is set; the call was made for a newer flash3 than this one, ",
                                 FLASH3_VERSION_STRING));
  const size_t known = std::min(size, sizeof *params);
  std::memcpy(params, given, known);
  // Fields that an older header has not ask for nothing.
  std::memset(reinterpret_cast<char*>(params) + known, 0, sizeof *params - known);
  return {};
}

// The params of a call with all fields of this library: the caller's own if they have its size,
// else a copy.
template <class Params>
class WholeParams {
 public:
  Status read(const Params* given) {
    whole_ = given;
    if (given && given->struct_size == sizeof copy_) return {};
    whole_ = &copy_;
    FLASH3_CHECK(read_params(given, &copy_));
    copy_.struct_size = sizeof copy_;  // what it holds by now
    return {};
  }
  const Params& operator*() const { return *whole_; }

 private:
  const Params* whole_ = nullptr;
  Params copy_;  // NOLINT: only looked at where it is read
};

inline Status check_flag(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return invalid_argument(message(name, " = ", value, " but it must be 0 or 1"));
}

// The fields that a band is made of.
template <class Params>
Status check_band(const Params& p) {
  FLASH3_CHECK(check_flag("causal", p.causal));
  FLASH3_CHECK(check_flag("window", p.window));
  if (p.chunk < 0)
    return invalid_argument(message("chunk = ", p.chunk, " but it must be at least 0 (0: none)"));
  if (p.mask_alignment < FLASH3_ALIGN_BOTTOM_RIGHT || p.mask_alignment > FLASH3_ALIGN_TOP_LEFT)
    return invalid_argument(message("mask_alignment = ", p.mask_alignment,
                                    " but it must be 0 (bottom right) or 1 (top left)"));
  return {};
}

// The fields that say where a call runs.
template <class Params>
Status check_context(const Params& p) {
  if (p.backend < FLASH3_BACKEND_AUTO || p.backend > FLASH3_BACKEND_CPU)
    return invalid_argument(
        message("backend = ", p.backend, " but it must be 0 (auto), 1 (hopper) or 2 (cpu)"));
  if (p.num_threads < 0)
    return invalid_argument(
        message("num_threads = ", p.num_threads, " but it must be at least 0 (0: one per core)"));
  return {};
}

template <class Params, class P>
void fill_context(const Params& p, P* problem) {
  problem->backend = static_cast<flash3_backend>(p.backend);
  problem->num_threads = p.num_threads;
  problem->stream = p.stream;
  problem->workspace = p.workspace;
  problem->workspace_size = p.workspace_size;
}

inline Sequences sequences(const flash3_tensor& tensor, const SequenceFields& fields) {
  Sequences made;
  made.packed = fields.packed();
  made.has_used = fields.has_used();
  made.cu = static_cast<const int*>(fields.cu.tensor.data);
  made.used = static_cast<const int*>(fields.used.tensor.data);
  made.rows = tensor.shape[made.packed ? 0 : 1];
  made.max_length =
      fields.max_length > 0 ? std::min<Index>(fields.max_length, made.rows) : made.rows;
  made.bounded = fields.max_length > 0 || !made.packed;
  return made;
}

}  // namespace flash3
