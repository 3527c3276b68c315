// SPDX-License-Identifier: Apache-2.0
// The program as a user meets it: exit codes, messages, files.
#include "flash3/limits.h"
#include "program.hpp"

namespace flash3::cli {
namespace {

TEST_F(Cli, HelpAndVersion) {
  EXPECT_EQ(flash3("--help").exit_code, 0);
  EXPECT_NE(flash3("--help").out.find("verify"), std::string::npos);
  EXPECT_EQ(flash3("bench --help").exit_code, 0);
  EXPECT_EQ(flash3("--version").exit_code, 0);
  EXPECT_EQ(flash3("--version").out.find("0."), 0u);
}

TEST_F(Cli, BadArguments) {
  expect_usage_error("", "subcommand is required");
  expect_usage_error("frobnicate", "there is no command 'frobnicate'; did you mean");
  expect_usage_error("info --frobnicate", "frobnicate");
  expect_usage_error("run", "--input is required");
  expect_usage_error("explain", "required");
  expect_usage_error("explain nonsense", "expected the dtype");
  expect_usage_error("explain bf16/b1/q1/k1/h3x2/d64/full",
                     "heads_q must be a multiple of heads_k");
  expect_usage_error("explain bf16/b9223372036854775807/q1/k1/h1/d64/full",
                     "the batch = 9223372036854775807, and 2147483647 is the most");
  expect_usage_error("explain bf16/b2147483647/q2147483647/k1/h2/d64/full", "elements, and");
  expect_usage_error("explain bf16/b2147483647/q1/k1/h1/d64/full/used",
                     "it has 2147483647 sequences, and of a ragged batch 16777216 is the most");
  expect_usage_error("explain bf16/b1000/q3000000/k1/h1/d64/full/packed",
                     "1000 sequences of up to 3000000 tokens take more than 2147483647 packed");
  expect_usage_error("verify --level huge", "level 'huge' is not one of quick, full");
  expect_usage_error("verify --backend abacus", "backend 'abacus' is not one of");
  expect_usage_error("verify --filter no-such-case", "no case matches");
  expect_usage_error("verify --jobs -1", "jobs");
  expect_usage_error("bench --suite marathon", "suite 'marathon'");
  expect_usage_error("bench --suite marathon",
                     "is not one of quick, forward, backward, window, ragged, fp8, masks, decode");
  expect_usage_error("bench --samples 0", "samples");
  expect_usage_error("bench --dtype bf17", "dtype 'bf17' is not one of fp16, bf16, fp32");
  expect_usage_error("bench --dtype fp16 --case bf16/b1/q1/k1/h1/d8/full", "--case names its own");
  expect_usage_error("bench --ceiling --backend cpu", "--ceiling needs a Hopper GPU");
  expect_usage_error("bench --dtype e4m3", "--dtype e4m3 is for --ceiling; --suite fp8 has");
  expect_usage_error("bench --suite fp8 --dtype e4m3", "--dtype e4m3 is for --ceiling alone");
  expect_usage_error("bench --ceiling --ceiling-dim 96", "96");
  expect_usage_error("bench --ceiling-dim 64", "requires --ceiling");
  expect_usage_error("bench --ablation --backend cpu", "--ablation needs a Hopper GPU");
  expect_usage_error("bench --ablation --backend abacus", "backend 'abacus' is not one of");
  expect_usage_error("bench --ablation --dtype bf16",
                     "--dtype bf16 but --ablation is for fp16 and e4m3");
  for (const char* other :
       {"--suite quick", "--case bf16/b1/q1/k1/h1/d8/full", "--filter /d64/", "--ceiling",
        "--sustained 1", "--naive", "--backward", "--deterministic", "--threads 1", "--csv r.csv"})
    expect_usage_error(std::string("bench --ablation ") + other, "excludes --ablation");
  expect_usage_error("bench --deterministic --case bf16/b1/q1/k1/h1/d8/full",
                     "--deterministic is for backward cases, and bf16/b1/q1/k1/h1/d8/full is a "
                     "forward one: add --backward");
  expect_usage_error("trace", "required");
  expect_usage_error("trace nonsense", "expected the dtype");
  expect_usage_error("trace bf16/b1/q1/k1/h1/d128/full --block -1", "block");
  expect_usage_error("trace bf16/b1/q1/k1/h1/d128/full/bwd",
                     "is a backward call but trace is for forward calls");
  expect_usage_error("verify --backward --accuracy", "excludes");
  expect_usage_error("verify --accuracy --case bf16/b1/q1/k1/h1/d8/full/bwd", "a backward case");
  expect_usage_error("explain --backward bf16/b1/q1/k1/h1/d8/full/nolse",
                     "lse is all zero; the backward needs the lse");
  for (const char* backward : {"--backward --case bf16/b1/q1/k9/h1/d8/full/paged4",
                               "--case bf16/b1/q1/k9/h1/d8/full/append1/bwd"})
    expect_usage_error(std::string("bench --backend cpu ") + backward,
                       "is a call on a KV cache, which has no backward");
  expect_usage_error(
      "explain bf16/b1/q1/k2147483640/h1/d8/full/append9/packednew",
      "sequences of up to 2147483649 keys may take more than 2147483647 rows of a cache");
  expect_usage_error("explain bf16/b100/q1/k1/h1/d8/full/append99999999/packednew",
                     "100 sequences of up to 99999999 appended keys take more than 2147483647");
  expect_usage_error("explain bf16/b1/q1/k1/h1/d8/full/paged2147483648",
                     "the page size = 2147483648, and 2147483647 is the most");
  expect_usage_error("bench --sustained 0", "sustained");
  expect_usage_error("bench --backend cpu --sustained 1 --naive", "do not go together");
  expect_usage_error("bench --case bf16/b1/q1/k1/h1/d999/full", "head_dim");
}

TEST_F(Cli, InfoNamesTheCpuBackendAndItsKernels) {
  const Outcome text = flash3("info");
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("backends"), std::string::npos);
  const Outcome o = flash3("info --json");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json info = json::parse(o.out);
  EXPECT_TRUE(info["flash3"].is_string());
  bool cpu = false;
  for (const json& backend : info["backends"]) {
    EXPECT_TRUE(backend["available"] == true || !backend["reason"].get<std::string>().empty());
    if (backend["name"] != "cpu") continue;
    cpu = true;
    EXPECT_EQ(backend["available"], true);
    EXPECT_NE(backend["kernels"].dump().find("cpu_fwd_"), std::string::npos) << backend;
    EXPECT_NE(backend["kernels"].dump().find("cpu_bwd_"), std::string::npos) << backend;
    int32_t most = 0, most_v = 0;
    flash3_backend_head_dims(FLASH3_BACKEND_CPU, FLASH3_HEAD_DIMS_OF_FORWARD, &most, &most_v);
    const std::string pair = std::to_string(most) + "x" + std::to_string(most_v);
    EXPECT_NE(backend["kernels"].dump().find(", " + pair + "\""), std::string::npos) << backend;
  }
  EXPECT_TRUE(cpu);
}

TEST_F(Cli, ExplainTellsTheKernel) {
  const std::string ids = "bf16/b1/q64/k64/h2/d64/full fp32/b1/q64/k64/h2/d64/causal";
  const Outcome text = flash3("explain --backend cpu " + ids);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("kernel: "), std::string::npos);
  const Outcome o = flash3("explain --backend cpu --json " + ids);
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json all = json::parse(o.out);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1]["case"], "fp32/b1/q64/k64/h2/d64/causal");
  EXPECT_EQ(all[1]["backend"], "cpu");
  EXPECT_FALSE(all[1]["kernel"].get<std::string>().empty());
  const Outcome backward =
      flash3("explain --backend cpu --backward bf16/b1/q64/k64/h2/d64/full/dlse");
  EXPECT_EQ(backward.exit_code, 0) << backward.err;
  EXPECT_NE(backward.out.find("case: bf16/b1/q64/k64/h2/d64/full/bwd/dlse\n"), std::string::npos);
  EXPECT_NE(backward.out.find("problem: backward, bfloat16"), std::string::npos) << backward.out;
  EXPECT_NE(backward.out.find(", with dlse\n"), std::string::npos) << backward.out;
}

