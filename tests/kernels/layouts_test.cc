// Every layout inverts itself: layouts x bits x zeros x shapes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/codebooks.h"
#include "kernels/base/half.h"
#include "kernels/layouts/k16.h"
#include "kernels/layouts/layout.h"
#include "kernels/layouts/mma16.h"
#include "kernels/layouts/vectors.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

struct Shape {
  int64_t k, n, group;
};

constexpr Shape kShapes[] = {{1, 8, 1},     {7, 8, 7},      {32, 8, 16},      {64, 72, 32},
                             {70, 64, 7},   {130, 72, 10},  {264, 136, 24},   {128, 192, 128},
                             {256, 64, 64}, {384, 320, 96}, {1024, 128, 128}, {2048, 64, 2048},
                             {33, 1, 33},   {100, 3, 32},   {200, 70, 16},    {300, 131, 128}};

constexpr const char* kSchemes[] = {
    "w1g1z",        "w1g1s",         "w2g1z",       "w2g1s+bf16",     "w3g1z",      "w3g1s",
    "w3g1z+bf16",   "w4g1z",         "w4g1s",       "w4g1z+bf16",     "w4g1s+fp32", "w4cz",
    "w4cs+bf16",    "w4cs+fp32",     "w5g1z",       "w6g1s",          "w7g1z",      "w8g1z",
    "w8g1s",        "w8g1s+bf16",    "w8g1z+fp32",  "w8cs",           "w8cs+fp32",  "w8cz+bf16",
    "w8cz+1",       "w8cs+1*c",      "w4g1m3",      "w2g1r",          "w4g1r:fp32", "w4g1o",
    "w4g1z+int8*c", "e2m1g1+e4m3*t", "e2m1g1+e8m0", "e4m3b16x8+fp32", "e4m3c",      "t4g1+fp32"};

// A scheme whose groups, if it has any, have `group` rows.
QuantizationScheme Described(const char* text, int64_t group) {
  QuantizationScheme out = ParseScheme(text).value();
  if (out.block_rows == 1) out.block_rows = group;
  return out;
}

TEST(Layouts, UnpackInvertsPack) {
  int round_trips = 0;
  for (const Layout* layout : AllLayouts()) {
    for (const char* text : kSchemes) {
      for (const Shape& shape : kShapes) {
        for (testing::Scales scales : {testing::Scales::kOrdinary, testing::Scales::kExtreme}) {
          const QuantizationScheme d = Described(text, shape.group);
          if (!Validate(d, shape.k, shape.n).ok()) continue;
          const HostWeight weight =
              testing::RandomWeight({.k = shape.k, .n = shape.n, .scheme = d, .scales = scales});
          ASSERT_TRUE(Validate(weight).ok());
          const WeightShape facts = ShapeOf(weight);
          if (!layout->refuses(facts).empty()) continue;
          SCOPED_TRACE(
              absl::StrCat(layout->name, " ", ToString(weight.scheme), " ", shape.k, "x", shape.n));
          // The memory is not zeroed, because pack must not depend on zeros. It packs in pieces, as
          // threads do.
          const Sections sections = SectionsOf(*layout, facts);
          std::vector<uint8_t> packed(sections.total(), 0xa5);
          for (int64_t n = 0; n < shape.n; n += ColumnRange::kStep) {
            layout->pack(weight, {n, std::min(shape.n, n + ColumnRange::kStep)}, sections,
                         packed.data());
          }
          PackCommonParts(*layout, weight, sections, packed.data());
          const HostWeight back = Unpack(*layout, facts, sections, packed.data());
          EXPECT_EQ(back.codes, weight.codes);
          EXPECT_EQ(back.zeros, weight.zeros);
          EXPECT_EQ(back.scales, weight.scales);
          EXPECT_EQ(back.outer, weight.outer);
          ++round_trips;
        }
      }
    }
  }
  EXPECT_GT(round_trips, 1500);
}

TEST(Layouts, VectorCodesComeBack) {
  for (const VectorCodeInfo& info : VectorCodes()) {
    for (int64_t n : {1, 16, 70, 128}) {
      const HostWeight weight = testing::RandomWeight(
          {.k = 768, .n = n, .scheme = ParseScheme(info.name).value(), .seed = 3});
      const Sections sections = SectionsOf(kVectorsLayout, weight.shape());
      std::vector<uint8_t> packed(sections.total(), 0xa5);
      for (int64_t c = 0; c < n; c += ColumnRange::kStep) {
        kVectorsLayout.pack(weight, {c, std::min(n, c + ColumnRange::kStep)}, sections,
                            packed.data());
      }
      EXPECT_EQ(Unpack(kVectorsLayout, weight.shape(), sections, packed.data()).codes, weight.codes)
          << info.name << " " << n;
      EXPECT_EQ(sections.bytes(Part::kCodes),
                CeilDiv(n, 64) * 64 * 3 * VectorBlockBytes(info.code));
    }
  }
}

