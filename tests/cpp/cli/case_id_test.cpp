// SPDX-License-Identifier: Apache-2.0
// Ids of cases: what they name, what errors say of them, and the text that messages quote.
#include <gtest/gtest.h>

#include <set>

#include "../parsed.hpp"
#include "cases/mask.hpp"
#include "cases/table.hpp"
#include "cases/tensors.hpp"
#include "cases/text.hpp"

namespace flash3::cases {
namespace {

std::string error_of(const std::string& id) {
  std::string error;
  EXPECT_FALSE(parse_id(id, &error).has_value()) << id;
  return error;
}

TEST(CaseId, NamesEveryField) {
  const Case c =
      parsed("fp16/b2/q129/k1000/h4x2/d192x128/causal+w64:/odd/outliers/nolse/scale0.5/seed9");
  EXPECT_EQ(c.dtype, FLASH3_FLOAT16);
  EXPECT_EQ(c.batch, 2);
  EXPECT_EQ(c.seq_q, 129);
  EXPECT_EQ(c.seq_k, 1000);
  EXPECT_EQ(c.heads_q, 4);
  EXPECT_EQ(c.heads_k, 2);
  EXPECT_EQ(c.head_dim, 192);
  EXPECT_EQ(c.head_dim_v, 128);
  EXPECT_TRUE(c.causal);
  EXPECT_TRUE(c.window);
  EXPECT_EQ(c.window_left, 64);
  EXPECT_LT(c.window_right, 0);
  EXPECT_EQ(c.layout, Layout::kOdd);
  EXPECT_EQ(c.distribution, Distribution::kOutliers);
  EXPECT_FALSE(c.want_lse);
  EXPECT_EQ(c.softmax_scale, 0.5f);
  EXPECT_EQ(c.seed, 9u);
}

TEST(CaseId, ShortFormsAndLongDtypes) {
  EXPECT_EQ(to_id(parsed("bfloat16/b1/q1/k2/h3x3/d64x64/full/bshd/normal/seed1")),
            "bf16/b1/q1/k2/h3/d64/full");
  EXPECT_EQ(to_id(parsed("fp32/b0/q0/k0/h1/d1/w0:0")), "fp32/b0/q0/k0/h1/d1/w0:0");
  EXPECT_EQ(to_id(parsed("bf16/b1/q1/k1/h1/d1/w:7")), "bf16/b1/q1/k1/h1/d1/w:7");
}

TEST(CaseId, BackwardOptions) {
  const std::string forward = "bf16/b1/q1/k1/h1/d8/full";
  EXPECT_FALSE(parsed(forward).backward);
  EXPECT_TRUE(parsed(forward + "/bwd").backward);
  EXPECT_FALSE(parsed(forward + "/bwd").want_dlse);
  const Case c = parsed(forward + "/dlse");
  EXPECT_TRUE(c.backward && c.want_dlse && !c.deterministic);
  EXPECT_EQ(to_id(c), forward + "/bwd/dlse");
  EXPECT_EQ(to_id(parsed(forward + "/deterministic")), forward + "/bwd/deterministic");
  EXPECT_EQ(to_id(parsed(forward + "/deterministic/dlse/seed3")),
            forward + "/seed3/bwd/dlse/deterministic");
  EXPECT_NE(error_of(forward + "/backward").find("bwd, dlse, deterministic"), std::string::npos);
}

TEST(CaseId, OptionsOfScoresAndRaggedBatches) {
  const std::string dense = "bf16/b9/q300/k300/h1/d8/full";
  const Case none = parsed(dense);
  EXPECT_TRUE(!none.is_ragged() && none.sink == Sink::kNone && none.softcap == 0 &&
              none.chunk == 0);
  const Case c = parsed(dense + "/sink16/softcap30/chunk64");
  EXPECT_EQ(c.sink, Sink::k16);
  EXPECT_EQ(c.softcap, 30.f);
  EXPECT_EQ(c.chunk, 64);
  EXPECT_EQ(parsed(dense + "/sink").sink, Sink::kFloat32);

  const Case ragged = parsed(dense + "/giant/packedq/usedk/nomax");
  EXPECT_EQ(ragged.lengths, Lengths::kGiant);
  EXPECT_TRUE(ragged.packed_q && !ragged.packed_k && !ragged.used_q && ragged.used_k);
  EXPECT_FALSE(ragged.max_known);
  EXPECT_EQ(to_id(parsed(dense + "/random")), dense + "/random/packed");  // the plainest way
  EXPECT_EQ(to_id(parsed(dense + "/random/used")), dense + "/random/used");
  EXPECT_EQ(to_id(parsed(dense + "/packedk/packedq")), dense + "/packed");
  EXPECT_NE(error_of(dense + "/packedv").find("an option"), std::string::npos);
  EXPECT_NE(error_of(dense + "/chunk").find("an option"), std::string::npos);
}

TEST(CaseId, OptionsOfFp8) {
  const std::string fp8 = "e4m3/b2/q300/k300/h4x2/d64/causal";
  EXPECT_EQ(parsed(fp8).dtype, FLASH3_FLOAT8_E4M3);
  EXPECT_EQ(parsed(fp8).dtype_of_out(), FLASH3_BFLOAT16);
  EXPECT_EQ(parsed("fp16/b1/q1/k1/h1/d8/full/fp8").dtype_of_out(), FLASH3_FLOAT16);
  EXPECT_EQ(parsed(fp8 + "/outfp32").dtype_of_out(), FLASH3_FLOAT32);
  EXPECT_EQ(parsed(fp8 + "/onescale").scales, Scales::kTensor);
  EXPECT_EQ(parsed(fp8 + "/headscales").scales, Scales::kHead);
  for (const std::string sums : {"/sums1", "/sums2"}) {
    EXPECT_EQ(parsed(fp8 + sums).sums, sums.back() - '0');
    EXPECT_EQ(to_id(parsed(fp8 + sums)), fp8 + sums);
  }
  EXPECT_NE(error_of(fp8 + "/sums3").find("an option"), std::string::npos);
  const Case q = parsed("bf16/b1/q9/k9/h1/d8/full/rotary2/quantize/blockscales/rotate");
  EXPECT_TRUE(q.quantize && q.rotate && q.scales == Scales::kBlock);
  EXPECT_EQ(q.rotary, Rotary::kInterleaved);
  EXPECT_EQ(to_id(q), "bf16/b1/q9/k9/h1/d8/full/blockscales/quantize/rotate/rotary2");
  EXPECT_NE(error_of(fp8 + "/outbf17").find("an option"), std::string::npos);
  // 1-byte inputs, 2-byte out and lse.
  EXPECT_EQ(tensor_bytes(parsed("e4m3/b1/q2/k3/h1/d8/full/nolse")), 2 * 8 + 3 * 16 + 2 * 8 * 2);
}

TEST(CaseId, AddedTensorsAreNamedByTheirShape) {
  const std::string dense = "bf16/b2/q9/k17/h4x2/d24/causal";
  for (const std::string shape : {"heads", "rows"}) {
    const std::string id = dense + "/softcap20/max_logits=" + shape;
    const Case c = parsed(id);
    EXPECT_EQ(to_id(c), id);
    const ForwardTensors t = make_forward_tensors(c);
    const flash3_tensor& view = t.extra.added[0].view;
    EXPECT_EQ(view.dtype, FLASH3_FLOAT32);
    EXPECT_EQ(view.ndim, shape == "rows" ? 3 : 1);
    EXPECT_EQ(view.shape[view.ndim - 1], shape == "rows" ? 9 : 4);
    const flash3_forward_params question = make_question(c);
    EXPECT_EQ(question.max_logits.ndim, view.ndim);
  }
  EXPECT_EQ(make_forward_tensors(parsed(dense)).extra.added[0].view.ndim, 0);
  for (const char* bad :
       {"max_logits", "max_logits=", "max_logits=1", "max_logits=tokens", "=rows"})
    EXPECT_NE(error_of(dense + "/" + bad).find("an option"), std::string::npos) << bad;
}

TEST(CaseId, MasksAreNamedByTheirSource) {
  const std::string head = "bf16/b2/q9/k9/h4x2/d8/causal/mask:";
  const Case c = parsed(head + "blocks64x128.b.h");
  EXPECT_TRUE(c.mask.source == CaseMaskSource::kBlocks && c.mask.of_batch && c.mask.of_heads);
  EXPECT_TRUE(c.mask.block_rows == 64 && c.mask.block_keys == 128 && c.causal);
  EXPECT_EQ(parsed(head + "ranges3").mask.ranges, 3);
  for (const char* usual : {"causal", "prefix30", "sinks4x200", "lognormal2", "share25of64x128.b",
                            "share50of8x8.b.h", "coins.h"})
    EXPECT_EQ(to_text(parsed(head + usual).mask), usual);
  for (const char* wrong : {"",          "tree",        "ranges",        "blocks64",
                            "band.b",    "documents.h", "dense3",        "dense.b.b",
                            "dense.x",   "bits8",       "bitblocks.h.h", "causal.h",
                            "causal3",   "prefix",      "sinks4",        "sinks4x",
                            "lognormal", "share25",     "share25of64",   "share64x64",
                            "coins2",    "prefix9.b"})
    EXPECT_NE(error_of(head + wrong).find("an option"), std::string::npos) << wrong;
}

TEST(CaseId, ErrorsSayWhatWasExpected) {
  EXPECT_EQ(error_of("bf17/b1/q1/k1/h1/d1/full"),
            "case 'bf17/b1/q1/k1/h1/d1/full': expected the dtype (fp16, bf16, fp32 or e4m3), found "
            "'bf17'");
  EXPECT_NE(error_of("bf16/b1/q1").find("the key length (k1000), found its end"),
            std::string::npos);
  EXPECT_NE(error_of("bf16/b-1/q1/k1/h1/d1/full").find("the batch"), std::string::npos);
  EXPECT_NE(error_of("bf16/b1/q1/k1/h1x/d1/full").find("the heads"), std::string::npos);
  EXPECT_NE(error_of("bf16/b1/q1/k1/h1/d1/w5").find("the mask"), std::string::npos);
  EXPECT_NE(error_of("bf16/b1/q1/k1/h1/d1/causal+").find("the mask"), std::string::npos);
  EXPECT_NE(error_of("bf16/b1/q1/k1/h1/d1/full/").find("an option"), std::string::npos);
  EXPECT_NE(error_of("bf16/b99999999999999999999/q1/k1/h1/d1/full").find("the batch"),
            std::string::npos);
  EXPECT_FALSE(parse_id("", nullptr).has_value());
}

TEST(CaseId, EveryCaseOfTheTableReadsBack) {
  for (const Level level : {Level::kQuick, Level::kFull}) {
    std::set<std::string> ids;
    for (const Case& c : case_table(level, dtypes_of(FLASH3_BACKEND_CPU))) {
      EXPECT_TRUE(parsed(to_id(c)) == c) << to_id(c);
      EXPECT_TRUE(ids.insert(to_id(c)).second) << to_id(c) << " is there twice";
    }
  }
}

TEST(Printable, LeavesText) {
  for (const char* text : {"", "plain 'text' \\ ~", "größe …", "漢字 🙂", "\u00a0"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EscapesControlCharacters) {
  EXPECT_EQ(printable("a\x1b[31mb\r\n\t\x7f"), R"(a\x1b[31mb\x0d\x0a\x09\x7f)");
  EXPECT_EQ(printable("a\nb\x1b", "\n"), "a\nb\\x1b");
  EXPECT_EQ(printable(std::string("\0x", 2)), R"(\x00x)");
  EXPECT_EQ(printable("\u0080\u009b\u009f"), R"(\xc2\x80\xc2\x9b\xc2\x9f)") << "C1";
}

TEST(Printable, EscapesWhatIsNoUtf8) {
  EXPECT_EQ(printable("\x9b"
                      "1m"),
            R"(\x9b1m)");
  EXPECT_EQ(printable("\xc3"), R"(\xc3)") << "cut off";
  EXPECT_EQ(printable("\xe2\x80x"), R"(\xe2\x80x)");
  EXPECT_EQ(printable("\xc0\x9b"), R"(\xc0\x9b)") << "longer than it must be";
  EXPECT_EQ(printable("\xe0\x82\x9b"), R"(\xe0\x82\x9b)");
  EXPECT_EQ(printable("\xed\xa0\x80"), R"(\xed\xa0\x80)") << "a surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), R"(\xf4\x90\x80\x80)") << "past U+10FFFF";
  EXPECT_EQ(printable("\xff\xfe"), R"(\xff\xfe)");
}

TEST(Printable, QuotesCutCharactersWhole) {
  EXPECT_EQ(in_quotes("abc"), "'abc'");
  EXPECT_EQ(in_quotes("abcdef", 4), "'abcd…'");
  EXPECT_EQ(in_quotes("abcé", 4), "'abc…'");
}

}  // namespace
}  // namespace flash3::cases
