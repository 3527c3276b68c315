// SPDX-License-Identifier: Apache-2.0
// flash3: the options of its subcommands.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "cases/added_options.hpp"
#include "cases/text.hpp"
#include "cli/commands.hpp"
#include "cli/format.hpp"

namespace flash3::cli {
namespace {

using cases::in_quotes;

constexpr const char kCaseHelp[] =
    "A case, e.g. bf16/b2/q129/k1000/h4x2/d128/causal (repeatable):\n"
    "dtype/batch/seq_q/seq_k/heads[xheads_k]/dim[xdim_v]/mask, then options.\n"
    "Mask: full, causal, w<left>:<right>, causal+w<left>:\n"
    "Call: nolse scale<x> softcap<x> chunk<n> sink sink16 dropout<p> outfp32\n"
    "Backward: bwd dlse deterministic nodsink dadded gradfp32\n"
    "Data: outliers special seed<n>. Latent attention: latent qv\n"
    "Mask as data: mask:band, mask:documents, mask:dense, mask:ranges<n>, mask:blocks<n>x<n>,\n"
    "mask:bits, mask:bitblocks, mask:share<percent>of<n>x<n>, mask:coins, with .b for each\n"
    "sequence and .h for each head; mask:causal, mask:prefix<n>, mask:sinks<n>x<newest>,\n"
    "mask:lognormal<draw>\n"
    "Ragged batch: packed[q|k] used[q|k] nomax front<n>; its lengths: random giant edges empty\n"
    "lognormal<tokens>:<draw>\n"
    "KV cache: paged<n> batchidx leftpad rotate tree append<n> packednew rotary rotary2 offsets\n"
    "FP8: fp8; with e4m3 onescale headscales blockscales outfp16, or for one tensor v:onescale\n"
    "Quantise: quantize, with rotate rotary rotary2 noq nok nov\n"
    "Layout: bshd bhsd padded odd; for one tensor <tensor>:<layout>, then .at<n> (elements off an\n"
    "aligned address) .gap<n> (between rows) .batch0 .rows0 .heads0 (stride 0) .wild (strides\n"
    "that are never used), e.g. k:bhsd.at3.heads0\n"
    "Other fields of the call:";
constexpr const char* kCase = "A case (repeatable); flash3 explain --help describes cases";
constexpr const char* kBackendHelp = "auto (Hopper if there is one, else the CPU), hopper or cpu";
constexpr int kMostJobs = 1 << 16;

// All of text as a number; NaN, which no comparison holds for, where it is none.
double number_in(const std::string& text) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = code == std::errc() && end == text.data() + text.size();
  return whole ? value : std::numeric_limits<double>::quiet_NaN();
}

// The range of an option that is a number. What is not finite is in no range.
CLI::Validator in_range(double least, double most) {
  return {[=](const std::string& text) {
            const double value = number_in(text);
            return value >= least && value <= most
                       ? std::string()
                       : format("{} is not a number in the range {} to {}", in_quotes(text), least,
                                most);
          },
          format("in {} .. {}", least, most)};
}

// For what the library takes as float32, where a small number must not become 0, its default. The
// library checks signs.
CLI::Validator a_float32() {
  return {[](const std::string& text) {
            constexpr double kLargest = std::numeric_limits<float>::max();
            constexpr double kSmallest = std::numeric_limits<float>::min();
            const double size = std::abs(number_in(text));
            return size == 0 || (size >= kSmallest && size <= kLargest)
                       ? std::string()
                       : format("{} is neither 0 nor a number of {:.3g} to {:.3g}", in_quotes(text),
                                kSmallest, kLargest);
          },
          "FLOAT32"};
}

CLI::Validator a_file_name() {
  return {[](const std::string& text) {
            return text.empty() ? std::string("the name of a file is empty") : std::string();
          },
          ""};
}

// Letters to change, to add or to leave out, to make one of the other.
size_t edits(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kMost = 100;  // letters; no option is that long
  const std::string start = word.substr(0, kMost);
  return *std::min_element(known.begin(), known.end(), [&](const auto& a, const auto& b) {
    return edits(start, a) < edits(start, b);
  });
}

// "; did you mean …?", of the options of the command that was given, or "".
std::string suggestion(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  if (commands.empty()) return "";
  std::vector<std::string> known;
  for (const CLI::Option* option : commands.front()->get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  std::string text;
  for (const std::string& word : app.remaining(true)) {
    const std::string option = word.substr(0, word.find('='));
    if (!option.starts_with("--")) continue;
    const std::string found = nearest(option, known);
    if (edits(option, found) <= found.size() / 3) text += format("; did you mean {}?", found);
  }
  return text;
}

}  // namespace

int parse_and_run(int argc, const char* const* argv, const std::string& version,
                  const Commands& commands, std::ostream& out, std::ostream& err) {
  CLI::App app("Exact attention for NVIDIA Hopper GPUs and CPUs", "flash3");
  app.set_version_flag("--version", version);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* failed, const CLI::Error& e) {
    const bool extra = dynamic_cast<const CLI::ExtrasError*>(&e) != nullptr;
    return format("flash3: {}{}\nRun with --help for more information.\n",
                  cases::printable(e.what()), extra ? suggestion(*failed) : "");
  });
  std::function<int()> command;

  InfoOptions info_options;
  auto* info_app = app.add_subcommand("info", "Devices, backends, kernels, versions");
  info_app->add_flag("--json", info_options.json, "Print JSON");
  info_app->add_flag("--machine-code", info_options.machine_code,
                     "The Hopper kernels in this program and a hash of each one's machine code");
  info_app->callback([&] { command = [&] { return commands.info(info_options); }; });

  RunOptions run_options;
  auto* run_app = app.add_subcommand("run", "Attention on Q, K, V from a safetensors file");
  run_app->add_option("-i,--input", run_options.input, "File with tensors q, k, v")
      ->required()
      ->check(a_file_name());
  run_app->add_option("-o,--output", run_options.output, "File for out and lse")
      ->check(a_file_name());
  run_app->add_option("--layout", run_options.layout,
                      "bshd [batch, seq, heads, dim] or bhsd [batch, heads, seq, dim]; default: "
                      "the file's metadata 'layout', else bshd");
  run_app->add_option("--backend", run_options.backend, kBackendHelp)->capture_default_str();
  run_app->add_flag("--causal", run_options.causal, "Causal mask, aligned to the bottom right");
  auto* left = run_app->add_option("--window-left", run_options.window_left,
                                   "Keys seen to the left of the diagonal");
  auto* right = run_app->add_option("--window-right", run_options.window_right,
                                    "Keys seen to the right of the diagonal");
  run_app->add_option("--softmax-scale", run_options.softmax_scale, "Default: 1/sqrt(head_dim)")
      ->check(a_float32());
  run_app->add_option("--softcap", run_options.softcap, "Soft cap of the scores; 0: none")
      ->check(a_float32());
  run_app->add_option("--chunk", run_options.chunk,
                      "Queries see only keys of their own chunk of this many tokens; 0: none");
  run_app->add_option("--sink", run_options.sink,
                      "Name of a tensor in the file: a sink for each query head");
  auto* cu_seqlens = run_app->add_option(
      "--cu-seqlens", run_options.cu_seqlens,
      "Ragged batch: q, k, v are [total, heads, dim]. Sequence b has the rows from the\n"
      "b-th of these numbers to just before the next, e.g. 0,5,12. Or the name of an I32\n"
      "tensor in the file that holds them");
  run_app
      ->add_option("--cu-seqlens-k", run_options.cu_seqlens_k,
                   "The same for k and v, if they differ")
      ->needs(cu_seqlens);
  run_app
      ->add_option("--dtype", run_options.dtype,
                   "e4m3: convert q, k and v to FP8 first, with scales for blocks and the rotation")
      ->check(CLI::IsMember({"e4m3"}));
  run_app
      ->add_option("--compute", run_options.compute,
                   "fp8: the call itself converts q, k and v to FP8")
      ->check(CLI::IsMember({"fp8"}))
      ->excludes("--dtype");
  run_app->add_option("--threads", run_options.threads, "CPU: threads; 0: all cores")
      ->check(in_range(0, kMostJobs));
  run_app->add_flag("--check", run_options.check, "Compare with the float64 oracle");
  run_app->add_flag("--json", run_options.json, "Print JSON");
  run_app->callback([&] {
    run_options.has_left = left->count() > 0;
    run_options.has_right = right->count() > 0;
    command = [&] { return commands.run(run_options); };
  });

  BenchOptions bench_options;
  auto* bench_app = app.add_subcommand("bench", "Time cases: TFLOP/s, GB/s, clocks, watts");
  bench_app->add_option(
      "--suite", bench_options.suite,
      "quick (the default), forward (the papers' sweep), backward (the same\n"
      "sweep's backward), window (time against the width of a sliding window),\n"
      "ragged (ragged batches, sinks and softcaps beside dense calls), fp8 (e4m3\n"
      "tensors beside 16-bit ones), masks (masks as data, forward and backward, beside\n"
      "the causal, windowed, ragged or full call) or decode (calls on a KV cache)");
  bench_app->add_option("--case", bench_options.cases, kCase);
  bench_app->add_flag("--backward", bench_options.backward, "The backward of each case");
  bench_app->add_flag("--deterministic", bench_options.deterministic,
                      "Backward cases: the same bits each time");
  bench_app->add_option("--filter", bench_options.filters, "Only cases whose id contains this");
  bench_app->add_option("--backend", bench_options.backend, kBackendHelp)->capture_default_str();
  bench_app->add_option(
      "--dtype", bench_options.dtype,
      "The dtype of the suite and of --ceiling: bf16 (the default), fp16 or fp32; --ceiling alone "
      "takes e4m3 too");
  auto* ceiling_flag = bench_app->add_flag(
      "--ceiling", bench_options.ceiling,
      "Hopper: also measure what the tensor cores sustain, before and after the cases, and print "
      "each figure's share of it; without --suite and --case measure that alone");
  bench_app
      ->add_option("--ceiling-dim", bench_options.ceiling_dim, "Head dim of the ceiling's products")
      ->check(CLI::IsMember({64, 128, 256}))
      ->needs(ceiling_flag)
      ->capture_default_str();
  bench_app
      ->add_option("--sustained", bench_options.sustained,
                   "Run each case this long (seconds; 30 if none are given) and print burst and "
                   "sustained speed")
      ->expected(0, 1)
      ->default_str("30")
      ->check(in_range(0.1, 3600));
  bench_app->add_option("--samples", bench_options.samples, "Samples per case")
      ->check(in_range(1, 100000))
      ->capture_default_str();
  bench_app
      ->add_option("--sample-ms", bench_options.sample_ms,
                   "Milliseconds of back-to-back calls in a sample")
      ->check(in_range(0, 60000))
      ->capture_default_str();
  bench_app->add_option("--threads", bench_options.threads, "CPU: threads; 0: all cores")
      ->check(in_range(0, kMostJobs));
  bench_app->add_flag("--naive", bench_options.naive,
                      "CPU: also time the naive implementation and print the ratio");
  auto* list_flag = bench_app->add_flag("--list", bench_options.list,
                                        "Print the cases with their sequences, operations and "
                                        "bytes (--json too) and run nothing");
  bench_app->add_option("--json", bench_options.json_file, "Write the results to this file")
      ->check(a_file_name());
  bench_app->add_option("--csv", bench_options.csv_file, "Write the results to this file")
      ->check(a_file_name());
  bench_app
      ->add_option(
          "--share", bench_options.share_file,
          "Write every sample to this file, with the machine (but not its name), versions, "
          "clocks and watts, for flash3 compare here or elsewhere")
      ->check(a_file_name());
  auto* ablation_flag = bench_app->add_flag(
      "--ablation", bench_options.ablation,
      "Hopper: the FlashAttention-3 paper's ablation instead of cases: the forward kernel with "
      "parts of its schedule switched off, on the paper's shape; --dtype e4m3: the FP8 kernel; "
      "otherwise only with --samples, --sample-ms and --json");
  for (const char* other :
       {"--suite", "--case", "--filter", "--ceiling", "--sustained", "--backward",
        "--deterministic", "--naive", "--threads", "--csv", "--share"})
    ablation_flag->excludes(bench_app->get_option(other));
  for (const char* other :
       {"--ceiling", "--sustained", "--naive", "--csv", "--share", "--ablation"})
    list_flag->excludes(bench_app->get_option(other));
  bench_app->get_option("--share")->excludes("--sustained");
  bench_app->callback([&] { command = [&] { return commands.bench(bench_options); }; });

  CompareOptions compare_options;
  auto* compare_app = app.add_subcommand(
      "compare", "Compare two files of bench --json or --share: what became faster or slower");
  compare_app->add_option("A", compare_options.a, "The file to compare with")
      ->required()
      ->check(a_file_name());
  compare_app->add_option("B", compare_options.b, "The file to be compared")
      ->required()
      ->check(a_file_name());
  compare_app
      ->add_option("--at-least", compare_options.least,
                   "Exit code 1 if B's mean speed divided by A's is below this, or a case's is "
                   "beyond noise, e.g. 0.97")
      ->check(in_range(0, 1e6));
  compare_app->callback([&] { command = [&] { return commands.compare(compare_options); }; });

  VerifyOptions verify_options;
  auto* verify_app = app.add_subcommand("verify", "The case table against the float64 oracle");
  verify_app->add_option("--level", verify_options.level, "quick or full")->capture_default_str();
  verify_app
      ->add_flag("--accuracy", verify_options.accuracy,
                 "The FlashAttention-3 paper's experiment instead of the table: RMSE on data\n"
                 "with outliers, beside a plain implementation's in the same precision")
      ->disable_flag_override();  // --accuracy=0.01 would be read as "off"
  verify_app
      ->add_option("--length", verify_options.lengths,
                   "With --accuracy: queries and keys, e.g. 1024,8192; above 4096 only some rows\n"
                   "are compared, and only in FP8")
      ->delimiter(',')
      ->check(in_range(1, 1 << 24))
      ->needs("--accuracy");
  verify_app
      ->add_option("--input", verify_options.inputs,
                   "With --accuracy: the FP8 table on q, k and v of this safetensors file instead")
      ->check(a_file_name())
      ->needs("--accuracy")
      ->excludes("--length");
  verify_app
      ->add_flag("--backward", verify_options.backward,
                 "The gradients instead of the forward: the table with dlse and deterministic\n"
                 "gradients, or the backward of each --case")
      ->excludes("--accuracy");
  verify_app
      ->add_flag("--ragged", verify_options.ragged,
                 "Batches of sequences of different lengths, each against the oracle alone; with\n"
                 "--backward their gradients")
      ->excludes("--accuracy");
  verify_app
      ->add_flag("--quantize", verify_options.quantize,
                 "flash3_quantize: codes and scales against a plain reference")
      ->excludes("--accuracy", "--backward", "--ragged");
  verify_app
      ->add_flag("--decode", verify_options.decode,
                 "Calls on a KV cache: pages, padding, appended keys, rotary embeddings and trees\n"
                 "of drafts; what the cache then holds is compared bit for bit")
      ->excludes("--accuracy", "--backward", "--ragged", "--quantize");
  verify_app
      ->add_flag("--masks", verify_options.masks,
                 "Masks as data: every source under every band; with --backward their gradients")
      ->excludes("--accuracy", "--ragged", "--quantize", "--decode");
  auto* random =
      verify_app
          ->add_option("--random", verify_options.random,
                       "Random problems instead of the table, for this many seconds; with\n"
                       "--backward, --ragged, --quantize, --decode, --masks or --filter only such\n"
                       "ones. Those that fail are printed with ids that --case repeats")
          ->excludes("--accuracy", "--level")
          ->check(in_range(0.001, 1e7));
  verify_app
      ->add_option("--seed", verify_options.seed,
                   "With --random: repeat the problems of this seed; default: a new one, printed")
      ->needs(random);
  verify_app
      ->add_option("--count", verify_options.count,
                   "With --random: stop after this many problems, and print each")
      ->needs(random)
      ->check(in_range(1, 1e15));
  verify_app->add_option("--case", verify_options.cases, kCase)
      ->excludes("--ragged", "--quantize", "--decode", "--masks", "--length", "--input",
                 "--random");
  verify_app->add_option(
      "--filter", verify_options.filters,
      "Only cases whose id contains this, e.g. /d128/ (repeatable: each of them)");
  verify_app->add_option("--backend", verify_options.backend, kBackendHelp)->capture_default_str();
  verify_app->add_option("--jobs", verify_options.jobs, "Cases at a time; 0: one per core")
      ->check(in_range(0, kMostJobs));
  verify_app->add_option("--threads", verify_options.threads, "CPU: threads of each call")
      ->check(in_range(0, kMostJobs))
      ->capture_default_str();
  verify_app
      ->add_option(
          "--repeat", verify_options.repeat,
          "Run each case this many times; bits must agree (backward cases: if deterministic)")
      ->check(in_range(1, 1000))
      ->capture_default_str();
  verify_app->add_flag("-q,--quiet", verify_options.quiet, "Print failures and the summary only");
  verify_app->add_flag("--list", verify_options.list, "Print the ids and run nothing");
  auto* record_option = verify_app->add_option(
      "--record", verify_options.record,
      "Run all that a kernel must pass before a release and that this file lacks, and note\n"
      "in it what has passed, with a hash of each kernel's machine code");
  verify_app
      ->add_option(
          "--part", verify_options.parts,
          "With --record: run only this, e.g. full or backward,ragged (repeatable), even if\n"
          "the file has it; random problems run for --random seconds, and add up")
      ->delimiter(',')
      ->needs(record_option);
  record_option->check(a_file_name());
  for (const char* other : {"--level", "--accuracy", "--backward", "--ragged", "--quantize",
                            "--decode", "--case", "--repeat", "--list", "--count"})
    record_option->excludes(verify_app->get_option(other));
  verify_app->callback([&] { command = [&] { return commands.verify(verify_options); }; });

  ExplainOptions explain_options;
  auto* explain_app = app.add_subcommand("explain", "Which kernel a case runs, and why");
  explain_app
      ->add_option("case,--case", explain_options.cases, kCaseHelp + cases::added_options_help())
      ->required();
  explain_app->add_option("--backend", explain_options.backend, kBackendHelp)
      ->capture_default_str();
  explain_app->add_flag("--backward", explain_options.backward, "The backward of each case");
  explain_app->add_flag("--json", explain_options.json, "Print JSON");
  explain_app->callback([&] { command = [&] { return commands.explain(explain_options); }; });

  TraceOptions trace_options;
  auto* trace_app =
      app.add_subcommand("trace", "Hopper: what each role of one block of a kernel does, and when");
  trace_app
      ->add_option("case,--case", trace_options.id,
                   "A forward case; flash3 explain --help describes cases")
      ->required();
  trace_app
      ->add_option("-o,--output", trace_options.output,
                   "File for the timeline, in Chrome's trace format (chrome://tracing, "
                   "ui.perfetto.dev)")
      ->check(a_file_name());
  trace_app->add_option("--block", trace_options.block, "The block, counted from 0")
      ->check(in_range(0, std::numeric_limits<int>::max()))
      ->capture_default_str();
  trace_app->callback([&] { command = [&] { return commands.trace(trace_options); }; });

  const std::pair<CLI::App*, bool> offered[] = {
      {info_app, bool(commands.info)},     {run_app, bool(commands.run)},
      {bench_app, bool(commands.bench)},   {compare_app, bool(commands.compare)},
      {verify_app, bool(commands.verify)}, {explain_app, bool(commands.explain)},
      {trace_app, bool(commands.trace)}};
  std::vector<std::string> names;
  std::string elsewhere;
  for (const auto& [subcommand, is_there] : offered) {
    if (is_there) {
      names.push_back(subcommand->get_name());
      continue;
    }
    app.remove_subcommand(subcommand);
    elsewhere = "The other commands are in the program flash3: make build";
  }
  app.footer(elsewhere);

  if (const std::string word = argc > 1 ? argv[1] : "";
      !word.empty() && word[0] != '-' &&
      std::find(names.begin(), names.end(), word) == names.end()) {
    err << format("flash3: there is no command {}; did you mean {}? The commands are {}\n",
                  in_quotes(word), nearest(word, names), join(names, ", "));
    if (!elsewhere.empty()) err << elsewhere << "\n";
    return kExitUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e, out, err) == 0 ? 0 : kExitUsage;
  }
  return command();
}

}  // namespace flash3::cli
