// awqctl's tables: their width, their folding, their colours.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/awqctl/console.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::awqctl {
namespace {

using ::testing::HasSubstr;

constexpr size_t kColumns = 80;

size_t WidestLine(const std::string& text) {
  size_t most = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    most = std::max(most, line.size());
  }
  return most;
}

// The text of a header and a row whose second cell is `width` letters wide.
std::string TextOf(size_t width) {
  Table table({"NAME", "WIDE", "LAST"});
  table.AddRow({"a", std::string(width, 'x'), "z"});
  return table.Text(kColumns, false);
}

TEST(Table, FitsEightyColumns) {
  EXPECT_EQ(TextOf(4), "NAME  WIDE  LAST\na     xxxx  z\n");
  for (size_t width = 60; width <= 76; ++width) {
    EXPECT_LE(WidestLine(TextOf(width)), kColumns) << width;
  }
  EXPECT_EQ(TextOf(69).substr(0, 10), "NAME WIDE ");
  EXPECT_EQ(TextOf(71).substr(0, 12), "NAME\n  WIDE ");
}

TEST(Table, AsManyLinesAsTheCellsNeedAndNoLetterLost) {
  Table table({"NAME", "ONE", "TWO", "THREE", "WHY"});
  const std::string path(100, 'p'), word(30, 'x');
  table.AddRow({path, word, word, word,
                "because it is so, and for a reason that takes up more " + word +
                    " than a line of the terminal"});
  const std::string text = table.Text(kColumns, false);
  EXPECT_THAT(text, HasSubstr("\n" + path + "\n  " + word + "  " + word + "\n  " + word + "\n"));
  EXPECT_THAT(text, HasSubstr("a line of the terminal"));
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    EXPECT_TRUE(line == path || line.size() <= kColumns) << line;
  }
  EXPECT_LE(WidestLine(table.Text(kColumns, true)), kColumns);
}

TEST(Table, ATerminalCutsTheMiddleOfNames) {
  EXPECT_EQ(Shortened("abcdefghij", 10), "abcdefghij");
  EXPECT_EQ(Shortened("abcdefghij", 7), "ab...ij");
  EXPECT_EQ(Shortened("ab\u00e4\u00e4\u00e4\u00e4\u00e4ij", 8), "ab...\u00e4ij");
  EXPECT_EQ(Shortened("abcdefghij", 2), "..");
  Table table({"NAME", "WIDE"});
  table.AddRow({std::string(50, 'a') + "z", std::string(40, 'x')});
  EXPECT_THAT(table.Text(kColumns, true),
              HasSubstr("\n" + std::string(18, 'a') + "..." + std::string(17, 'a') + "z "));
  EXPECT_THAT(table.Text(kColumns, false), HasSubstr(std::string(50, 'a') + "z\n  xxx"));
  EXPECT_THAT(table.Text(120, false), HasSubstr("z  xxx")) << "a wider screen";
}

TEST(Table, FoldsRowsThatDifferInOneNumber) {
  Table table({"WEIGHT", "K"});
  for (const char* path : {"l.0.up", "l.1.up", "l.3.up", "l.0.down", "l.2.up", "l.5.up", "head"}) {
    table.AddRow({path, "4"});
  }
  table.AddRow({"l.4.up", "8"});
  table.AddRow({"l.06.up", "4"});
  table.Fold();
  EXPECT_EQ(table.Text(kColumns, false),
            "WEIGHT        K\nl.[0-3,5].up  4\nl.0.down      4\nhead          4\nl.4.up        8\n"
            "l.06.up       4\n");
}

TEST(Table, ColoursRowsWhereAsked) {
  Table table({"NAME"});
  table.AddRow({"bad"}, kRed);
  EXPECT_EQ(table.Text(kColumns, false), "NAME\nbad\n");
  EXPECT_EQ(table.Text(kColumns, true, true), absl::StrCat("NAME\n", kRed, "bad", kNoColour, "\n"));
}

}  // namespace
}  // namespace awqd::awqctl