TEST_F(Cli, ExplainTellsWhatAMaskHolds) {
  const std::string id = "bf16/b2/q300/k300/h4x2/d64/causal/mask:share50of128x128.b.h";
  const Outcome o = flash3("explain --backend cpu bf16/b1/q512/k512/h2/d64/full/mask:causal " + id);
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("mask: query i sees what its mask lists"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("mask blocks: 10 of 16 are listed: 6 full, 0 by quarters, 4 by ranges, 0 by "
                       "bits; 50.10 % of all pairs are seen\n"),
            std::string::npos)
      << o.out;
  const Outcome backward = flash3("explain --backend cpu --backward --json " + id);
  ASSERT_EQ(backward.exit_code, 0) << backward.err;
  const std::string blocks = json::parse(backward.out)[0]["mask blocks"];
  EXPECT_NE(blocks.find(" of 72 are listed: "), std::string::npos) << blocks;
  EXPECT_EQ(flash3("explain --backend cpu bf16/b1/q64/k64/h2/d64/full").out.find("mask blocks"),
            std::string::npos);
}

// Nothing is allocated for a mask that the library does not make.
TEST_F(Cli, MasksThatAreNoneAreRefused) {
  const std::string head = "explain --backend cpu bf16/b1/q92/k92/h1/d8/full/mask:";
  expect_usage_error(head + "blocks0x0", "block_rows = 0 but it must be a positive multiple of 8");
  expect_usage_error(head + "blocks8x9223372036854775807",
                     "block_keys = 2147483647 but it must be a positive multiple of 8");
  expect_usage_error(head + "share50of12x8", "block_rows = 12 but it must be a positive multiple");
  expect_usage_error(head + "ranges0", "ranges.shape[2] = 0 but it must be 2 * n");
  expect_usage_error(head + "ranges99999999999", "but it must be 2 * n, with n from 1 to 8");
  expect_usage_error("explain --backend cpu bf16/b1/q2147483647/k2147483647/h1/d8/full/mask:band",
                     "max_blocks = 0 but the mask can have more than 2147483647 blocks");
}

