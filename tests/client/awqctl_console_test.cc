// The width of awqctl's tables.
#include "absl/strings/str_split.h"
#include "client/awqctl/console.h"
#include "gtest/gtest.h"

namespace awqd::awqctl {
namespace {

// The text of a header and a row whose second cell is `width` letters wide.
std::string TextOf(size_t width) {
  Table table({"NAME", "WIDE", "LAST"});
  table.AddRow({"a", std::string(width, 'x'), "z"});
  return table.Text();
}

TEST(Table, FitsAHundredColumns) {
  EXPECT_EQ(TextOf(4), "NAME  WIDE  LAST\na     xxxx  z\n");
  for (size_t width = 80; width <= 90; ++width) {
    for (const absl::string_view line : absl::StrSplit(TextOf(width), '\n')) {
      EXPECT_LE(line.size(), 100u) << width;
    }
  }
  EXPECT_EQ(TextOf(89).substr(0, 10), "NAME WIDE ");
  EXPECT_EQ(TextOf(91).substr(0, 12), "NAME\n  WIDE ");
}

}  // namespace
}  // namespace awqd::awqctl
