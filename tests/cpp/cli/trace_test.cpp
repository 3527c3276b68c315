// SPDX-License-Identifier: Apache-2.0
// What becomes of a traced block's stamps: spans, Chrome's trace format, the table.
#include "cli/trace.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>

namespace flash3::cli {
namespace {

using device::Phase;
using device::Role;
using device::Stamp;

Stamp stamp(uint32_t clock, Phase phase, int number = 0) {
  return {clock, unsigned(phase) | unsigned(number) << 8};
}

device::RoleTrace role_of(Role role, std::vector<Stamp> stamps, int warpgroup = 0) {
  return {role, warpgroup, std::move(stamps), 0};
}

// A clock of 1 GHz: a tick is a nanosecond.
device::Trace trace_with(std::vector<device::RoleTrace> roles, uint32_t first_clock = 1000) {
  device::Trace trace;
  trace.roles = std::move(roles);
  trace.block = 3;
  trace.multiprocessor = 17;
  trace.first_clock = first_clock;
  trace.clock_hz = 1e9;
  return trace;
}

device::Trace small_trace() {
  return trace_with({role_of(Role::kLoadK, {stamp(500, Phase::kWaitRoom, 1),
                                            stamp(750, Phase::kLoad, 1), stamp(1000, Phase::kEnd)}),
                     role_of(Role::kConsumer,
                             {stamp(1000, Phase::kWaitScores, 7), stamp(3000, Phase::kMaximum, 7),
                              stamp(3500, Phase::kWaitScores, 6), stamp(4500, Phase::kEnd)},
                             1)});
}

TEST(Trace, SpansRunFromAStampToTheNext) {
  const device::Trace trace = small_trace();
  const auto spans = spans_of(trace.roles[1], trace);
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].phase, Phase::kWaitScores);
  EXPECT_EQ(spans[0].number, 7);
  EXPECT_DOUBLE_EQ(spans[0].begin_us, 0);
  EXPECT_DOUBLE_EQ(spans[0].end_us, 2);
  EXPECT_EQ(spans[2].number, 6);
  EXPECT_DOUBLE_EQ(spans[2].end_us, 3.5);
  // A role that began before the first clock.
  EXPECT_DOUBLE_EQ(spans_of(trace.roles[0], trace)[0].begin_us, -0.5);
}

TEST(Trace, TheClocksLowHalfMayRunOver) {
  const auto most = std::numeric_limits<uint32_t>::max();
  const device::Trace trace =
      trace_with({role_of(Role::kConsumer, {stamp(most - 99, Phase::kWaitQ),
                                            stamp(900, Phase::kIssue), stamp(1900, Phase::kEnd)})},
                 most - 199);
  const auto spans = spans_of(trace.roles[0], trace);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_NEAR(spans[0].begin_us, 0.1, 1e-9);
  EXPECT_NEAR(spans[0].end_us, 1.1, 1e-9);
  EXPECT_NEAR(spans[1].end_us, 2.1, 1e-9);
}

TEST(Trace, APhaseWithoutAnEndIsLeftOut) {
  const device::Trace trace = trace_with(
      {role_of(Role::kConsumer, {stamp(1000, Phase::kIssue)}), role_of(Role::kLoadQ, {})});
  EXPECT_TRUE(spans_of(trace.roles[0], trace).empty());
  EXPECT_TRUE(spans_of(trace.roles[1], trace).empty());
}

TEST(Trace, ChromesFormatHasAThreadForEachRole) {
  const Json j = Json::parse(chrome_trace(small_trace(), {{"case", "some case"}}));
  EXPECT_EQ(j["otherData"]["case"], "some case");
  EXPECT_EQ(j["displayTimeUnit"], "ns");
  const Json& events = j["traceEvents"];
  ASSERT_EQ(events.size(), 1u + 2u + 5u);
  EXPECT_EQ(events[0]["args"]["name"], "block 3 on multiprocessor 17");
  EXPECT_EQ(events[1]["name"], "thread_name");
  EXPECT_EQ(events[1]["args"]["name"], "K loader");
  EXPECT_EQ(events[4]["args"]["name"], "consumer 1");
  const Json& wait = events[5];
  EXPECT_EQ(wait["ph"], "X");
  EXPECT_EQ(wait["tid"], 1);
  EXPECT_EQ(wait["name"], "wait for scores");
  EXPECT_EQ(wait["cat"], "wait");
  EXPECT_EQ(wait["args"]["key_tile"], 7);
  EXPECT_DOUBLE_EQ(wait["ts"], 0.5);  // the earliest event of all is at 0
  EXPECT_DOUBLE_EQ(wait["dur"], 2);
  EXPECT_EQ(events[6]["cat"], "work");
  EXPECT_DOUBLE_EQ(events[2]["ts"], 0);
}

