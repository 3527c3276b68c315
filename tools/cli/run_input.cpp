// SPDX-License-Identifier: Apache-2.0
#include "cli/run_input.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "cases/internals.hpp"
#include "cases/text.hpp"
#include "cli/environment.hpp"
#include "cli/format.hpp"
#include "flash3/flash3.hpp"

namespace flash3::cli {
namespace {

using cases::Case;
using cases::in_quotes;
using cases::Layout;
using cases::printable;

std::string shape_text(const std::vector<int64_t>& shape) {
  return format("[{}]", join(shape, ", "));
}

const safetensors::TensorInfo& find(const safetensors::Reader& file, const std::string& name) {
  const safetensors::TensorInfo* t = file.header().find(name);
  if (t == nullptr)
    throw UsageError(
        format("{}: holds no tensor {}", printable(file.file().path()), in_quotes(name)));
  return *t;
}

// What attention takes, by dtype and rank.
const safetensors::TensorInfo& find_tensor(const safetensors::Reader& file, const std::string& name,
                                           size_t ndim) {
  const safetensors::TensorInfo& t = find(file, name);
  const std::string where = format("{}: tensor {}", printable(file.file().path()), in_quotes(name));
  if (safetensors::dtype_of(t.dtype) == FLASH3_DTYPE_NONE)
    throw UsageError(format("{} is {}; flash3 takes F16, BF16 and F32", where, t.dtype));
  if (t.shape.size() != ndim)
    throw UsageError(format("{} has shape {}; it must have {} dimension{}", where,
                            shape_text(t.shape), ndim, ndim == 1 ? "" : "s"));
  return t;
}

// Before memory is asked for that there is none of.
void check_memory(const safetensors::Reader& file,
                  const std::vector<const safetensors::TensorInfo*>& tensors) {
  constexpr double kGigabyte = 1e9;
  double bytes = 0;
  for (const safetensors::TensorInfo* t : tensors) bytes += static_cast<double>(t->bytes());
  const double there = memory_of_machine();
  if (bytes > there)
    throw UsageError(
        format("{}: its tensors take {:.1f} GB, and this machine has {:.1f} GB of "
               "memory",
               printable(file.file().path()), bytes / kGigabyte, there / kGigabyte));
}

flash3_tensor read_tensor(const safetensors::Reader& file, const safetensors::TensorInfo& t,
                          Layout layout, Input* in) {
  in->data.push_back(file.read(t));
  return view_of(in->data.back().data(), safetensors::dtype_of(t.dtype), t.shape, layout);
}

// "0,5,12", or the name of an I32 tensor in the file.
std::vector<int32_t> sequence_bounds(const safetensors::Reader& file, const std::string& option,
                                     const std::string& text) {
  std::vector<int32_t> bounds;
  if (text.find_first_not_of("0123456789,") == std::string::npos) {
    const char *at = text.data(), *end = at + text.size();
    for (int32_t n = 0;; ++at) {
      const auto [next, code] = std::from_chars(at, end, n);
      if (code != std::errc() || (next != end && *next != ','))
        throw UsageError(
            format("{} {}: it must be numbers with commas between them, such as "
                   "0,5,12, or the name of an I32 tensor in the file",
                   option, printable(text)));
      bounds.push_back(n);
      if (next == end) break;
      at = next;
    }
  } else {
    const safetensors::TensorInfo& t = find(file, text);
    if (t.dtype != "I32" || t.shape.size() != 1)
      throw UsageError(format("{}: tensor {} is {} {}; {} takes I32 of 1 dimension",
                              printable(file.file().path()), in_quotes(text), t.dtype,
                              shape_text(t.shape), option));
    check_memory(file, {&t});
    const std::vector<std::byte> data = file.read(t);
    bounds.resize(data.size() / sizeof(int32_t));
    std::memcpy(bounds.data(), data.data(), data.size());
  }
  if (bounds.size() < 2)
    throw UsageError(format("{} {}: it must have one number more than there are sequences", option,
                            printable(text)));
  return bounds;
}

cases::SequenceLengths packed_rows(std::vector<int32_t> bounds, int64_t rows) {
  cases::SequenceLengths s;
  for (size_t b = 1; b < bounds.size(); ++b)
    s.max_length = std::max<int64_t>(s.max_length, int64_t{bounds[b]} - bounds[b - 1]);
  s.cu = std::move(bounds);
  s.rows = rows;
  return s;
}

Layout layout_of(const safetensors::Metadata& metadata, const RunOptions& options) {
  std::string layout = options.layout;
  if (const auto it = metadata.find("layout"); layout.empty() && it != metadata.end())
    layout = it->second;
  if (layout.empty()) layout = "bshd";
  if (layout != "bshd" && layout != "bhsd")
    throw UsageError("layout " + in_quotes(layout) + " is not one of bshd, bhsd");
  return *cases::parse_layout(layout);
}

// The library's own sentence, where the tensors do not fit together or lengths break a rule.
void check_input(const Input& in) {
  const flash3_tensor out = view_of(nullptr, in.c.dtype, out_shape(in), in.c.layout);
  const auto params = cases::make_params(in.c, in.q, in.k, in.v, out, {}, in.extra());
  ForwardProblem problem;
  Status status = make_forward_problem(&params, Pointers::kOptional, &problem);
  if (status.ok()) status = check_lengths(problem);
  if (!status.ok()) throw UsageError(status.message());
}

}  // namespace

flash3_tensor view_of(void* data, flash3_dtype dtype, const std::vector<int64_t>& shape,
                      Layout layout) {
  const int ndim = static_cast<int>(shape.size());
  flash3_tensor t{data, dtype, ndim, {}, {}};
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[size_t(i)], t.stride[i] = stride;
    stride *= shape[size_t(i)];
  }
  if (layout == Layout::kHeadsFirst) {
    std::swap(t.shape[ndim - 3], t.shape[ndim - 2]);
    std::swap(t.stride[ndim - 3], t.stride[ndim - 2]);
  }
  return t;
}

