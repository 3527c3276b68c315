// SPDX-License-Identifier: Apache-2.0
// flash3 run: attention on the Q, K and V of a safetensors file.
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "cases/fp8_input.hpp"
#include "cases/runner.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "cli/run_input.hpp"
#include "cli/safetensors.hpp"
#include "cli/timing.hpp"
#include "oracle/yardsticks/naive.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::Layout;
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

// Copies the input to the backend's memory, computes, copies the result back, then times the call.
// in_fp8: the call takes tensors that flash3_quantize has made before.
Measured compute(const Input& in, flash3_backend backend, int threads, bool in_fp8,
                 Output* result) {
  const auto memory = make_memory(backend);
  auto params = cases::make_params(in.c, in.q, in.k, in.v, result->out, result->lse, in.extra());
  params.backend = backend;
  params.num_threads = threads;
  params.stream = memory->stream();

  std::vector<std::shared_ptr<void>> buffers;
  for (flash3_tensor* t : {&params.q, &params.k, &params.v, &params.out, &params.lse, &params.sink,
                           &params.cu_seqlens_q, &params.cu_seqlens_k}) {
    if (t->ndim == 0) continue;
    const auto bytes = static_cast<size_t>(cases::span_of(*t) * cases::element_size(t->dtype));
    buffers.push_back(memory->allocate(bytes));
    memory->copy_in(buffers.back().get(), t->data, bytes);
    t->data = buffers.back().get();
  }
  Measured m;
  std::optional<cases::Fp8Input> fp8;
  if (in_fp8) {
    fp8.emplace(*memory, params, cases::Scales::kBlock, /*rotate=*/true);
    check(fp8->quantize());
    memory->finish();
    m.quantize_ms = 1e3 * measure(*memory, [&] { check(fp8->quantize()); }, 5, 2e-3).median;
    fp8->apply(&params);
  }
  check(flash3_forward_supported(&params));
  check(flash3_forward_workspace(&params, &m.workspace));
  if (m.workspace > 0) buffers.push_back(memory->allocate(m.workspace));
  params.workspace = m.workspace > 0 ? buffers.back().get() : nullptr;
  params.workspace_size = m.workspace;
  m.kernel = value_of(explanation(params), "kernel");

  check(flash3_forward(&params));
  memory->finish();
  memory->copy_out(result->out_bytes.data(), params.out.data, result->out_bytes.size());
  memory->copy_out(result->lse_bytes.data(), params.lse.data, result->lse_bytes.size());
  m.timing = measure(*memory, [&] { check(flash3_forward(&params)); }, 20, 12e-3);
  return m;
}

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

void save(const std::string& path, const RunOptions& options, const Input& in,
          const Output& result) {
  const Case& c = in.c;
  safetensors::File file;
  file.metadata = {{"layout", short_name(c.layout)},
                   {"input", options.input},
                   {"case", to_id(c)},
                   {"producer", format("flash3 {} ({})", flash3_version(), build_commit())}};
  file.tensors.push_back(
      {"out", safetensors::dtype_name(c.dtype), out_shape(in), result.out_bytes});
  file.tensors.push_back(
      {"lse", "F32", {result.lse.shape, result.lse.shape + result.lse.ndim}, result.lse_bytes});
  safetensors::write(path, file);
}

std::string megabytes(double bytes) { return format("{:.2f} MiB", bytes / (1 << 20)); }

void print_text(const RunOptions& options, const Input& in, const Json& r, const Checked* checked) {
  const auto text = [&](const char* name) { return r[name].get<std::string>(); };
  const auto number = [&](const char* name) { return r[name].get<double>(); };
  const Case& c = in.c;
  print("input    {}: {}\n", options.input, text("case"));
  if (const auto it = in.file.metadata.find("description"); it != in.file.metadata.end())
    print("         {}\n", it->second);
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
  if (!options.output.empty()) print("output   {}\n", options.output);
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
  const Input in = load_input(options);
  const flash3_backend backend = resolve_backend(options.backend);
  Output result(in);
  const Measured m = compute(in, backend, options.threads, options.dtype == "e4m3", &result);
  if (!options.output.empty()) save(options.output, options, in, result);

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
    print("{}\n", r.dump(2));
  else
    print_text(options, in, r, checked ? &*checked : nullptr);
  return checked && !checked->failure.empty() ? kExitFailure : 0;
}

}  // namespace flash3::cli