uint32_t Bits(const uint8_t* from, int64_t first, int count) {
  uint32_t out = 0;
  for (int i = 0; i < count; ++i) {
    out |= static_cast<uint32_t>(from[(first + i) / 8] >> ((first + i) % 8) & 1) << i;
  }
  return out;
}

// Element k of column c of a tile of layout vectors, by the sentences at the head of its source.
template <VectorCode kCode>
float ElementOfTile(const uint8_t* tile, int c, int k) {
  using namespace vectors;
  constexpr bool kIq3 = kCode == VectorCode::kIq3Xxs || kCode == VectorCode::kIq3S;
  constexpr bool kIq1 = kCode == VectorCode::kIq1S || kCode == VectorCode::kIq1M;
  constexpr bool kSeven =
      kCode == VectorCode::kIq2Xxs || kCode == VectorCode::kIq2Xs || kCode == VectorCode::kIq3Xxs;
  static constexpr auto kBook = MakeCodebook<kCode>();
  const int g = k / 32, t = k / 8 % 4, j = k % 8;
  const uint8_t* const round = tile + g / 4 * RoundBytes(kCode);
  const int item = (4 * (c % 8) + g % 4) * 2 + c / 8;
  const auto sign_bit = [&](int element) {
    return kIq3 ? 16 * (element % 2) + 4 * (element / 2) + t : 4 * element + t;
  };
  const uint32_t signs = kIq1 ? 0 : Bits(round + SignsAt(kCode), 32 * item, 32);
  const int high_bits = kIq1 ? 16 : 8;
  const uint32_t high =
      HighBytes(kCode) == 0 ? 0 : Bits(round + HighAt(kCode), high_bits * item, high_bits);
  uint32_t index = round[(kIq3 ? j / 4 * 256 : 0) + 4 * item + t];
  if (kCode == VectorCode::kIq2Xs) index |= (signs >> (28 + t) & 1) << 8;
  if (kCode == VectorCode::kIq2S) index |= (high >> (2 * t) & 3) << 8;
  if (kCode == VectorCode::kIq3S) index |= (high >> (2 * t + j / 4) & 1) << 8;
  if (kCode == VectorCode::kIq1S) index |= (high >> (3 * t) & 7) << 8;
  if (kCode == VectorCode::kIq1M) index |= (high >> (4 * t) & 7) << 8;
  float value = static_cast<float>(kBook.points[index] >> (8 * (kIq3 ? j % 4 : j)) & 255);
  if (kIq1) {
    // 8 * element + 9; the offset is an eighth.
    const bool minus = (high >> (kCode == VectorCode::kIq1S ? 15 : 4 * t + 3) & 1) != 0;
    value = value - 9 + (minus ? -1 : 1);
  } else {
    bool minus = (signs >> sign_bit(j) & 1) != 0;
    if (kSeven && j == 7) {
      minus = false;
      for (int e = 0; e < 7; ++e) minus ^= (signs >> sign_bit(e) & 1) != 0;
    }
    if (minus) value = -value;
  }
  uint32_t scale = signs >> 28;
  if (kCode == VectorCode::kIq1S) scale = high >> 12 & 7;
  if (ScaleBytes(kCode) == 1) scale = Bits(round + ScalesAt(kCode), 4 * item, 4);
  if (ScaleBytes(kCode) == 2) {
    const int bits = kCode == VectorCode::kIq1M ? 3 : 4;
    scale = Bits(round + ScalesAt(kCode), 8 * item + t / 2 * bits, bits);
  }
  uint32_t d = 0;
  if (kCode == VectorCode::kIq1M) {
    for (int group = 0; group < 8; ++group) {
      const int of = (4 * (c % 8) + group % 4) * 2 + c / 8;
      d |= Bits(tile + group / 4 * RoundBytes(kCode) + ScalesAt(kCode), 8 * of + 6, 2)
           << (2 * group);
    }
  } else {
    d = Bits(tile + FactorsAt(kCode), 32 * (c % 8) + 16 * (c / 8), 16);
  }
  const float unit = kCode == VectorCode::kIq3S ? 1 : kCode == VectorCode::kIq3Xxs ? 0.25f : 0.125f;
  return value * static_cast<float>(2 * scale + 1) * unit * HalfToFloat(static_cast<uint16_t>(d));
}

