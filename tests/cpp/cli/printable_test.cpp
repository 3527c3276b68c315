// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "cases/text.hpp"

namespace flash3::cases {
namespace {

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
