// SPDX-License-Identifier: Apache-2.0
// flash3 run: attention on the Q, K and V of a safetensors file.
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "cases/kernel_input.hpp"
#include "cases/runner.hpp"
#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/files.hpp"
#include "cli/format.hpp"
#include "cli/json_file.hpp"
#include "cli/progress.hpp"
#include "cli/run_input.hpp"
#include "cli/safetensors.hpp"
#include "cli/timing.hpp"
#include "oracle/yardsticks/yardsticks.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::Layout;
using cases::printable;
using Json = nlohmann::ordered_json;

// out and lse in host memory, in the layout of the input.
struct Output {
  std::vector<std::byte> out_bytes, lse_bytes;
  flash3_tensor out{}, lse{};

  explicit Output(const Input& in) {
    const Case& c = in.c;
    out = view_of(nullptr, c.dtype, out_shape(in), c.layout);
    std::vector<int64_t> lse_shape = {c.batch, c.heads_q, c.seq_q};
    if (c.is_ragged()) lse_shape = {c.heads_q, in.sequences.q.rows};
    lse = view_of(nullptr, FLASH3_FLOAT32, lse_shape, Layout::kBatchSeq);
    out_bytes.resize(static_cast<size_t>(cases::span_of(out) * cases::element_size(c.dtype)));
    lse_bytes.resize(static_cast<size_t>(cases::span_of(lse)) * sizeof(float));
    out.data = out_bytes.data();
    lse.data = lse_bytes.data();
  }
};

struct Measured {
  std::string kernel;
  Timing timing;
  size_t workspace = 0;
  double quantize_ms = 0;  // where that came before the call
};

// The input in the backend's memory, and the call on it.
class Computation {
 public:
  // in_fp8: the call takes tensors that flash3_quantize has made before.
  Computation(const Input& in, flash3_backend backend, int threads, bool in_fp8, Output* result)
      : memory_(make_memory(backend)), result_(result) {
    params_ = cases::make_params(in.c, in.q, in.k, in.v, result->out, result->lse, in.extra());
    params_.backend = backend;
    params_.num_threads = threads;
    params_.stream = memory_->stream();
    for (flash3_tensor* t : {&params_.q, &params_.k, &params_.v, &params_.out, &params_.lse,
                             &params_.sink, &params_.cu_seqlens_q, &params_.cu_seqlens_k}) {
      if (t->ndim == 0) continue;
      const auto bytes = static_cast<size_t>(cases::span_of(*t) * cases::element_size(t->dtype));
      buffers_.push_back(memory_->allocate(bytes));
      memory_->copy_in(buffers_.back().get(), t->data, bytes);
      t->data = buffers_.back().get();
    }
    if (in_fp8) {
      fp8_.emplace(*memory_, params_, cases::Scales::kBlock, /*rotate=*/true);
      check(fp8_->quantize());
      memory_->finish();
      fp8_->apply(&params_);
    }
    check(flash3_forward_supported(&params_));
    check(flash3_forward_workspace(&params_, &params_.workspace_size));
    if (params_.workspace_size == 0) return;
    buffers_.push_back(memory_->allocate(params_.workspace_size));
    params_.workspace = buffers_.back().get();
  }

  // Computes, and copies the result back.
  void run() {
    check(flash3_forward(&params_));
    memory_->finish();
    memory_->copy_out(result_->out_bytes.data(), params_.out.data, result_->out_bytes.size());
    memory_->copy_out(result_->lse_bytes.data(), params_.lse.data, result_->lse_bytes.size());
  }

  Measured time() {
    Measured m;
    m.kernel = value_of(explanation(params_), "kernel");
    m.workspace = params_.workspace_size;
    if (fp8_)
      m.quantize_ms = 1e3 * measure(*memory_, [&] { check(fp8_->quantize()); }, 5, 2e-3).median;
    m.timing = measure(*memory_, [&] { check(flash3_forward(&params_)); }, 20, 12e-3);
    return m;
  }

 private:
  const std::unique_ptr<cases::Memory> memory_;
  Output* const result_;
  flash3_forward_params params_{};
  std::vector<std::shared_ptr<void>> buffers_;
  std::optional<cases::Fp8Input> fp8_;
};

struct Checked {
  cases::TensorCheck out, lse;
  std::string failure;
};

Checked compare(const Input& in, flash3_backend backend, const Output& result) {
  Output naive(in);
  auto params = cases::make_params(in.c, in.q, in.k, in.v, naive.out, naive.lse, in.extra());
  params.backend = backend;  // whose arithmetic the bounds and a plain implementation have
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
  if (!status.ok()) throw UsageError(status.message());
  const ReferenceForward ref = attention_ref(problem);
  if (problem.quantizes)
    attention_naive_fp8(problem);
  else
    attention_naive(problem);
  Checked c;
  const auto rules = cases::output_rules(in.c, in.sequences);
  c.out = check_out(in.c, result.out, ref, rules, naive.out);
  c.lse = check_lse(in.c, result.lse, ref, rules, naive.lse);
  c.failure = c.out.failure.empty() ? c.lse.failure : c.out.failure;
  return c;
}

