// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cases/checked_call.hpp"
#include "cases/internals.hpp"
#include "cases/runner.hpp"
#include "oracle/definition.hpp"
#include "oracle/one_sequence.hpp"

namespace flash3::cases {
namespace {

constexpr int64_t kOffsetQ = 3, kOffsetK = 1;
constexpr double kRotatedError =
    4e-6;  // of float32 sums over a head dim, beside the largest element

struct QuantizeTensors {
  GuardedTensor in, out, scale;
};

struct Tensors {
  QuantizeTensors q, k, v;
  GuardedTensor cos, sin;
  ExtraTensors extra;
};

flash3_quantize_params options_of(const Case& c, const ExtraViews& extra) {
  flash3_quantize_params p{};
  p.struct_size = sizeof p;
  p.rotary_interleaved = c.rotary == Rotary::kInterleaved;
  p.rotary_offset_q = kOffsetQ, p.rotary_offset_k = kOffsetK;
  p.rotate = c.rotate;
  p.rotation_seed = c.seed;
  p.cu_seqlens_q = extra.cu_seqlens_q, p.cu_seqlens_k = extra.cu_seqlens_k;
  p.seqused_q = extra.seqused_q, p.seqused_k = extra.seqused_k;
  p.max_seqlen_q = c.packed_q && c.max_known ? c.seq_q : 0;
  p.max_seqlen_k = c.packed_k && c.max_known ? c.seq_k : 0;
  return p;
}

// The most tokens that a call takes one of the sequences to have, if all that it is told is
// max_seqlen: what a table must reach.
int64_t longest(const SequenceLengths& rows, const flash3_tensor& cu, int64_t max_seqlen) {
  return cu.ndim > 0 && max_seqlen == 0 ? rows.rows : rows.max_length;
}

GuardedTensor make_table(const Case& c, const CaseSequences& s, const flash3_quantize_params& p,
                         float (*function)(float)) {
  if (c.rotary == Rotary::kNone) return {};
  const bool halves = c.rotary == Rotary::kHalves;
  const int64_t pairs = std::max<int64_t>(1, c.head_dim / (halves ? 2 : 4));
  const int64_t positions = std::max(longest(s.q, p.cu_seqlens_q, p.max_seqlen_q) + kOffsetQ,
                                     longest(s.k, p.cu_seqlens_k, p.max_seqlen_k) + kOffsetK);
  GuardedTensor table = make_vector(halves ? FLASH3_FLOAT32 : c.dtype, positions * pairs);
  table.view.ndim = 2;
  table.view.shape[0] = positions, table.view.shape[1] = pairs;
  table.view.stride[0] = pairs, table.view.stride[1] = 1;
  for (int64_t i = 0; i < positions * pairs; ++i) {
    const int64_t position = i / pairs;
    const float frequency = std::pow(10000.f, -static_cast<float>(i % pairs) / float(pairs));
    store_float(table.view.data, table.view.dtype, i,
                function(static_cast<float>(position) * frequency));
  }
  return table;
}

// out: the name under which the case has the layout of the result.
QuantizeTensors make_part(const Case& c, TensorName name, TensorName out,
                          const SequenceLengths& rows, int64_t heads, int64_t dim, uint64_t seed,
                          bool filled) {
  if (c.is_left_out(name)) return {};
  QuantizeTensors t{make_rows(c, name, rows, heads, dim, c.dtype),
                    make_rows(c, out, rows, heads, dim, FLASH3_FLOAT8_E4M3),
                    make_scales(c, name, rows, heads)};
  if (filled) fill_random(t.in.view, c.distribution, seed);
  if (!c.is_ragged()) return t;
  for (GuardedTensor* tensor : {&t.in, &t.out})
    forbid_rows(tensor, rows, c.batch, {RowUse::kUnused, RowUse::kOutside});
  return t;
}

Tensors make_tensors(const Case& c, bool filled) {
  const CaseSequences s = make_sequences(c);
  Tensors t;
  t.q =
      make_part(c, TensorName::kQ, TensorName::kDq, s.q, c.heads_q, c.head_dim, 3 * c.seed, filled);
  t.k = make_part(c, TensorName::kK, TensorName::kDk, s.k, c.heads_k, c.head_dim, 3 * c.seed + 1,
                  filled);
  t.v = make_part(c, TensorName::kV, TensorName::kDv, s.k, c.heads_k, c.head_dim_v, 3 * c.seed + 2,
                  filled);
  if (c.distribution == Distribution::kSpecial && t.q.in.view.shape[0] * c.seq_q * c.heads_q > 0)
    store_float(t.q.in.view.data, c.dtype, 0, INFINITY);
  t.extra = make_extra_tensors(c, s);
  const flash3_quantize_params options = options_of(c, t.extra.views());
  t.cos = make_table(c, s, options, std::cos);
  t.sin = make_table(c, s, options, std::sin);
  return t;
}

// The tensors where the call runs.
struct Uploads {
  Uploads(Memory& memory, const Tensors& t)
      : in{{memory, t.q.in}, {memory, t.k.in}, {memory, t.v.in}},
        out{{memory, t.q.out}, {memory, t.k.out}, {memory, t.v.out}},
        scale{{memory, t.q.scale}, {memory, t.k.scale}, {memory, t.v.scale}},
        cos(memory, t.cos),
        sin(memory, t.sin),
        extra(memory, t.extra) {}
  NamedUploads inputs() const {
    return {
        {"q", &in[0]}, {"k", &in[1]}, {"v", &in[2]}, {"rotary_cos", &cos}, {"rotary_sin", &sin}};
  }
  NamedUploads outputs() const {
    return {{"q_out", &out[0]},     {"q_scale", &scale[0]}, {"k_out", &out[1]},
            {"k_scale", &scale[1]}, {"v_out", &out[2]},     {"v_scale", &scale[2]}};
  }
  Upload in[3], out[3], scale[3], cos, sin;
  ExtraUploads extra;
};

flash3_quantize_params params_of(const Case& c, const Uploads& t) {
  flash3_quantize_params p = options_of(c, t.extra.views());
  p.q = t.in[0].view(), p.k = t.in[1].view(), p.v = t.in[2].view();
  p.q_out = t.out[0].view(), p.k_out = t.out[1].view(), p.v_out = t.out[2].view();
  p.q_scale = t.scale[0].view(), p.k_scale = t.scale[1].view(), p.v_scale = t.scale[2].view();
  p.rotary_cos = t.cos.view(), p.rotary_sin = t.sin.view();
  return p;
}

flash3_quantize_params host_params(const Case& c, const Tensors& t) {
  flash3_quantize_params p = options_of(c, t.extra.views());
  p.q = t.q.in.view, p.k = t.k.in.view, p.v = t.v.in.view;
  p.q_out = t.q.out.view, p.k_out = t.k.out.view, p.v_out = t.v.out.view;
  p.q_scale = t.q.scale.view, p.k_scale = t.k.scale.view, p.v_scale = t.v.scale.view;
  p.rotary_cos = t.cos.view, p.rotary_sin = t.sin.view;
  return p;
}

// Without pointers.
flash3_quantize_params question(flash3_quantize_params p) {
  for (flash3_tensor* t :
       {&p.q, &p.k, &p.v, &p.q_out, &p.k_out, &p.v_out, &p.q_scale, &p.k_scale, &p.v_scale,
        &p.rotary_cos, &p.rotary_sin, &p.cu_seqlens_q, &p.cu_seqlens_k, &p.seqused_q, &p.seqused_k})
    t->data = nullptr;
  return p;
}

bool is_unwritten(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits == 0xFFFFFFFFu;
}

std::string numbers(const char* what, int64_t at, double got, double wanted) {
  char text[128];
  std::snprintf(text, sizeof text, " %s %lld: got %.9g, ref %.9g", what, static_cast<long long>(at),
                got, wanted);
  return text;
}

// One of q, k and v: what the call wrote against the reference.
TensorCheck check_part(const QuantizeProblem& p, const QuantizePart& part,
                       const Sequences& sequences, QuantizeWhich which, const char* name) {
  TensorCheck result;
  if (!part.given) return result;
  const ReferenceQuantized ref = quantize_values_ref(p, which);
  const bool rotated = which != QuantizeWhich::kV && (p.rotary.given || p.rotates);
  for (size_t i = 0; i < ref.amax.size(); ++i) {
    const double amax = ref.amax[i], wanted = amax < 0 ? 0 : scale_ref(amax);
    const float got = part.scale.data[i];
    bool good =
        amax < 0 ? is_unwritten(got) : got == wanted || (std::isnan(got) && std::isnan(wanted));
    if (rotated && amax > 0)
      good |= got == scale_ref(amax * (1 + kRotatedError)) ||
              got == scale_ref(amax * (1 - kRotatedError));
    if (!good) {
      result.failure = name + numbers("scale", static_cast<int64_t>(i), got, wanted);
      return result;
    }
  }
  for (Index b = 0; b < part.in.batch; ++b) {
    const RowRange rows = rows_of(sequences, b);
    for (Index i = 0; i < rows.length; ++i)
      for (Index h = 0; h < part.in.heads; ++h) {
        const Index at = b * part.out.stride_batch + (rows.first + i) * part.out.stride_seq +
                         h * part.out.stride_head;
        const Index at_scale = part.scale.offset(b, h, scale_block(sequences, rows, b, i));
        const double scale = part.scale.data[at_scale];
        const double amax = ref.amax[static_cast<size_t>(at_scale)];
        const Index row = (row_in_batch(sequences, b, i) * part.in.heads + h) * part.in.dim;
        for (Index d = 0; d < part.in.dim; ++d) {
          const double x = ref.values[static_cast<size_t>(row + d)];
          const unsigned char code = static_cast<const unsigned char*>(part.out.data)[at + d];
          const double got = e4m3_to_float(code) * scale;
          bool good = code == e4m3_code_ref(x / scale);
          if (std::isnan(scale)) good = code == 0x7F || code == 0xFF;
          const double allowed = e4m3_half_step(x / scale) * scale + kRotatedError * amax;
          if (rotated && !std::isnan(scale)) good |= std::abs(got - x) <= allowed;
          if (amax > 0) result.error = std::max(result.error, std::abs(got - x) / amax);
          if (good) continue;
          result.failure = name + numbers("element", row + d, got, x);
          return result;
        }
      }
  }
  return result;
}

}  // namespace

flash3_quantize_params make_quantize_question(const Case& c) {
  return question(host_params(c, make_tensors(c, /*filled=*/false)));
}

CheckResult run_quantize_case(const Case& c, Memory& memory, const RunOptions& options) {
  CheckResult result;
  Tensors host = make_tensors(c, /*filled=*/true);
  CheckedCall<flash3_quantize_params> call(memory, options, &result);
  if (!call.ask(question(host_params(c, host)))) return result;
  Uploads uploads(memory, host);
  if (!call.prepare(params_of(c, uploads))) return result;

  QuantizeTensors* parts[] = {&host.q, &host.k, &host.v};
  GuardedTensor out[3], scale[3];  // of the first run
  for (int run = 0; run < options.repeat; ++run) {
    if (run > 0) {
      for (int i = 0; i < 3; ++i) uploads.out[i].restore(), uploads.scale[i].restore();
      call.workspace().restore();
    }
    if (!call.run()) return result;
    if (run > 0) {
      result.failure = find_difference(run, uploads.outputs(), call.workspace(), uploads.inputs(),
                                       uploads.extra);
      if (!result.passed()) return result;
      continue;
    }
    for (int i = 0; i < 3; ++i) {
      out[i] = clone(parts[i]->out), scale[i] = clone(parts[i]->scale);
      uploads.out[i].download(&out[i]);
      uploads.scale[i].download(&scale[i]);
    }
    result.failure = find_damage({{"q_out", &out[0]},
                                  {"k_out", &out[1]},
                                  {"v_out", &out[2]},
                                  {"q_scale", &scale[0]},
                                  {"k_scale", &scale[1]},
                                  {"v_scale", &scale[2]}},
                                 call.downloaded_workspace(), uploads.inputs(), uploads.extra);
    if (!result.passed()) return result;
    if (options.repeat > 1)
      for (int i = 0; i < 3; ++i) uploads.out[i].keep(), uploads.scale[i].keep();
  }
  for (int i = 0; i < 3; ++i)
    parts[i]->out = std::move(out[i]), parts[i]->scale = std::move(scale[i]);

  const auto done = host_params(c, host);
  QuantizeProblem problem;
  if (const Status s = make_quantize_problem(&done, Pointers::kRequired, &problem); !s.ok()) {
    result.failure = s.message();
    return result;
  }
  result.q = check_part(problem, problem.q, problem.sequences_q, QuantizeWhich::kQ, "q");
  result.k = check_part(problem, problem.k, problem.sequences_k, QuantizeWhich::kK, "k");
  result.v = check_part(problem, problem.v, problem.sequences_k, QuantizeWhich::kV, "v");
  for (const TensorCheck* part : {&result.q, &result.k, &result.v})
    if (result.passed()) result.failure = part->failure;
  return result;
}

}  // namespace flash3::cases