template <VectorCode kCode>
void CheckElements() {
  const VectorCodeInfo& info = InfoOf(kCode);
  const HostWeight weight = testing::RandomWeight(
      {.k = 512, .n = 70, .scheme = ParseScheme(info.name).value(), .seed = 4});
  const Sections sections = SectionsOf(kVectorsLayout, weight.shape());
  std::vector<uint8_t> packed(sections.total());
  kVectorsLayout.pack(weight, {0, 64}, sections, packed.data());
  kVectorsLayout.pack(weight, {64, 70}, sections, packed.data());
  DecodedBlock want;
  for (int64_t n : {0, 9, 63, 69}) {
    for (int64_t block : {0, 1}) {
      info.decode(weight.codes.data() + (block * weight.n + n) * VectorBlockBytes(kCode), &want);
      const int64_t tile = ((n / 64) * 2 + block) * 4 + n % 64 / 16;
      const uint8_t* const at =
          packed.data() + sections.offset(Part::kCodes) + tile * vectors::TileBytes(kCode);
      for (int k = 0; k < kVectorBlock; ++k) {
        const float got = ElementOfTile<kCode>(at, static_cast<int>(n % 16), k);
        if (std::isnan(want.Element(k)) && std::isnan(got)) continue;
        ASSERT_EQ(got, want.Element(k)) << info.name << " " << n << " " << block << " " << k;
      }
    }
  }
}

TEST(Layouts, VectorCodesLieWhereTheSpecificationSays) {
  CheckElements<VectorCode::kIq2Xxs>();
  CheckElements<VectorCode::kIq2Xs>();
  CheckElements<VectorCode::kIq2S>();
  CheckElements<VectorCode::kIq3Xxs>();
  CheckElements<VectorCode::kIq3S>();
  CheckElements<VectorCode::kIq1S>();
  CheckElements<VectorCode::kIq1M>();
}

TEST(Layouts, HaveNamesOfTheirOwn) {
  std::set<absl::string_view> names;
  for (const Layout* layout : AllLayouts()) EXPECT_TRUE(names.insert(layout->name).second);
}

// Layout k16 for a weight of zeros except in column 2, where rows first + step j hold j, within the
// bits.
std::vector<uint8_t> PackedK16(int bits, int64_t first, int64_t step) {
  HostWeight w = MakeEmpty({128, 8, Asymmetric(bits, 0)});
  for (int j = 0; j < 8; ++j) {
    const int64_t bit = (first + step * j) * w.row_bytes() * 8 + 2 * w.code_bits();
    w.codes[bit / 8] |= static_cast<uint8_t>((j & ((1 << bits) - 1)) << (bit % 8));
  }
  const Sections sections = SectionsOf(kK16Layout, w.shape());
  std::vector<uint8_t> packed(sections.total());
  kK16Layout.pack(w, {0, w.n}, sections, packed.data());
  return packed;
}

// Bytes that were worked out by hand from the specification in kernels/layouts/k16.cc.
TEST(K16, PutsARowOfALaneAtItsBits) {
  struct Example {
    int bits;
    std::vector<std::pair<int64_t, uint8_t>> bytes;  // place and value
  };
  const Example examples[] = {
      {4, {{140, 0x10}, {141, 0x32}, {142, 0x54}, {143, 0x76}}},
      {3, {{102, 0x88}, {103, 0xc6}, {131, 0xfa}}},
      {2, {{70, 0xe4}, {71, 0xe4}}},
      {1, {{35, 0xaa}}},
  };
  for (const Example& example : examples) {
    const std::vector<uint8_t> packed = PackedK16(example.bits, 3, 16);
    EXPECT_EQ(SectionsOf(kK16Layout, {128, 8, Asymmetric(example.bits, 0)}).bytes(Part::kCodes),
              128 * example.bits);
    for (const auto& [at, byte] : example.bytes) EXPECT_EQ(packed[at], byte) << example.bits;
  }
}

TEST(K16, PutsRowsOfBytesSideBySide) {
  for (int bits : {5, 6, 7, 8}) {
    const std::vector<uint8_t> packed = PackedK16(bits, 0, 1);
    for (int j = 0; j < 8; ++j) EXPECT_EQ(packed[256 + j], 0x80 + j) << bits;
  }
}

// The place of a lane's codes by the table at the head of kernels/layouts/mma16.cc: the word in the
// record, and the bit in it. `plane`: from the lowest bits on.
struct Place {
  int64_t word, bit;
};