void save(OutputFile* file, const RunOptions& options, const Input& in, const Output& result) {
  const Case& c = in.c;
  const safetensors::Metadata metadata = {
      {"layout", short_name(c.layout)},
      {"input", options.input},
      {"case", to_id(c)},
      {"producer", format("flash3 {} ({})", flash3_version(), build_commit())}};
  const std::vector<int64_t> lse_shape(result.lse.shape, result.lse.shape + result.lse.ndim);
  safetensors::write(file,
                     {{"out", safetensors::dtype_name(c.dtype), out_shape(in), result.out_bytes},
                      {"lse", "F32", lse_shape, result.lse_bytes}},
                     metadata);
  file->commit();
}

std::string megabytes(double bytes) { return format("{:.2f} MiB", bytes / (1 << 20)); }

void print_text(const RunOptions& options, const Input& in, const Json& r, const Checked* checked) {
  const auto text = [&](const char* name) { return printable(r[name].get<std::string>()); };
  const auto number = [&](const char* name) { return r[name].get<double>(); };
  const Case& c = in.c;
  print("input    {}: {}\n", printable(options.input), text("case"));
  if (const auto it = in.metadata.find("description"); it != in.metadata.end())
    print("         {}\n", printable(it->second));
  if (c.is_ragged())
    print("         {} sequences: {} queries, at most {}; {} keys, at most {}\n", c.batch,
          in.sequences.q.cu.back() - in.sequences.q.cu.front(), c.seq_q,
          in.sequences.k.cu.back() - in.sequences.k.cu.front(), c.seq_k);
  print("backend  {}: {}\n", text("backend"), text("device"));
  print("kernel   {}\n", text("kernel"));
  print("time     {:.4f} ms (median of {} samples of {} calls, p10 {:.4f}, p90 {:.4f})\n",
        number("median_ms"), r["samples"].get<int>(), r["calls_per_sample"].get<int>(),
        number("p10_ms"), number("p90_ms"));
  if (r.contains("quantize_ms"))
    print("         {:.4f} ms before it to bring q, k and v to FP8\n", number("quantize_ms"));
  print("speed    {:.4f} TFLOP/s\n", number("tflops"));
  print(
      "memory   {} for q, k, v, out, lse, and {} of workspace; the score matrix, never "
      "stored, would take {} more\n",
      megabytes(tensor_bytes(c, &in.sequences)), megabytes(number("workspace_bytes")),
      megabytes(score_matrix_bytes(c, &in.sequences)));
  if (!options.output.empty()) print("output   {}\n", printable(options.output));
  if (checked == nullptr) return;
  const char* part = c.fp8 ? "worst block of rows" : "worst element";
  print("check    against float64: out error {:.2e}, {} {:.2f} of its bound\n", checked->out.error,
        part, checked->out.fraction);
  print("                          out RMSE {:.2e} (a naive {} implementation: {:.2e})\n",
        checked->out.rmse, c.fp8 ? "FP8" : cases::short_name(c.dtype), checked->out.naive_rmse);
  print("                          lse error {:.2e}, {} {:.2f} of its bound\n", checked->lse.error,
        part, checked->lse.fraction);
  print("         {}\n", checked->failure.empty() ? "passed" : "FAILED: " + checked->failure);
}

}  // namespace

int run(const RunOptions& options) {
  if (!options.output.empty() && is_same_file(options.output, options.input))
    throw UsageError(format("--output {} is the file of --input, which it would replace",
                            printable(options.output)));
  const Input in = load_input(options);
  const flash3_backend backend = resolve_backend(options.backend);
  std::optional<OutputFile> file;
  if (!options.output.empty()) file.emplace(options.output);
  Output result(in);
  Computation computation(in, backend, options.threads, options.dtype == "e4m3", &result);
  throw_if_stopped();
  computation.run();
  if (file) save(&*file, options, in, result);
  const Measured m = computation.time();

  Json r = metadata(backend);
  r["input"] = options.input;
  r["case"] = to_id(in.c);
  r["kernel"] = m.kernel;
  r["median_ms"] = 1e3 * m.timing.median;
  r["p10_ms"] = 1e3 * m.timing.p10;
  r["p90_ms"] = 1e3 * m.timing.p90;
  r["samples"] = m.timing.samples;
  r["calls_per_sample"] = m.timing.calls_per_sample;
  r["tflops"] = flops(in.c, &in.sequences) / m.timing.median * 1e-12;
  r["tensor_bytes"] = tensor_bytes(in.c, &in.sequences);
  r["workspace_bytes"] = m.workspace;
  if (m.quantize_ms > 0) r["quantize_ms"] = m.quantize_ms;
  r["score_matrix_bytes"] = score_matrix_bytes(in.c, &in.sequences);
  std::optional<Checked> checked;
  if (options.check) {
    checked = compare(in, backend, result);
    const auto part = [](const cases::TensorCheck& t) {
      return Json{{"error", t.error},
                  {"fraction_of_bound", t.fraction},
                  {"rmse", t.rmse},
                  {"naive_rmse", t.naive_rmse}};
    };
    r["check"] = {{"passed", checked->failure.empty()},
                  {"failure", checked->failure},
                  {"out", part(checked->out)},
                  {"lse", part(checked->lse)}};
  }
  if (options.json)
    print("{}\n", json_text(r, 2));
  else
    print_text(options, in, r, checked ? &*checked : nullptr);
  return checked && !checked->failure.empty() ? kExitFailure : 0;
}

}  // namespace flash3::cli