// Answered from the sizes: tensors of this one would take terabytes.
TEST_F(Cli, ExplainMakesNoTensorsOfACache) {
  const Outcome o = flash3(
      "explain --backend cpu bf16/b64/q1/k16777216/h32x8/d128/causal/append4/rotary/paged16");
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("kernel: "), std::string::npos) << o.out;
}

TEST_F(Cli, VerifyPasses) {
  const Outcome o =
      flash3("verify --backend cpu --filter /q65/ --filter /causal/ --repeat 2 --jobs 2");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find(" passed, 0 failed\n"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("ok    bf16/b1/q65/k65/h2x1/d64/causal"), std::string::npos) << o.out;
}

TEST_F(Cli, VerifyBackwardPasses) {
  const Outcome o =
      flash3("verify --backward --backend cpu --filter /q65/ --filter /causal/ --repeat 2");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find(" passed, 0 failed\n"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("ok    bf16/b1/q65/k65/h2x1/d64/causal/bwd"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find(" dv "), std::string::npos) << o.out;

  const Outcome one =
      flash3("verify --backward --backend cpu --case fp32/b1/q9/k9/h2/d8/full/dlse");
  EXPECT_EQ(one.exit_code, 0) << one.out << one.err;
  EXPECT_NE(one.out.find("ok    fp32/b1/q9/k9/h2/d8/full/bwd/dlse"), std::string::npos) << one.out;
}

TEST_F(Cli, VerifyDecodeRunsCallsOnACache) {
  const Outcome o = flash3("verify --decode --backend cpu --filter paged16 --filter append");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("/paged16/"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find(" passed, 0 failed\n"), std::string::npos) << o.out;
  EXPECT_EQ(flash3("verify --decode --quantize --backend cpu").exit_code, 2);
}

TEST_F(Cli, VerifyRandomRunsWhatItsSeedNames) {
  const std::string draws = "verify --backend cpu --random 60 --seed 5 --count 12 --quantize ";
  const Outcome o = flash3(draws + "--jobs 2");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("seed 5: 0 forward, 0 backward, 12 quantize in "), std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("12 passed, 0 failed\n"), std::string::npos) << o.out;
  std::istringstream ids(flash3(draws + "--list").out);
  int listed = 0;
  for (std::string id; std::getline(ids, id); ++listed)
    EXPECT_NE(o.out.find("ok    " + id + "\n"), std::string::npos) << id << "\n" << o.out;
  EXPECT_EQ(listed, 12);

  expect_usage_error("verify --seed 5", "--random");
  expect_usage_error("verify --count 5", "--random");
  expect_usage_error("verify --random 0", "range");
  expect_usage_error("verify --random 1 --accuracy", "excludes");
  expect_usage_error("verify --backend cpu --random 1 --list", "needs --count");
}

