// SPDX-License-Identifier: Apache-2.0
// flash3 run, as a user meets it.
#include "program.hpp"

namespace flash3::cli {
namespace {

TEST_F(Cli, RunOnRealInput) {
  const std::string data = FLASH3_DATA_DIR "/minilm_layer5.safetensors";
  const Outcome o =
      flash3("run --backend cpu --check --json -i " + data + " -o " + path("o.safetensors"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json r = json::parse(o.out);
  EXPECT_EQ(r["check"]["passed"], true);
  EXPECT_EQ(r["case"], "bf16/b1/q512/k512/h12/d32/full");
  EXPECT_EQ(r["score_matrix_bytes"], 2. * 12 * 512 * 512);
  const Stored out = stored(path("o.safetensors"), "out");
  EXPECT_EQ(out.shape, (std::vector<int64_t>{1, 512, 12, 32}));
  EXPECT_EQ(out.dtype, "BF16");
  EXPECT_EQ(stored(path("o.safetensors"), "lse").shape, (std::vector<int64_t>{1, 12, 512}));

  const Outcome text = flash3("run --backend cpu --check --causal --window-left 100 -i " + data);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("/causal+w100:"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("passed"), std::string::npos) << text.out;
}

TEST_F(Cli, RunAlone) {
  const std::string data = FLASH3_DATA_DIR "/minilm_layer5.safetensors";
  const Outcome o = flash3("run --backend cpu --check -i " + data, "", FLASH3_RUN_BINARY);
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("passed"), std::string::npos) << o.out;
  const std::string help = flash3("--help", "", FLASH3_RUN_BINARY).out;
  EXPECT_NE(help.find("run "), std::string::npos) << help;
  for (const std::string other : {"info", "bench", "compare", "verify", "explain", "trace"}) {
    EXPECT_EQ(help.find("\n  " + other), std::string::npos) << help;
    const Outcome refused = flash3(other + " --help", "", FLASH3_RUN_BINARY);
    EXPECT_NE(refused.err.find("make build"), std::string::npos) << refused.out << refused.err;
  }
  EXPECT_EQ(flash3("verify", "", FLASH3_RUN_BINARY).exit_code, 2);
}

TEST_F(Cli, RunTakesBothLayouts) {
  const std::string file = input("heads_first", "F32", {2, 4, 6, 8}, {2, 2, 7, 8}, {2, 2, 7, 3});
  const Outcome o =
      flash3("run --backend cpu --check --layout bhsd -i " + file + " -o " + path("o"));
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("fp32/b2/q6/k7/h4x2/d8x3/full/bhsd"), std::string::npos) << o.out;
  EXPECT_EQ(stored(path("o"), "out").shape, (std::vector<int64_t>{2, 4, 6, 3}));
  expect_usage_error("run --layout hbsd -i " + file, "layout 'hbsd'");
}

TEST_F(Cli, RunRefusesBadFiles) {
  expect_usage_error("run -i /nonexistent", "/nonexistent: no such file");
  expect_usage_error("run -i " + folder_.string(), "not a regular file");
  std::ofstream(path("junk")) << "this is not a safetensors file, but long enough for one";
  expect_usage_error("run -i " + path("junk"), "not a valid safetensors file");
  std::ofstream(path("empty")).close();
  expect_usage_error("run -i " + path("empty"), "has 0 bytes");

  store(path("lacking"), {});
  expect_usage_error("run -i " + path("lacking"), "holds no tensor 'q'");
  expect_usage_error("run -i " + input("ints", "I64", {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}),
                     "'q' is I64");
  expect_usage_error("run -i " + input("flat", "F16", {1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}),
                     "must have 4 dimensions");
  expect_usage_error("run -i " + input("dims", "F16", {1, 2, 2, 8}, {1, 2, 2, 9}, {1, 2, 2, 8}),
                     "head_dim");
}

// The start of a file of q, k and v, with so many rows of 512 bytes each.
std::string header(int64_t rows) {
  std::string text = "{";
  for (int64_t i = 0; i < 3; ++i)
    text += std::string(i > 0 ? "," : "") + "\"" + "qkv"[i] + R"(":{"dtype":"F32","shape":[1,)" +
            std::to_string(rows) + R"(,1,128],"data_offsets":[)" + std::to_string(i * rows * 512) +
            "," + std::to_string((i + 1) * rows * 512) + "]}";
  text += "}";
  std::string start(8, '\0');
  start[0] = static_cast<char>(text.size() & 0xFF), start[1] = static_cast<char>(text.size() >> 8);
  return start + text;
}

// Files that tell of more than they hold, and that hold more than there is memory.
TEST_F(Cli, RunRefusesWhatDoesNotFit) {
  constexpr int64_t kRows = 10'000'000'000;  // 5.12 TB a tensor
  std::ofstream(path("large")) << header(kRows);
  expect_usage_error("run -i " + path("large"), "but the file holds 0 bytes of data");
  fs::resize_file(path("large"), header(kRows).size() + 3 * kRows * 512);
  expect_usage_error("run -i " + path("large"),
                     "its tensors take 15360.0 GB, and this machine has");
  fs::resize_file(path("large"), uint64_t{30} << 30);
  expect_usage_error("run -i " + path("large"), "bytes of data");
}

TEST_F(Cli, RunSaysThatThereIsNotEnoughMemory) {
  const std::string start = header(1'000'000);  // 512 MB a tensor
  std::ofstream(path("large")) << start;
  fs::resize_file(path("large"), start.size() + 3 * 512'000'000);
  const Outcome o = flash3("run -i " + path("large"), "ulimit -v 300000; ");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_EQ(o.err.find("flash3: there is not enough memory; this machine has "), 0u) << o.err;
}

TEST_F(Cli, RunOnPackedSequences) {
  const std::string file = input("packed", "BF16", {12, 4, 8}, {14, 2, 8}, {14, 2, 8});
  const Outcome o = flash3(
      "run --backend cpu --check --causal --softcap 20 --chunk 4 --cu-seqlens 0,5,5,11 "
      "--cu-seqlens-k 0,2,4,14 -i " +
      file + " -o " + path("o"));
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("bf16/b3/q6/k10/h4x2/d8/causal/packed/softcap20/chunk4"), std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("3 sequences: 11 queries, at most 6; 14 keys, at most 10"),
            std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("passed"), std::string::npos) << o.out;
  EXPECT_EQ(stored(path("o"), "out").shape, (std::vector<int64_t>{12, 4, 8}));
  EXPECT_EQ(stored(path("o"), "lse").shape, (std::vector<int64_t>{4, 12}));
}

TEST_F(Cli, RunRefusesBadSequences) {
  const std::string file = input("packed", "F32", {12, 4, 8}, {12, 2, 8}, {12, 2, 8});
  const auto refused = [&](const std::string& options, const std::string& message) {
    expect_usage_error("run --backend cpu -i " + file + " " + options, message);
  };
  refused("", "'q' has shape [12, 4, 8]; it must have 4 dimensions");
  refused("--cu-seqlens 0,5,,12", "--cu-seqlens 0,5,,12: it must be numbers with commas");
  refused("--cu-seqlens 0,5,12,", "it must be numbers with commas");
  refused("--cu-seqlens 0,99999999999", "it must be numbers with commas");
  refused("--cu-seqlens 12", "it must have one number more than there are sequences");
  refused("--cu-seqlens lengths", "holds no tensor 'lengths'");
  refused("--cu-seqlens q", "tensor 'q' is F32 [12, 4, 8]; --cu-seqlens takes I32 of 1 dimension");
  refused("--cu-seqlens 0,5,13", "cu_seqlens_q[2] = 13 but it must be from 0 to 12");
  refused("--cu-seqlens 0,5,12 --cu-seqlens-k 0,7,5", "cu_seqlens_k must not decrease");
  refused("--cu-seqlens 0,5,12 --cu-seqlens-k 0,12", "must have the same batch size");
  refused("--cu-seqlens-k 0,5", "--cu-seqlens-k requires --cu-seqlens");
  refused("--cu-seqlens 0,5,12 --sink q", "'q' has shape [12, 4, 8]; it must have 1 dimension\n");
  refused("--cu-seqlens 0,5,12 --softcap -3",
          "softcap = -3 but it must be 0 (none) or from 1e-18 to 1e+18");
  refused("--cu-seqlens 0,5,12 --chunk -1", "chunk = -1 but it must be at least 0");
}

TEST_F(Cli, RunInFp8) {
  const std::string data = FLASH3_DATA_DIR "/minilm_layer5.safetensors";
  for (const char* how : {"--dtype e4m3", "--compute fp8"}) {
    const Outcome o = flash3("run --backend cpu --check --json -i " + data + " " + how);
    ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
    const json r = json::parse(o.out);
    EXPECT_EQ(r["case"], "bf16/b1/q512/k512/h12/d32/full/fp8");
    EXPECT_EQ(r["kernel"].get<std::string>().substr(0, 13), "cpu_fwd_e4m3_");
    EXPECT_GT(r["check"]["out"]["error"].get<double>(), 1e-2);  // so it was FP8
    EXPECT_EQ(r.contains("quantize_ms"), std::string(how) == "--dtype e4m3");
    EXPECT_EQ(r["workspace_bytes"].get<double>() > 0, std::string(how) == "--compute fp8");
  }
  const std::string packed = input("packed", "BF16", {12, 4, 8}, {14, 2, 8}, {14, 2, 8});
  const Outcome o = flash3(
      "run --backend cpu --check --causal --cu-seqlens 0,5,5,11 --cu-seqlens-k "
      "0,2,4,14 --dtype e4m3 -i " +
      packed);
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("ms before it to bring q, k and v to FP8"), std::string::npos) << o.out;
  expect_usage_error("run --dtype int8 -i " + data, "--dtype");
  expect_usage_error("run --dtype e4m3 --compute fp8 -i " + data, "--dtype excludes --compute");
}

TEST_F(Cli, ExplainFp8) {
  Outcome o = flash3("explain --backend cpu e4m3/b3/q64/k64/h4x2/d64/causal/packed/blockscales");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("problem: float8_e4m3 to bfloat16, batch 3"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("k_scale by blocks"), std::string::npos) << o.out;
  o = flash3("explain --backend cpu bf16/b1/q64/k64/h4x2/d64/causal/fp8");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("computed in float8_e4m3"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("first kernel: cpu_quantize_bf16"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("\nkernel: cpu_fwd_e4m3_"), std::string::npos) << o.out;
  o = flash3("explain --backend cpu bf16/b1/q300/k64/h4x2/d64/full/quantize/blockscales/rotate");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("problem: bfloat16 to float8_e4m3, batch 1, q of seq 300"),
            std::string::npos)
      << o.out;
}

TEST_F(Cli, VerifyFp8) {
  Outcome o = flash3("verify --backend cpu --quantize --filter /q200/ --filter bf16");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find(" 0 failed"), std::string::npos) << o.out;
  o = flash3("verify --backend cpu --filter e4m3 --filter /d33/ --filter causal");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("ok    e4m3/"), std::string::npos) << o.out;
  o = flash3("verify --backend cpu --accuracy --input " FLASH3_DATA_DIR
             "/minilm_layer5.safetensors");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("ok    minilm_layer5.safetensors"), std::string::npos) << o.out;
  o = flash3("verify --backend cpu --accuracy --length 4100 --filter /d64/full --filter bf16");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("ok    bf16/b1/q4100/k4100/h2/d64/full/outliers"), std::string::npos)
      << o.out;
  expect_usage_error("verify --length 100", "--length requires --accuracy");
  expect_usage_error("verify --quantize --ragged", "--ragged excludes --quantize");
}

TEST_F(Cli, RunOnAnEmptySequence) {
  const std::string file = input("no_keys", "BF16", {1, 3, 2, 8}, {1, 0, 2, 8}, {1, 0, 2, 8});
  const Outcome o = flash3("run --backend cpu --check -i " + file + " -o " + path("o"));
  ASSERT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_EQ(stored(path("o"), "out").data, std::vector<std::byte>(2 * 3 * 2 * 8));  // zeros
}

}  // namespace
}  // namespace flash3::cli