std::vector<int64_t> out_shape(const Input& in) {
  const Case& c = in.c;
  std::vector<int64_t> shape{in.sequences.q.rows, c.heads_q, c.head_dim_v};
  if (c.layout == Layout::kHeadsFirst) std::swap(shape[0], shape[1]);
  if (!c.is_ragged()) shape.insert(shape.begin(), c.batch);
  return shape;
}

cases::ExtraViews Input::extra() const {
  cases::ExtraViews views;
  views.sink = sink;
  const auto index = [](const std::vector<int32_t>& values) {
    return values.empty() ? flash3_tensor{}
                          : index_tensor(values.data(), static_cast<int64_t>(values.size()));
  };
  views.cu_seqlens_q = index(sequences.q.cu);
  views.cu_seqlens_k = index(sequences.k.cu);
  return views;
}

Input load_input(const RunOptions& options) {
  Input in;
  const safetensors::Reader file(options.input);
  in.metadata = file.header().metadata;
  Case& c = in.c;
  c.layout = layout_of(in.metadata, options);
  c.packed_q = c.packed_k = !options.cu_seqlens.empty();
  const size_t ndim = c.is_ragged() ? 3 : 4;
  std::vector<const safetensors::TensorInfo*> tensors;
  for (const char* name : {"q", "k", "v"}) tensors.push_back(&find_tensor(file, name, ndim));
  if (!options.sink.empty()) tensors.push_back(&find_tensor(file, options.sink, 1));
  check_memory(file, tensors);
  in.q = read_tensor(file, *tensors[0], c.layout, &in);
  in.k = read_tensor(file, *tensors[1], c.layout, &in);
  in.v = read_tensor(file, *tensors[2], c.layout, &in);
  if (!options.sink.empty()) in.sink = read_tensor(file, *tensors[3], Layout::kBatchSeq, &in);

  const auto size = [&](const flash3_tensor& t, size_t from_end) {
    return t.shape[size_t(t.ndim) - from_end];
  };
  c.dtype = in.q.dtype;
  c.heads_q = size(in.q, 2), c.heads_k = size(in.k, 2);
  c.head_dim = size(in.q, 1), c.head_dim_v = size(in.v, 1);
  if (c.is_ragged()) {
    auto bounds = sequence_bounds(file, "--cu-seqlens", options.cu_seqlens);
    c.batch = static_cast<int64_t>(bounds.size()) - 1;
    auto bounds_k = options.cu_seqlens_k.empty()
                        ? bounds
                        : sequence_bounds(file, "--cu-seqlens-k", options.cu_seqlens_k);
    in.sequences = {packed_rows(std::move(bounds), size(in.q, 3)),
                    packed_rows(std::move(bounds_k), size(in.k, 3))};
    c.seq_q = in.sequences.q.max_length, c.seq_k = in.sequences.k.max_length;
  } else {
    c.batch = in.q.shape[0], c.seq_q = in.q.shape[1], c.seq_k = in.k.shape[1];
    in.sequences = cases::make_sequences(c);
  }
  c.causal = options.causal;
  c.window = options.has_left || options.has_right;
  c.window_left = options.window_left, c.window_right = options.window_right;
  c.softmax_scale = options.softmax_scale;
  c.softcap = options.softcap, c.chunk = options.chunk;
  if (in.sink.ndim > 0)
    c.sink = in.sink.dtype == FLASH3_FLOAT32 ? cases::Sink::kFloat32 : cases::Sink::k16;
  c.fp8 = options.compute == "fp8" || options.dtype == "e4m3";
  check_input(in);
  return in;
}

}  // namespace flash3::cli
