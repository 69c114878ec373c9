// Every layout inverts itself: layouts x bits x zeros x shapes.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/layouts/k16.h"
#include "kernels/layouts/layout.h"
#include "kernels/layouts/mma16.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

struct Shape {
  int64_t k, n, group;
};

constexpr Shape kShapes[] = {{1, 8, 1},     {7, 8, 7},      {32, 8, 16},      {64, 72, 32},
                             {70, 64, 7},   {130, 72, 10},  {264, 136, 24},   {128, 192, 128},
                             {256, 64, 64}, {384, 320, 96}, {1024, 128, 128}, {2048, 64, 2048}};

TEST(Layouts, UnpackInvertsPack) {
  int round_trips = 0;
  for (const Layout* layout : AllLayouts()) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (ZeroKind zeros : {ZeroKind::kInteger, ZeroKind::kSymmetric}) {
        for (DType scales : {DType::kFp16, DType::kBf16, DType::kFp32}) {
          for (const Shape& shape : kShapes) {
            testing::WeightSpec spec;
            spec.k = shape.k;
            spec.n = shape.n;
            spec.scheme = {bits, shape.group, zeros, scales, Activation::kA16};
            spec.scales = testing::Scales::kExtreme;
            const WeightShape facts{shape.k, shape.n, spec.scheme};
            if (!layout->refuses(facts).empty()) continue;
            SCOPED_TRACE(
                absl::StrCat(layout->name, " ", ToString(spec.scheme), " ", shape.k, "x", shape.n));
            const CanonicalWeight weight = testing::RandomWeight(spec);
            ASSERT_TRUE(Validate(weight).ok());
            // Not zeros: pack must not count on them. In pieces, as threads pack.
            std::vector<uint8_t> packed(layout->extent(facts).total(), 0xa5);
            for (int64_t n = 0; n < shape.n; n += ColumnRange::kStep) {
              layout->pack(weight, {n, std::min(shape.n, n + ColumnRange::kStep)}, packed.data());
            }
            CanonicalWeight back = weight;
            std::fill(back.codes.begin(), back.codes.end(), 0xee);
            std::fill(back.zeros.begin(), back.zeros.end(), 0xee);
            std::fill(back.scales.begin(), back.scales.end(), 0xee);
            layout->unpack(packed.data(), &back);
            EXPECT_EQ(back.codes, weight.codes);
            EXPECT_EQ(back.zeros, weight.zeros);
            EXPECT_EQ(back.scales, weight.scales);
            ++round_trips;
          }
        }
      }
    }
  }
  EXPECT_GT(round_trips, 500);
}

TEST(Layouts, AreFoundByName) {
  for (const Layout* layout : AllLayouts()) EXPECT_EQ(FindLayout(layout->name), layout);
  EXPECT_EQ(FindLayout("nothing"), nullptr);
}

// The worked example of kernels/layouts/README.md.
TEST(K16, PutsRow16jPlusIInNibbleJOfWordI) {
  CanonicalWeight w;
  w.k = 128;
  w.n = 8;
  w.scheme.group_size = 128;
  w.codes.resize(128 * 4);
  w.scales.resize(16);
  w.zeros.resize(8);
  // Column 2 of rows 3, 19, 35, ... 115 holds 0, 1, ... 7.
  for (int j = 0; j < 8; ++j) w.codes[(3 + 16 * j) * 4 + 1] = static_cast<uint8_t>(j);
  std::vector<uint8_t> packed(kK16Layout.extent({w.k, w.n, w.scheme}).total());
  kK16Layout.pack(w, {0, w.n}, packed.data());
  const uint8_t* word = packed.data() + (2 * 16 + 3) * 4;
  EXPECT_EQ(word[0], 0x10);
  EXPECT_EQ(word[1], 0x32);
  EXPECT_EQ(word[2], 0x54);
  EXPECT_EQ(word[3], 0x76);
}

// Every offset of the table at the head of kernels/layouts/mma16.cc.
TEST(Mma16, PutsEveryCodeWhereItsTableSays) {
  testing::WeightSpec spec;
  spec.k = 200;  // 2 blocks, the last one padded
  spec.n = 136;  // 3 tiles, the last one padded
  spec.scheme.group_size = 200;
  const CanonicalWeight w = testing::RandomWeight(spec);
  std::vector<uint8_t> packed(kMma16Layout.extent({w.k, w.n, w.scheme}).total(), 0xa5);
  kMma16Layout.pack(w, {0, w.n}, packed.data());
  constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (int64_t n = 0; n < 192; ++n) {
    for (int64_t k = 0; k < 256; ++k) {
      const int64_t record = (n / 64 * 2 + k / 128) * mma16::RecordBytes(1);
      const int64_t unit = (2 * (n % 64 / 16) + k % 128 / 64) * 512;
      const int64_t lane = n % 8 * 4 + k % 8 / 2, word = k % 64 / 16;
      const int64_t nibble = kNibble[k % 2 + 2 * (n % 16 / 8) + 4 * (k % 16 / 8)];
      const uint8_t byte = packed[record + unit + lane * 16 + word * 4 + nibble / 2];
      const int want = n >= w.n ? 0 : k < w.k ? w.Code(k, n) : w.Zero(0, n);
      ASSERT_EQ(byte >> (nibble % 2 * 4) & 15, want) << "k " << k << " n " << n;
    }
  }
}

}  // namespace
}  // namespace awqd
