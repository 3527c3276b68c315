// SPDX-License-Identifier: Apache-2.0
// Which of racecheck's reports count, on texts as it prints them.
#include <gtest/gtest.h>

#include "cli/record_parts.hpp"

namespace flash3::cli {
namespace {

constexpr const char* kRead =
    "Read Thread (383,0,0) at "
    "flash3::cuda::sm90::OperandsFp8<flash3::cuda::sm90::Fp8Traits<X>>::v_scale("
    "const flash3::cuda::sm90::PipelineState<(int)2> &) const+0x2590 in kernel_fp8.cuh:218";
constexpr const char* kWrite =
    "Write Thread (0,0,0) at flash3::cuda::copy_async(float *, const float *)+0xec80 in "
    "memory.cuh:117";

std::string hazard(const std::string& kind, const std::string& one, const std::string& other) {
  const std::string bar = "========= ";
  return bar + "Error: Potential " + kind +
         " hazard detected at __shared__ 0x30de8 in block (0,0,0) :\n" + bar + "    " + one + "\n" +
         bar + "    " + other + "\n" + bar +
         "    Saved host backtrace up to driver entry point at kernel launch time\n" + bar + "\n";
}

std::string output(const std::string& reports, int count) {
  return "========= COMPUTE-SANITIZER\n" + reports +
         "========= RACECHECK SUMMARY: " + std::to_string(count) + " hazards displayed (" +
         std::to_string(count) + " errors, 0 warnings)\n";
}

TEST(Racecheck, KnowsTheReadsOfScalesBeforeTheNextCopy) {
  const std::string known = hazard("WAR", kRead, kWrite);
  const Races races = check_races(output(known + known, 2));
  EXPECT_EQ(races.known, 2);
  EXPECT_EQ(races.unknown, "");
  EXPECT_EQ(check_races(output("", 0)).unknown, "");
}

TEST(Racecheck, KnowsTheReadsOfKeyTilesAlone) {
  const auto read_in = [](const std::string& member) {
    return "Read Thread (1,0,0) at void "
           "flash3::cuda::sm90::OperandsFp8<flash3::cuda::sm90::Fp8Traits<X>>::" +
           member + "+0x1f30 in kernel_fp8.cuh:151";
  };
  EXPECT_EQ(check_races(output(hazard("WAR", read_in("begin_key_tile<Y>(T1 &)"), kWrite), 1)).known,
            1);
  EXPECT_EQ(check_races(output(hazard("WAR", read_in("q_scale(int) const"), kWrite), 1)).known, 0);
}

TEST(Racecheck, KnowsThemWhereATensorHasNoScales) {
  const std::string one =
      "Write Thread (0,0,0) at flash3::cuda::sm90::copy_scale(float *, const flash3::RowScales &, "
      "int)+0xfd20 in load_fp8.cuh:21";
  EXPECT_EQ(check_races(output(hazard("WAR", kRead, one), 1)).known, 1);
}

TEST(Racecheck, KnowsThemWherePtxasHasMergedReads) {
  const std::string read =
      "Read Thread (1,0,0) at void "
      "flash3::cuda::sm90::forward_kernel<flash3::cuda::sm90::PoliciesOf<"
      "flash3::cuda::sm90::ForwardConfig{(int)128}, (flash3::cuda::Element)2>>"
      "(flash3::cuda::sm90::ForwardParams)+0xa050";
  EXPECT_EQ(check_races(output(hazard("WAR", read, kWrite), 1)).known, 1);
  const std::string of_16_bits =
      "Read Thread (1,0,0) at void "
      "flash3::cuda::sm90::forward_kernel<flash3::cuda::sm90::PoliciesOf<"
      "flash3::cuda::sm90::ForwardConfig{(int)128}, (flash3::cuda::Element)1>>"
      "(flash3::cuda::sm90::ForwardParams)+0xa050";
  EXPECT_EQ(check_races(output(hazard("WAR", of_16_bits, kWrite), 1)).known, 0);
}

TEST(Racecheck, KnowsTheReadsOfTheOtherWarpgroupsMaximaAndSums) {
  const std::string softmax =
      "flash3::cuda::sm90::LatentSoftmax<flash3::cuda::sm90::LatentTraits<X>>";
  const std::string
      read = "Read Thread (292,0,0) at " + softmax + "::take_max(int, " + softmax +
             "::Sums &) const+0x16310 in softmax.cuh:108",
      write =
          "Write Thread (164,0,0) at void flash3::cuda::sm90::latent_kernel<"
          "flash3::cuda::sm90::PoliciesOf<X>>(flash3::cuda::sm90::DecodeParams)+0xc410 in "
          "softmax.cuh:91";
  EXPECT_EQ(check_races(output(hazard("RAW", write, read), 1)).known, 1);
  EXPECT_EQ(check_races(output(hazard("WAR", read, write), 1)).known, 0);
  const std::string sums = "Read Thread (352,0,0) at " + softmax + "::end_sums(" + softmax +
                           "::Sums &) const+0x17020 in softmax.cuh:268";
  EXPECT_EQ(check_races(output(hazard("RAW", write, sums), 1)).known, 1);
  const std::string part = "Read Thread (352,0,0) at " + softmax + "::store_part(" + softmax +
                           "::Sums &) const+0x17020 in softmax.cuh:353";
  EXPECT_EQ(check_races(output(hazard("RAW", write, part), 1)).known, 0);
}

TEST(Racecheck, KnowsTheReadsOfListedTilesBeforeTheNextNote) {
  const std::string
      write =
          "Write Thread (32,0,0) at flash3::cuda::sm90::note_tile(flash3::cuda::sm90::MaskTile "
          "&, const flash3::cuda::sm90::MaskTile &)+0x9f0 in mask_tile.cuh:32",
      read =
          "Read Thread (383,0,0) at flash3::cuda::sm90::noted_tile(const "
          "flash3::cuda::sm90::MaskTile &)+0x1ad0 in mask_tile.cuh:33",
      member =
          "Read Thread (383,0,0) at flash3::cuda::sm90::MaskTile::last() const+0x1ad0 in "
          "mask_tile.cuh:23";
  EXPECT_EQ(check_races(output(hazard("WAR", read, write), 1)).known, 1);
  EXPECT_EQ(check_races(output(hazard("WAR", member, write), 1)).known, 1);
  EXPECT_EQ(check_races(output(hazard("RAW", write, read), 1)).known, 0);
  EXPECT_EQ(check_races(output(hazard("WAR", read, kWrite), 1)).known, 0);
}

TEST(Racecheck, KnowsNothingElse) {
  const std::string known = hazard("WAR", kRead, kWrite);
  const std::string elsewhere =
      "Read Thread (1,0,0) at flash3::cuda::sm90::clear_rows(int)+0x10 in a.cuh:1";
  const std::string other_write =
      "Write Thread (0,0,0) at flash3::cuda::sm90::store_ds(int)+0x10 in b.cuh:1";
  for (const std::string& wrong :
       {hazard("RAW", kRead, kWrite), hazard("WAW", kWrite, kWrite),
        hazard("WAR", elsewhere, kWrite), hazard("WAR", kRead, other_write)}) {
    const Races races = check_races(output(known + wrong + known, 3));
    EXPECT_EQ(races.known, 2) << wrong;
    EXPECT_NE(races.unknown.find("hazard detected"), std::string::npos) << wrong;
  }
  const std::string warning =
      "========= Warning: Race reported between Write access at f() in c.cuh:1\n";
  EXPECT_NE(check_races(output(warning, 1)).unknown, "");
}

TEST(Racecheck, MissesNoReport) {
  const std::string known = hazard("WAR", kRead, kWrite);
  EXPECT_NE(check_races(output(known, 2)).unknown, "");
  EXPECT_NE(check_races(known).unknown, "");  // it ended before its summary
}

}  // namespace
}  // namespace flash3::cli
