// SPDX-License-Identifier: Apache-2.0
#include "cases/accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cases/internals.hpp"
#include "cases/kernel_input.hpp"
#include "cases/tensors.hpp"
#include "oracle/attention_ref.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cases {

std::vector<Case> accuracy_cases(Level level, const std::vector<int64_t>& lengths) {
  if (lengths.empty()) return accuracy_cases(level, {level == Level::kQuick ? 1024 : 4096});
  std::vector<Case> list;
  for (const int64_t length : lengths)
    for (const flash3_dtype dtype : {FLASH3_FLOAT16, FLASH3_BFLOAT16})
      for (const int64_t dim : {64, 128, 256})
        for (const bool causal : {false, true}) {
          Case c;
          c.dtype = dtype;
          c.seq_q = c.seq_k = length;
          c.heads_q = c.heads_k = 2;
          c.head_dim = c.head_dim_v = dim;
          c.causal = causal;
          c.distribution = Distribution::kOutliers;
          list.push_back(c);
        }
  return list;
}

std::string accuracy_objection(const Case& c) {
  if (c.backward) return "it is a backward case, but the accuracy experiment is of the forward";
  if (c.dtype == FLASH3_FLOAT32)
    return "dtype = fp32, but the accuracy experiment is for fp16 and bf16: in fp32 the plain "
           "implementation rounds nothing on the way";
  if (c.distribution != Distribution::kOutliers)
    return std::string("data = ") + short_name(c.distribution) +
           ", but the accuracy experiment is for outliers: add /outliers to the case";
  return "";
}

std::string check_accuracy(const TensorCheck& out) {
  if (!(out.naive_rmse > 0))
    return "out: the plain implementation makes no error here, so there is nothing to compare with";
  if (out.rmse <= kAccuracyBar * out.naive_rmse) return "";
  char text[160];
  std::snprintf(text, sizeof text, "out: RMSE %.3g > %.2f x %.3g, the plain implementation's",
                out.rmse, kAccuracyBar, out.naive_rmse);
  return text;
}

namespace {

constexpr int64_t kSampledRows = 64;

// The rows to compare, and what they truly are: [row, batch, head, dim].
struct Truth {
  std::vector<int64_t> rows;
  std::vector<double> out;
};

// The problem of one query, which sees all the keys that its mask leaves.
ForwardProblem one_row(ForwardProblem p, int64_t row, bool causal) {
  const auto from_row = [&](TensorView* x, flash3_dtype dtype) {
    x->data = static_cast<std::byte*>(x->data) +
              row * x->stride_seq * static_cast<int64_t>(dtype_size(dtype));
    x->seq = 1;
  };
  const int64_t keys =
      causal ? std::clamp<int64_t>(row + 1 + p.seq_k - p.seq_q, 0, p.seq_k) : p.seq_k;
  from_row(&p.q, p.dtype);
  from_row(&p.out, p.out_dtype);
  p.seq_q = 1;
  p.sequences_q = {.rows = 1, .max_length = 1};
  p.seq_k = p.k.seq = p.v.seq = keys;
  p.sequences_k = {.rows = keys, .max_length = keys};
  p.mask_rule = {};
  p.lse = {};
  return p;
}

Truth truth_of(const ForwardProblem& p, bool causal, int64_t most) {
  Truth truth;
  const int64_t step = p.seq_q > most ? p.seq_q / kSampledRows : 1;
  for (int64_t i = step - 1; i < p.seq_q; i += step) truth.rows.push_back(i);
  if (step == 1) {
    const ReferenceForward ref = attention_ref(p);  // [batch, row, head, dim]
    const int64_t row = p.heads_q * p.head_dim_v;
    for (const int64_t i : truth.rows)
      for (int64_t b = 0; b < p.batch; ++b)
        truth.out.insert(truth.out.end(), ref.out.begin() + (b * p.seq_q + i) * row,
                         ref.out.begin() + (b * p.seq_q + i + 1) * row);
    return truth;
  }
  for (const int64_t i : truth.rows) {
    const ReferenceForward ref = attention_ref(one_row(p, i, causal));
    truth.out.insert(truth.out.end(), ref.out.begin(), ref.out.end());
  }
  return truth;
}

double rmse(const Truth& truth, const flash3_tensor& out) {
  double squares = 0;
  size_t next = 0;
  for (const int64_t i : truth.rows)
    for (int64_t b = 0; b < out.shape[0]; ++b)
      for (int64_t h = 0; h < out.shape[2]; ++h)
        for (int64_t d = 0; d < out.shape[3]; ++d) {
          const int64_t at = b * out.stride[0] + i * out.stride[1] + h * out.stride[2] + d;
          const double error = load_float(out.data, out.dtype, at) - truth.out[next++];
          squares += error * error;
        }
  return std::sqrt(squares / static_cast<double>(std::max<size_t>(next, 1)));
}

}  // namespace

