// SPDX-License-Identifier: Apache-2.0
// What explain says of a call itself, before the backend's own lines.
#include "core/explain.hpp"

#include <cstdlib>
#include <string>

#include "core/added_checks.hpp"
#include "core/backend.hpp"
#include "core/message.hpp"

namespace flash3 {
namespace {

// "5"; of sequences of different lengths "up to 5", and for packed ones what holds them.
std::string describe_length(const Sequences& s) {
  if (s.packed) return message("up to ", s.max_length, " of ", s.rows, " packed rows");
  return message(s.has_used ? "up to " : "", s.max_length);
}

std::string describe_sizes(const Problem& p) {
  return message(
      dtype_name(p.dtype), p.kv_dtype == p.dtype ? "" : message(" on ", dtype_name(p.kv_dtype)),
      p.out_dtype == p.dtype ? "" : message(" to ", dtype_name(p.out_dtype)), ", batch ", p.batch,
      ", seq_q ", describe_length(p.sequences_q), ", seq_k ", describe_length(p.sequences_k),
      ", heads_q ", p.heads_q, ", heads_k ", p.heads_k, ", head_dim ", p.head_dim, ", head_dim_v ",
      p.head_dim_v, p.has_qv() ? ", with qv" : "");
}

std::string describe_sink(const Problem& p) {
  return p.sink.given ? message(", with ", dtype_name(p.sink.dtype), " sink") : "";
}

// "one q_scale", "q_scale by heads" and so on.
std::string describe_scale(const char* name, const ScaleView& scale) {
  switch (scale.kind) {
    case ScaleKind::kNone: return "";
    case ScaleKind::kTensor: return message(", one ", name);
    case ScaleKind::kHead: return message(", ", name, " by heads");
    case ScaleKind::kBlock: return message(", ", name, " by blocks");
    case ScaleKind::kRow: return message(", ", name, " by rows");
  }
  return "";
}

// ", in pages of 16 (40 of them), padded on the left, appending up to 3 keys with rotary" and so
// on.
std::string describe_cache(const ForwardProblem& p) {
  std::string text;
  const KvCache& cache = p.cache;
  if (cache.paged)
    append(text, message(", in pages of ", cache.page_size, " (", cache.pages, " of them)"));
  if (cache.has_batch_idx) append(text, message(", of a cache of ", cache.elements));
  if (cache.has_leftpad) append(text, ", padded on the left");
  const std::string rotation = p.rotates ? ", with rotation" : "";
  if (!p.append.given) return text + rotation;
  append(text, message(", appending ", describe_length(p.append.sequences),
                       p.append.dtype == p.kv_dtype ? "" : message(" ", dtype_name(p.append.dtype)),
                       p.append.has_v ? " keys" : " keys, of which v is a part"));
  const RotaryView& rotary = p.append.rotary;
  if (rotary.given)
    append(text, message(", with rotary embedding of ", rotary.dim, " dimensions, ",
                         rotary.interleaved ? "interleaved" : "by halves"));
  return text + rotation;
}

const char* describe_sums(flash3_fp8_sums sums) {
  switch (sums) {
    case FLASH3_FP8_SUMS_ONE_LEVEL: return ", FP8 sums in one level";
    case FLASH3_FP8_SUMS_TWO_LEVELS: return ", FP8 sums in two levels";
    default: return "";
  }
}

std::string describe_problem(const ForwardProblem& p) {
  return message(describe_sizes(p), p.quantizes ? ", computed in float8_e4m3" : "",
                 describe_sums(p.fp8_sums), p.lse.wanted ? ", with lse" : "", describe_sink(p),
                 describe_added(p), describe_cache(p), describe_scale("q_scale", p.q_scale),
                 describe_scale("k_scale", p.k_scale), describe_scale("v_scale", p.v_scale));
}

std::string describe_problem(const BackwardProblem& p) {
  return message("backward, ", describe_sizes(p), p.dlse.wanted ? ", with dlse" : "",
                 describe_sink(p), p.dsink.given ? ", with dsink" : "", describe_added(p),
                 p.deterministic ? ", deterministic" : "");
}

std::string describe_part(const char* name, const QuantizePart& part, const Sequences& s) {
  if (!part.given) return "";
  return message(", ", name, " of seq ", describe_length(s), ", heads ", part.in.heads, ", dim ",
                 part.in.dim, describe_scale("scale", part.scale));
}

std::string describe_problem(const QuantizeProblem& p) {
  return message(dtype_name(p.dtype), " to float8_e4m3, batch ", p.batch,
                 describe_part("q", p.q, p.sequences_q), describe_part("k", p.k, p.sequences_k),
                 describe_part("v", p.v, p.sequences_k), p.rotary.given ? ", rotary" : "",
                 p.rotates ? ", rotated" : "");
}

std::string describe_problem(const MergeProblem& p) {
  return message("merge to ", dtype_name(p.out_dtype), ", parts ", p.parts, ", rows ", p.rows,
                 ", heads ", p.heads, ", head_dim_v ", p.head_dim_v,
                 p.lse.wanted ? ", with lse" : "",
                 p.sink.given ? message(", with ", dtype_name(p.sink.dtype), " sink") : "");
}

// "i + 3"; in a ragged batch each sequence has its own shift.
std::string describe_bound(const Problem& p, Index window, Index bound) {
  if (!p.is_ragged()) return message("i + ", bound);
  return window == 0 ? "i'" : message(window < 0 ? "i' - " : "i' + ", std::abs(window));
}

std::string describe_lists(const MaskLists& lists) {
  const MaskShape& s = lists.shape;
  return message("query i sees what its mask lists, in blocks of ", kMaskBlock, " x ", kMaskBlock,
                 ", for ", s.batch == 1 ? "all sequences" : "each sequence", " and ",
                 s.heads == 1 ? "all heads" : "each head", ", with room for ", s.blocks,
                 " blocks and the bits of ", s.partial_blocks,
                 lists.documents > 0
                     ? message(", and where up to ", lists.documents, " documents begin")
                     : "");
}

std::string describe_mask(const Problem& p) {
  if (p.tree.given)
    return "query i sees the keys before its sequence's last ones, of which there are as many "
           "as queries, and of those what tree_mask says";
  if (p.mask_lists.given) return describe_lists(p.mask_lists);
  const MaskRule& rule = p.mask_rule;
  const Band band = p.band();
  const bool left = band.lo > -Band::kUnbounded, right = band.hi < Band::kUnbounded;
  const bool none =
      p.is_ragged() ? !left && !right && rule.chunk == 0 : p.mask().is_full(p.seq_q, p.seq_k);
  if (none) return "none";
  std::string text = "query i sees keys j with ";
  if (left) append(text, message(describe_bound(p, -rule.window_left, band.lo), " <= "));
  if (left || right || rule.chunk == 0) append(text, "j");
  if (right) append(text, message(" <= ", describe_bound(p, rule.window_right, band.hi)));
  if (rule.chunk > 0)
    append(text, message(left || right ? " and " : "", "j / ", rule.chunk, " = ",
                         p.is_ragged() ? "i'" : message("(i + ", p.mask().row_shift, ")"), " / ",
                         rule.chunk, ", rounded down"));
  if (p.is_ragged())
    append(text,
           rule.top_left ? ", with i' = i" : ", with i' = i + the sequence's keys - its queries");
  return text;
}

// For auto, why not the better backends.
template <AnyProblem P>
std::string describe_choice(const P& p, const Backend& chosen) {
  std::string text = "auto";
  for (const flash3_backend id : {FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    if (id == chosen.id()) break;
    PlannedCall<P> unused;
    append(text, message("; not ", backend_name(id), ": ", plan_call(p, id, &unused).message()));
  }
  return text;
}

const char* describe_empty(const ForwardProblem&) { return "none (the output has no elements)"; }
const char* describe_empty(const BackwardProblem&) {
  return "none (the gradients have no elements)";
}
const char* describe_empty(const QuantizeProblem&) { return "none (there is nothing to write)"; }
const char* describe_empty(const MergeProblem&) { return "none (the output has no elements)"; }

void add_attention(const Problem& p, Explanation* lines) {
  lines->add("mask", describe_mask(p));
  lines->add("softmax_scale", message(p.softmax_scale));
  if (p.softcap > 0.f) lines->add("softcap", message(p.softcap));
  if (p.dropout.given())
    lines->add("dropout", message(p.dropout.threshold, " of 65536 weights, as ",
                                  p.dropout_state.given ? "dropout_state says" : "the seed says"));
}

}  // namespace

std::string describe_transformed_q(const ForwardProblem& p) {
  if (!p.transforms_q()) return "";
  const char* const embedding = p.append.rotary.given ? "embedding" : "";
  return message("q with its ", embedding, *embedding && p.rotates ? " and " : "",
                 p.rotates ? "rotation" : "");
}

template <AnyProblem P>
std::string explain_call(const P& p, const PlannedCall<P>& call) {
  Explanation lines;
  lines.add("backend", call.backend ? call.backend->name() : describe_empty(p));
  if (call.backend && p.backend == FLASH3_BACKEND_AUTO)
    lines.add("chosen by", describe_choice(p, *call.backend));
  lines.add("problem", describe_problem(p));
  if constexpr (std::derived_from<P, Problem>) add_attention(p, &lines);
  if (call.plan) {
    call.plan->explain(p, &lines);
    lines.add("workspace", message(call.plan->workspace_bytes(), " bytes"));
  }
  return lines.text();
}

template std::string explain_call(const ForwardProblem&, const PlannedCall<ForwardProblem>&);
template std::string explain_call(const BackwardProblem&, const PlannedCall<BackwardProblem>&);
template std::string explain_call(const QuantizeProblem&, const PlannedCall<QuantizeProblem>&);
template std::string explain_call(const MergeProblem&, const PlannedCall<MergeProblem>&);

}  // namespace flash3
