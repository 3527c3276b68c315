// flash3 run: attention on the Q, K and V of a safetensors file.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cases/runner.hpp"
#include "cli/commands.hpp"
#include "cli/environment.hpp"
#include "cli/safetensors.hpp"
#include "cli/timing.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::Layout;
using Json = nlohmann::ordered_json;

struct Input {
  safetensors::File file;
  Case c;
  flash3_tensor q{}, k{}, v{};  // views into file, always [batch, seq, heads, dim]
};

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

flash3_tensor view_of(void* data, flash3_dtype dtype, std::vector<int64_t> shape, Layout layout) {
  flash3_tensor t{data, dtype, 4, {}, {}};
  int64_t stride = 1;
  for (size_t i = 4; i-- > 0;) {
    t.shape[i] = shape[i], t.stride[i] = stride;
    stride *= shape[i];
  }
  if (layout == Layout::kHeadsFirst) {
    std::swap(t.shape[1], t.shape[2]);
    std::swap(t.stride[1], t.stride[2]);
  }
  return t;
}

flash3_tensor find_tensor(const safetensors::File& file, const std::string& path,
                          const std::string& name, Layout layout) {
  const safetensors::Tensor* t = file.find(name);
  if (t == nullptr) throw UsageError(path + ": holds no tensor '" + name + "'");
  const flash3_dtype dtype = safetensors::dtype_of(t->dtype);
  if (dtype == FLASH3_DTYPE_NONE)
    throw UsageError(
        fmt::format("{}: tensor '{}' is {}; flash3 takes F16, BF16 and F32", path, name, t->dtype));
  if (t->shape.size() != 4)
    throw UsageError(fmt::format("{}: tensor '{}' has shape {}; it must have 4 dimensions", path,
                                 name, shape_text(t->shape)));
  return view_of(const_cast<std::byte*>(t->data.data()), dtype, t->shape, layout);
}

Input load(const RunOptions& options) {
  Input in;
  in.file = safetensors::read(options.input);
  std::string layout = options.layout;
  if (layout.empty() && in.file.metadata.contains("layout")) layout = in.file.metadata["layout"];
  if (layout.empty()) layout = "bshd";
  if (layout != "bshd" && layout != "bhsd")
    throw UsageError("layout '" + layout + "' is not one of bshd, bhsd");

  Case& c = in.c;
  c.layout = *cases::parse_layout(layout);
  in.q = find_tensor(in.file, options.input, "q", c.layout);
  in.k = find_tensor(in.file, options.input, "k", c.layout);
  in.v = find_tensor(in.file, options.input, "v", c.layout);
  c.dtype = in.q.dtype;
  c.batch = in.q.shape[0], c.seq_q = in.q.shape[1], c.heads_q = in.q.shape[2];
  c.seq_k = in.k.shape[1], c.heads_k = in.k.shape[2];
  c.head_dim = in.q.shape[3], c.head_dim_v = in.v.shape[3];
  c.causal = options.causal;
  c.window = options.has_left || options.has_right;
  c.window_left = options.window_left, c.window_right = options.window_right;
  c.softmax_scale = options.softmax_scale;
  return in;
}

// out and lse in host memory, in the layout of the input.
struct Output {
  std::vector<std::byte> out_bytes, lse_bytes;
  flash3_tensor out{}, lse{};

  explicit Output(const Case& c)
      : out_bytes(static_cast<size_t>(c.batch * c.seq_q * c.heads_q * c.head_dim_v *
                                      cases::element_size(c.dtype))),
        lse_bytes(static_cast<size_t>(c.batch * c.heads_q * c.seq_q) * sizeof(float)) {
    std::vector<int64_t> shape{c.batch, c.seq_q, c.heads_q, c.head_dim_v};
    if (c.layout == Layout::kHeadsFirst) std::swap(shape[1], shape[2]);
    out = view_of(out_bytes.data(), c.dtype, shape, c.layout);
    lse = {lse_bytes.data(),
           FLASH3_FLOAT32,
           3,
           {c.batch, c.heads_q, c.seq_q, 0},
           {c.heads_q * c.seq_q, c.seq_q, 1, 0}};
  }
};

struct Measured {
  std::string kernel;
  Timing timing;
  size_t workspace = 0;
};

// Copies the input to the backend's memory, computes, copies the result back, then times the call.
Measured compute(const Input& in, flash3_backend backend, int threads, Output* result) {
  const auto memory = make_memory(backend);
  auto params = cases::make_params(in.c, in.q, in.k, in.v, result->out, result->lse);
  params.backend = backend;
  params.num_threads = threads;
  params.stream = memory->stream();

  std::vector<std::shared_ptr<void>> buffers;
  for (flash3_tensor* t : {&params.q, &params.k, &params.v, &params.out, &params.lse}) {
    const auto bytes = static_cast<size_t>(cases::span_of(*t) * cases::element_size(t->dtype));
    buffers.push_back(memory->allocate(bytes));
    memory->copy_in(buffers.back().get(), t->data, bytes);
    t->data = buffers.back().get();
  }
  check(flash3_forward_supported(&params));
  Measured m;
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
  cases::Score out, lse;
  std::string failure;
};

