// Layouts pack each part of a weight where the specifications at the head of their sources
// (kernels/layouts/plain.cc, k16.cc, mma16.cc) say.
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/layouts/layout.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

constexpr int64_t kRows = 256, kColumns = 128, kGroup = 128;

// A line of a table of worked places: bits [first, last] of a number of the weight, and where they
// are packed.
struct Place {
  int bits = 0;  // of a code
  int64_t k = 0, n = 0;
  std::string part;
  int first = 0, last = 0;
  std::string section;
  int64_t byte = 0;
  int bit = 0;
  std::string line;
};

constexpr absl::string_view kHead = "//   bits    k    n  part   part bits  section  byte  bit";

int64_t Number(absl::string_view text) {
  int64_t out = -1;
  EXPECT_TRUE(absl::SimpleAtoi(text, &out)) << '"' << text << "\" is no number";
  return out;
}

// A line of a table, without "//".
Place ParsePlace(const std::string& line) {
  const std::vector<std::string> cells = absl::StrSplit(line, ' ', absl::SkipEmpty());
  const std::vector<std::string> range =
      absl::StrSplit(cells.size() == 8 ? cells[4] : std::string(), '-');
  if (range.size() != 2) {
    ADD_FAILURE() << "expected 8 cells, the fifth a range of bits, got: " << line;
    return {};
  }
  return {.bits = static_cast<int>(Number(cells[0])),
          .k = Number(cells[1]),
          .n = Number(cells[2]),
          .part = cells[3],
          .first = static_cast<int>(Number(range[0])),
          .last = static_cast<int>(Number(range[1])),
          .section = cells[5],
          .byte = Number(cells[6]),
          .bit = static_cast<int>(Number(cells[7])),
          .line = line};
}

// The table in the comment at the head of a layout's source.
std::vector<Place> PlacesOf(const Layout& layout) {
  std::ifstream file(DataPath(absl::StrCat("../../kernels/layouts/", layout.name, ".cc")));
  EXPECT_TRUE(file.is_open()) << "the source of layout " << layout.name << " cannot be opened";
  std::vector<Place> places;
  bool in_table = false;
  for (std::string line; std::getline(file, line);) {
    if (in_table && !line.starts_with("//   ")) break;
    if (in_table) places.push_back(ParsePlace(line.substr(2)));
    in_table = in_table || line == kHead;
  }
  return places;
}

Part SectionNamed(const std::string& name) {
  EXPECT_TRUE(name == "codes" || name == "scales" || name == "zeros") << name;
  return name == "codes" ? Part::kCodes : name == "scales" ? Part::kScales : Part::kZeros;
}

// Sets bits [first, last] of the number that a place is about.
void SetBits(const Place& place, HostWeight* w) {
  const uint32_t bits = ((2u << (place.last - place.first)) - 1) << place.first;
  const int64_t cell = place.k / w->shape().group_rows() * w->n + place.n;
  if (place.part == "code") {
    const int64_t at = place.k * w->row_bytes() * 8 + place.n * w->code_bits();
    w->codes[at / 8] |= static_cast<uint8_t>(bits << at % 8);
  } else if (place.part == "scale") {
    w->scales[2 * cell] |= bits & 0xff;
    w->scales[2 * cell + 1] |= bits >> 8;
  } else {
    ASSERT_EQ(place.part, "zero") << place.line;
    w->zeros[cell] |= bits;
  }
}

std::vector<uint8_t> Pack(const Layout& layout, const HostWeight& w, const Sections& sections) {
  std::vector<uint8_t> packed(sections.total());
  for (int64_t n = 0; n < w.n; n += ColumnRange::kStep) {
    layout.pack(w, {n, n + ColumnRange::kStep}, sections, packed.data());
  }
  return packed;
}

// The bits in which two byte strings differ, as (byte, bit).
std::set<std::pair<int64_t, int>> Differences(const std::vector<uint8_t>& a,
                                              const std::vector<uint8_t>& b) {
  std::set<std::pair<int64_t, int>> out;
  for (int64_t i = 0; i < static_cast<int64_t>(a.size()); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      if (((a[i] ^ b[i]) >> bit & 1) != 0) out.emplace(i, bit);
    }
  }
  return out;
}

TEST(LayoutSpecification, EveryNumberLiesWhereTheTableSays) {
  for (const Layout* layout : AllLayouts()) {
    // Layouts of blocks have no numbers of elements; layouts_test.cc reads those.
    if (!layout->refuses({kRows, kColumns, Asymmetric(4, kGroup)}).empty()) continue;
    SCOPED_TRACE(layout->name);
    std::set<std::string> parts;
    for (const Place& place : PlacesOf(*layout)) {
      SCOPED_TRACE(place.line);
      HostWeight weight = MakeEmpty({kRows, kColumns, Asymmetric(place.bits, kGroup)});
      const Sections sections = SectionsOf(*layout, weight.shape());
      const std::vector<uint8_t> zeros = Pack(*layout, weight, sections);
      SetBits(place, &weight);
      const std::vector<uint8_t> packed = Pack(*layout, weight, sections);
      std::set<std::pair<int64_t, int>> expected;
      const int64_t begin =
          8 * (sections.offset(SectionNamed(place.section)) + place.byte) + place.bit;
      for (int64_t at = begin; at <= begin + place.last - place.first; ++at) {
        expected.emplace(at / 8, at % 8);
      }
      EXPECT_EQ(Differences(zeros, packed), expected);
      parts.insert(place.part);
    }
    EXPECT_EQ(parts, (std::set<std::string>{"code", "scale", "zero"})) << "in the table";
  }
}

}  // namespace
}  // namespace awqd