Place PlaceByTable(int bits, int plane, int64_t n, int64_t k) {
  const int64_t unit = 2 * (n % 64 / 16) + k % 128 / 64, lane = n % 8 * 4 + k % 8 / 2;
  const int64_t step = k % 64 / 16, pair = n % 16 / 8 + 2 * (k % 16 / 8), upper = 16 * (k % 2);
  const int64_t first = unit * 32 * bits;  // words
  switch (bits) {
    case 8:
      return {first + step / 2 * 128 + lane * 4 + step % 2 * 2 + pair % 2, 8 * (pair / 2) + upper};
    case 4:
      return {first + lane * 4 + step, 4 * pair + upper};
    case 2:
      return {first + lane * 2 + step / 2, 8 * (step % 2) + 2 * pair + upper};
    case 5:
    case 6:
    case 7: {
      const int64_t r = 2 * step + pair % 2, byte = 8 * (pair / 2) + upper;
      if (plane == 0) return {first + lane * 4 + step, 4 * pair + upper};
      if (plane == 2) return {first + 192 + lane, byte + r};
      if (bits == 5) return {first + 128 + lane, byte + r};
      return {first + 128 + lane * 2 + r / 4, byte + 2 * (r % 4)};
    }
    case 3:
      if (plane == 0) return {first + lane * 2 + step / 2, 8 * (step % 2) + 2 * pair + upper};
      break;
  }
  const int64_t steps[4] = {2, 3, 10, 11};
  return {first + (bits == 3 ? 64 : 0) + lane, (steps[step] + 2 * pair + upper) % 32};
}

// Kernel rows of such records always multiply by it.
TEST(Mma16, RecordsWithoutScalesHaveAnOuterOne) {
  for (const char* text :
       {"w8c+1", "w8cs+1", "w8g128s+1", "w8cs+1*c", "w8cs", "e4m3c+bf16", "e4m3t+fp32"}) {
    const HostWeight weight =
        testing::RandomWeight({.k = 256, .n = 72, .scheme = ParseScheme(text).value()});
    ASSERT_EQ(mma16::MetasPerRecord(weight.shape()), 0) << text;
    const Sections sections = SectionsOf(kMma16Layout, weight.shape());
    ASSERT_EQ(sections.bytes(Part::kOuter), 72 * 4) << text;
    std::vector<uint8_t> packed(sections.total());
    PackCommonParts(kMma16Layout, weight, sections, packed.data());
    const float* outer =
        reinterpret_cast<const float*>(packed.data() + sections.offset(Part::kOuter));
    for (int n = 0; n < 72; ++n) {
      EXPECT_EQ(outer[n], weight.Scale(0, n) * weight.Outer(n)) << text << " column " << n;
    }
  }
}

TEST(Mma16, PutsEveryCodeWhereItsTableSays) {
  for (int bits = 1; bits <= 8; ++bits) {
    // 2 blocks along K and 3 tiles along N, the last ones padded.
    const HostWeight w = testing::RandomWeight({.k = 200, .n = 133, .scheme = Asymmetric(bits, 0)});
    const Sections sections = SectionsOf(kMma16Layout, w.shape());
    std::vector<uint8_t> packed(sections.total(), 0xa5);
    kMma16Layout.pack(w, {0, w.n}, sections, packed.data());
    constexpr int kWidths[9][3] = {{}, {1}, {2}, {2, 1}, {4}, {4, 1}, {4, 2}, {4, 2, 1}, {8}};
    const auto read = [&](int64_t record, const Place& at, int count) {
      uint32_t word;
      std::memcpy(&word, packed.data() + record + at.word * 4, 4);
      return static_cast<int>(word >> at.bit & ((1u << count) - 1));
    };
    for (int64_t n = 0; n < 192; ++n) {
      for (int64_t k = 0; k < 256; ++k) {
        const int64_t record = (n / 64 * 2 + k / 128) * mma16::RecordBytes(bits, 1);
        int got = 0, lowest = 0;
        for (int plane = 0; plane < 3 && kWidths[bits][plane] > 0; ++plane) {
          const int width = kWidths[bits][plane];
          got |= read(record, PlaceByTable(bits, plane, n, k), width) << lowest;
          lowest += width;
        }
        const int want = n >= w.n ? 0 : k < w.k ? w.Code(k, n) : w.Zero(0, n);
        ASSERT_EQ(got, want) << "bits " << bits << " k " << k << " n " << n;
      }
    }
  }
}

}  // namespace
}  // namespace awqd