TEST(Trace, OnlyPhasesOfAKeyTileTellOne) {
  const Json j = Json::parse(chrome_trace(
      trace_with({role_of(Role::kLoadQ, {stamp(1, Phase::kLoad, 1), stamp(2, Phase::kWaitTile),
                                         stamp(3, Phase::kEnd)})}),
      {}));
  EXPECT_EQ(j["traceEvents"][2]["args"]["warpgroup"], 1);
  EXPECT_FALSE(j["traceEvents"][3].contains("args"));
}

TEST(Trace, EveryPhaseAndRoleHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i < device::kPhases; ++i) names.insert(name_of(Phase(i)));
  for (int i = 0; i < int(Role::kConsumer); ++i) names.insert(name_of(role_of(Role(i), {})));
  for (int w = 0; w < device::kMostConsumers; ++w)
    names.insert(name_of(role_of(Role::kConsumer, {}, w)));
  EXPECT_EQ(names.size(), size_t(device::kPhases + device::kRoles));
}

TEST(Trace, TheTableAddsPhasesUp) {
  const std::string table = trace_table(small_trace());
  std::istringstream lines(table);
  std::string line;
  bool found = false;
  while (std::getline(lines, line))
    if (line.starts_with("consumer 1") && line.find("wait for scores") != std::string::npos) {
      found = true;
      EXPECT_NE(line.find(" 2 "), std::string::npos) << line;
      EXPECT_NE(line.find("3.00"), std::string::npos) << line;
      EXPECT_NE(line.find("85.7%"), std::string::npos) << line;
    }
  EXPECT_TRUE(found) << table;
}

TEST(Trace, ABufferBecomesLists) {
  const auto buffer = std::make_unique<device::TraceBuffer>();
  buffer->clocks[0] = (1ull << 32) + 5;
  buffer->clocks[1] = (1ull << 32) + 5 + 3000;
  buffer->nanoseconds[0] = 7000;
  buffer->nanoseconds[1] = 9000;
  buffer->multiprocessor = 17;
  buffer->counts[int(Role::kLoadV)] = 2;
  buffer->counts[int(Role::kConsumer)] = 1;
  buffer->counts[int(Role::kConsumer) + 1] = device::kMostStamps + 10;
  buffer->stamps[int(Role::kLoadV)][1] = stamp(9, Phase::kLoad, 4);
  const device::Trace trace = device::trace_of(*buffer, 3, 2);
  ASSERT_EQ(trace.roles.size(), 3u);  // those with a stamp
  EXPECT_DOUBLE_EQ(trace.clock_hz, 1.5e9);
  EXPECT_EQ(trace.first_clock, 5u);
  EXPECT_EQ(trace.block, 3);
  EXPECT_EQ(trace.multiprocessor, 17);
  EXPECT_EQ(trace.roles[0].role, Role::kLoadV);
  ASSERT_EQ(trace.roles[0].stamps.size(), 2u);
  EXPECT_EQ(trace.roles[0].stamps[1].what >> 8, 4u);
  EXPECT_EQ(trace.roles[2].warpgroup, 1);
  EXPECT_EQ(trace.roles[2].stamps.size(), size_t(device::kMostStamps));
  EXPECT_EQ(trace.roles[2].left_out, 10u);
}

TEST(Trace, ABlockThatHasNotRunIsAnError) {
  const auto buffer = std::make_unique<device::TraceBuffer>();
  EXPECT_THROW(device::trace_of(*buffer, 0, 2), std::runtime_error);
}

}  // namespace
}  // namespace flash3::cli