Fp8Accuracy measure_fp8_accuracy(const flash3_forward_params& host, Memory& memory,
                                 flash3_backend backend, int threads, int64_t most) {
  Fp8Accuracy result;
  const auto failed = [&](const char* call) {
    result.failure = std::string(call) + ": " + flash3_last_error();
    return result;
  };
  std::vector<std::byte> bytes(
      static_cast<size_t>(span_of(host.out) * element_size(host.out.dtype)));
  flash3_tensor got = host.out;
  got.data = bytes.data();

  flash3_forward_params params = host;
  params.lse = {};
  params.out.data = bytes.data();
  ForwardProblem problem;
  if (const Status s = make_forward_problem(&params, Pointers::kRequired, &problem); !s.ok()) {
    result.failure = s.message();
    return result;
  }
  const Truth truth = truth_of(problem, host.causal != 0, most);
  result.rows = static_cast<int64_t>(truth.rows.size());
  double squares = 0;
  for (const double x : truth.out) squares += x * x;
  result.rms = std::sqrt(squares / static_cast<double>(std::max<size_t>(truth.out.size(), 1)));

  {
    HostMemory here;
    params.backend = FLASH3_BACKEND_CPU;
    const Fp8Input fp8(here, params, Scales::kTensor, /*rotate=*/false);
    if (fp8.quantize() != FLASH3_OK) return failed("flash3_quantize");
    flash3_forward_params call = params;
    fp8.apply(&call);
    if (const Status s = make_forward_problem(&call, Pointers::kRequired, &problem); !s.ok()) {
      result.failure = s.message();
      return result;
    }
    if (problem.seq_q <= most)
      attention_plain_fp8(problem);
    else
      for (const int64_t i : truth.rows) attention_plain_fp8(one_row(problem, i, host.causal != 0));
    result.plain = rmse(truth, got);
  }

  params.backend = backend;
  params.num_threads = threads;
  params.stream = memory.stream();
  std::vector<std::shared_ptr<void>> buffers;
  for (flash3_tensor* t : {&params.q, &params.k, &params.v, &params.out}) {
    const auto size = static_cast<size_t>(span_of(*t) * element_size(t->dtype));
    buffers.push_back(memory.allocate(size));
    memory.copy_in(buffers.back().get(), t->data, size);
    t->data = buffers.back().get();
  }
  const auto run = [&](flash3_forward_params call, double* error) {
    size_t workspace = 0;
    if (flash3_forward_workspace(&call, &workspace) != FLASH3_OK) return false;
    const auto scratch = memory.allocate(std::max<size_t>(workspace, 1));
    if (workspace > 0) call.workspace = scratch.get();
    call.workspace_size = workspace;
    if (flash3_forward(&call) != FLASH3_OK) return false;
    memory.finish();
    memory.copy_out(bytes.data(), call.out.data, bytes.size());
    *error = rmse(truth, got);
    return true;
  };
  if (!run(params, &result.half)) return failed("flash3_forward");
  for (size_t way = 0; way < kFp8Ways.size(); ++way) {
    const Fp8Input fp8(memory, params, kFp8Ways[way].scales, kFp8Ways[way].rotate);
    if (fp8.quantize() != FLASH3_OK) return failed("flash3_quantize");
    flash3_forward_params call = params;
    fp8.apply(&call);
    if (!run(call, &result.rmse[way])) return failed("flash3_forward");
  }
  return result;
}

std::string check_fp8_accuracy(const Fp8Accuracy& accuracy, Fp8Demand demand) {
  if (!accuracy.failure.empty() || demand == Fp8Demand::kNone) return accuracy.failure;
  char text[160] = "";
  const double tensor = accuracy.rmse[0], both = accuracy.rmse[3];
  if (!(both <= tensor))
    std::snprintf(text, sizeof text, "RMSE %.3g with blocks and rotation > %.3g without", both,
                  tensor);
  else if (!(both <= kFp8RelativeBar * accuracy.rms))
    std::snprintf(text, sizeof text, "RMSE %.3g > %.2f of out's RMS", both, kFp8RelativeBar);
  else if (demand == Fp8Demand::kPaper && !(both <= kFp8Bar))
    std::snprintf(text, sizeof text, "RMSE %.3g > %.2g, the paper's", both, kFp8Bar);
  return text;
}

}  // namespace flash3::cases