Checked compare(const Input& in, const Output& result) {
  Output naive(in.c);
  const auto params = cases::make_params(in.c, in.q, in.k, in.v, naive.out, naive.lse);
  ForwardProblem problem;
  const Status status = make_forward_problem(&params, Pointers::kRequired, &problem);
  if (!status.ok()) throw UsageError(status.message());
  const ReferenceForward ref = attention_ref(problem);
  attention_naive(problem);
  Checked c;
  c.out = cases::judge_out(result.out, naive.out, ref);
  c.lse = cases::judge_lse(result.lse, naive.lse, ref);
  c.failure = c.out.failure.empty() ? c.lse.failure : c.out.failure;
  return c;
}

void save(const std::string& path, const RunOptions& options, const Case& c, const Output& result) {
  safetensors::File file;
  std::vector<int64_t> shape{c.batch, c.seq_q, c.heads_q, c.head_dim_v};
  if (c.layout == Layout::kHeadsFirst) std::swap(shape[1], shape[2]);
  file.metadata = {{"layout", short_name(c.layout)},
                   {"input", options.input},
                   {"case", to_id(c)},
                   {"producer", fmt::format("flash3 {} ({})", flash3_version(), build_commit())}};
  file.tensors.push_back({"out", safetensors::dtype_name(c.dtype), shape, result.out_bytes});
  file.tensors.push_back({"lse", "F32", {c.batch, c.heads_q, c.seq_q}, result.lse_bytes});
  safetensors::write(path, file);
}

std::string megabytes(double bytes) { return fmt::format("{:.2f} MiB", bytes / (1 << 20)); }

void print_text(const RunOptions& options, const Input& in, const Json& r, const Checked* checked) {
  const auto text = [&](const char* name) { return r[name].get<std::string>(); };
  const auto number = [&](const char* name) { return r[name].get<double>(); };
  const Case& c = in.c;
  fmt::print("input    {}: {}\n", options.input, text("case"));
  if (const auto it = in.file.metadata.find("description"); it != in.file.metadata.end())
    fmt::print("         {}\n", it->second);
  fmt::print("backend  {}: {}\n", text("backend"), text("device"));
  fmt::print("kernel   {}\n", text("kernel"));
  fmt::print("time     {:.4f} ms (median of {} samples of {} calls, p10 {:.4f}, p90 {:.4f})\n",
             number("median_ms"), r["samples"].get<int>(), r["calls_per_sample"].get<int>(),
             number("p10_ms"), number("p90_ms"));
  fmt::print("speed    {:.4f} TFLOP/s\n", number("tflops"));
  fmt::print(
      "memory   {} for q, k, v, out, lse, and {} of workspace; the score matrix, never "
      "stored, would take {} more\n",
      megabytes(tensor_bytes(c)), megabytes(number("workspace_bytes")),
      megabytes(score_matrix_bytes(c)));
  if (!options.output.empty()) fmt::print("output   {}\n", options.output);
  if (checked == nullptr) return;
  fmt::print(
      "check    against float64: out error {:.2e}, allowed {:.2e} (a naive {} "
      "implementation: {:.2e})\n",
      checked->out.error, checked->out.allowed, cases::short_name(c.dtype), checked->out.naive);
  fmt::print("                          lse error {:.2e}, allowed {:.2e} (naive: {:.2e})\n",
             checked->lse.error, checked->lse.allowed, checked->lse.naive);
  fmt::print("         {}\n", checked->failure.empty() ? "passed" : "FAILED: " + checked->failure);
}

}  // namespace

int run(const RunOptions& options) {
  const Input in = load(options);
  const flash3_backend backend = resolve_backend(options.backend);
  Output result(in.c);
  const Measured m = compute(in, backend, options.threads, &result);
  if (!options.output.empty()) save(options.output, options, in.c, result);

  Json r = metadata(backend);
  r["input"] = options.input;
  r["case"] = to_id(in.c);
  r["kernel"] = m.kernel;
  r["median_ms"] = 1e3 * m.timing.median;
  r["p10_ms"] = 1e3 * m.timing.p10;
  r["p90_ms"] = 1e3 * m.timing.p90;
  r["samples"] = m.timing.samples;
  r["calls_per_sample"] = m.timing.calls_per_sample;
  r["tflops"] = flops(in.c) / m.timing.median * 1e-12;
  r["tensor_bytes"] = tensor_bytes(in.c);
  r["workspace_bytes"] = m.workspace;
  r["score_matrix_bytes"] = score_matrix_bytes(in.c);
  std::optional<Checked> checked;
  if (options.check) {
    checked = compare(in, result);
    const auto score = [](const cases::Score& s) {
      return Json{{"error", s.error}, {"naive", s.naive}, {"allowed", s.allowed}};
    };
    r["check"] = {{"passed", checked->failure.empty()},
                  {"failure", checked->failure},
                  {"out", score(checked->out)},
                  {"lse", score(checked->lse)}};
  }
  if (options.json)
    fmt::print("{}\n", r.dump(2));
  else
    print_text(options, in, r, checked ? &*checked : nullptr);
  return checked && !checked->failure.empty() ? kExitFailure : 0;
}

}  // namespace flash3::cli