TEST_F(Cli, VerifyListsWithoutRunning) {
  const Outcome o = flash3("verify --backend cpu --list --level full --filter /q4097/k4097/");
  EXPECT_EQ(o.exit_code, 0);
  EXPECT_NE(o.out.find("bf16/b1/q4097/k4097/h2x1/d64/full\n"), std::string::npos);
  EXPECT_EQ(o.out.find("passed"), std::string::npos);
}

TEST_F(Cli, VerifyFailsLoudly) {
  const Outcome o = flash3(
      "verify --backend cpu -q --case bf16/b1/q4/k4/h3x2/d8/full --case bf16/b1/q4/k4/h2/d8/full");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.out.find("FAIL  bf16/b1/q4/k4/h3x2/d8/full"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("1 passed, 1 failed\n"), std::string::npos) << o.out;
}

TEST_F(Cli, VerifyAccuracyPrintsATable) {
  const Outcome o = flash3("verify --accuracy --backend cpu --filter /d64/ --repeat 2");
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("naive RMSE"), std::string::npos) << o.out;
  const size_t fp16 = o.out.find("\nok    fp16/b1/q1024/k1024/h2/d64/full/outliers ");
  const size_t bf16 = o.out.find("\nok    bf16/b1/q1024/k1024/h2/d64/full/outliers ");
  EXPECT_NE(bf16, std::string::npos) << o.out;
  EXPECT_LT(fp16, bf16) << o.out;
  EXPECT_NE(o.out.find("8 passed, 0 failed\n"), std::string::npos) << o.out;
}

// Rows of 16 bits up to 4096 tokens, of FP8 at any length.
TEST_F(Cli, VerifyAccuracyTakesSeveralLengths) {
  const std::string one = " --filter bf16 --filter /d64/ --filter causal";
  const Outcome o = flash3("verify --accuracy --backend cpu --length 256,4100" + one);
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
  const auto count = [&](const std::string& id) {
    size_t found = 0;
    for (size_t at = 0; (at = o.out.find("\nok    " + id, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  EXPECT_EQ(count("bf16/b1/q256/k256/h2/d64/causal/outliers "), 2u) << o.out;
  EXPECT_EQ(count("bf16/b1/q4100/k4100/h2/d64/causal/outliers "), 1u) << o.out;
  EXPECT_NE(o.out.find("3 passed, 0 failed\n"), std::string::npos) << o.out;

  const Outcome listed = flash3("verify --accuracy --backend cpu --length 4100 --list" + one);
  EXPECT_EQ(listed.out, "bf16/b1/q4100/k4100/h2/d64/causal/outliers\n");
  expect_usage_error("verify --length 64", "--accuracy");
  expect_usage_error("verify --accuracy --length 64,0", "range");
  expect_usage_error("verify --accuracy --length 64 --input x.safetensors", "excludes");
  expect_usage_error("verify --accuracy --length 64 --case bf16/b1/q8/k8/h1/d8/full/outliers",
                     "excludes");
}

// One key: the plain implementation is exact, which no ratio can be taken of.
TEST_F(Cli, VerifyAccuracyFailsLoudly) {
  const Outcome o = flash3(
      "verify --accuracy --backend cpu -q --case fp16/b1/q1/k1/h1/d8/full/outliers"
      " --case fp16/b1/q256/k256/h1/d64/full/outliers");
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.out.find("FAIL  fp16/b1/q1/k1/h1/d8/full/outliers"), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("ok  "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("3 passed, 1 failed\n"), std::string::npos) << o.out;
}

TEST_F(Cli, VerifyAccuracyRefusesWhatItCannotJudge) {
  expect_usage_error("verify --accuracy --level huge", "level 'huge' is not one of quick, full");
  expect_usage_error("verify --accuracy --filter fp32", "no case matches");
  expect_usage_error("verify --accuracy=0.5", "accuracy");
  expect_usage_error("verify --accuracy --case fp32/b1/q8/k8/h1/d8/full/outliers",
                     "case 'fp32/b1/q8/k8/h1/d8/full/outliers': dtype = fp32");
  expect_usage_error("verify --accuracy --case bf16/b1/q8/k8/h1/d8/full", "data = normal");
  expect_usage_error("verify --accuracy --case bf16/b1/q8/k8/h1/d8/full/special", "data = special");
  expect_usage_error("verify --accuracy --case bf16/outliers", "expected the batch");
}

}  // namespace
}  // namespace flash3::cli
