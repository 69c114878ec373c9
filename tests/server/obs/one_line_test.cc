// Characters that could hide in a name are visible in the log.
#include "server/obs/one_line.h"

#include <string>

#include "gtest/gtest.h"

namespace awqd::obs {
namespace {

TEST(OneLine, LeavesWhatIsSeenAsItIs) {
  for (const char* text : {"", "plain text", "tab-less", "Grüße, 你好, 🙂", "ﷺ", "a\u0301"}) {
    EXPECT_EQ(OneLine(text), text);
  }
}

TEST(OneLine, EscapesEveryControlCharacter) {
  EXPECT_EQ(OneLine("a\nb\r\t\x1b[2J\x7f"), "a\\nb\\r\\t\\x1b[2J\\x7f");
  EXPECT_EQ(OneLine(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(OneLine("\u0085\u009b31m"), "\\u0085\\u009b31m");
}

TEST(OneLine, EscapesSeparatorsAndSpacesButThePlainOne) {
  EXPECT_EQ(OneLine("\u2028\u2029\u00a0\u3000 \u2003"), "\\u2028\\u2029\\u00a0\\u3000 \\u2003");
}

TEST(OneLine, EscapesMarksOfDirectionAndInvisibleOnes) {
  for (const char* mark :
       {"\u061c", "\u200e", "\u200f", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066",
        "\u2067", "\u2068", "\u2069", "\ufeff", "\u200b", "\u00ad", "\u2060"}) {
    const std::string line = OneLine(mark);
    EXPECT_EQ(line.substr(0, 2), "\\u") << line;
    EXPECT_EQ(line.size(), 6u) << line;
  }
  EXPECT_EQ(OneLine("\U000e0041"), "\\U000e0041");
}

TEST(OneLine, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(OneLine("a\x9b\x80z"), "a\\x9b\\x80z") << "C1 to a terminal of one byte a character";
  EXPECT_EQ(OneLine("\xc0\x8a"), "\\xc0\\x8a") << "a line feed, too long";
  EXPECT_EQ(OneLine("\xe2\x80"), "\\xe2\\x80") << "cut short";
  EXPECT_EQ(OneLine("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(OneLine("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "past the last character";
}

}  // namespace
}  // namespace awqd::obs
