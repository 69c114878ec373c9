// Bytes of codes against the layout's packer: the operands of each lane of m16n8k32, and its product.
#include "kernels/cuda/common/integers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/layouts/layout.h"
#include "kernels/layouts/mma16.h"
#include "tests/testing/random_weight.h"

namespace awqd::cuda {
namespace {

uint32_t Load(const uint8_t* at) {
  uint32_t out;
  std::memcpy(&out, at, sizeof(out));
  return out;
}

// The bytes that a lane of a warp reads from a unit, as LaneCodes of mma16.cuh does.
StepBytes LaneBytes(int bits, const uint8_t* unit, int lane, int step) {
  const auto halves = [&](const uint8_t* plane) {
    return Load(plane + lane * 8 + step / 2 * 4) >> (step % 2 * 8);
  };
  const auto rotated = [&](const uint8_t* plane) {
    const uint32_t word = Load(plane + lane * 4);
    const int by = step / 2 * 8 + step % 2;
    return by == 0 ? word : word >> by | word << (32 - by);
  };
  switch (bits) {
    case 1:
      return Int1Bytes(rotated(unit));
    case 2:
      return Int2Bytes(halves(unit));
    case 3:
      return Int3Bytes(halves(unit), rotated(unit + mma16::UnitBytes(2)));
    case 4:
      return Int4Bytes(Load(unit + lane * 16 + step * 4));
    case 5:
    case 6:
    case 7: {
      const StepBytes low = Int4Bytes(Load(unit + lane * 16 + step * 4));
      const uint8_t* const upper = unit + mma16::UnitBytes(4);
      if (bits == 5) {
        const uint32_t plane = Load(upper + lane * 4);
        return {WithUpperBits<1, 4>(low.low, plane, 2 * step),
                WithUpperBits<1, 4>(low.high, plane, 2 * step + 1)};
      }
      const uint32_t plane = Load(upper + lane * 8 + step / 2 * 4);
      const StepBytes six = {WithUpperBits<2, 4>(low.low, plane, 2 * step),
                             WithUpperBits<2, 4>(low.high, plane, 2 * step + 1)};
      if (bits == 6) return six;
      const uint32_t top = Load(upper + mma16::UnitBytes(2) + lane * 4);
      return {WithUpperBits<1, 6>(six.low, top, 2 * step),
              WithUpperBits<1, 6>(six.high, top, 2 * step + 1)};
    }
    default: {
      const uint8_t* words = unit + step / 2 * 512 + lane * 16 + step % 2 * 8;
      return {Load(words), Load(words + 4)};
    }
  }
}

class Integers : public ::testing::TestWithParam<int> {};

TEST_P(Integers, BytesAreTheCodesInTheOrderOfStagedActivations) {
  const int bits = GetParam();
  testing::WeightSpec spec;
  spec.k = mma16::kBlockK;
  spec.n = mma16::kTileN;
  spec.scheme = Symmetric(bits, 0);
  spec.scheme.scale_dtype.reset();
  const HostWeight weight = testing::RandomWeight(spec);
  const Sections sections = SectionsOf(kMma16Layout, weight.shape(), &weight);
  std::vector<uint8_t> packed(sections.total());
  kMma16Layout.pack(weight, {0, weight.n}, sections, packed.data());
  for (int warp = 0; warp < 8; ++warp) {
    const uint8_t* unit =
        packed.data() + sections.offset(Part::kCodes) + warp * mma16::UnitBytes(bits);
    for (int lane = 0; lane < 32; ++lane) {
      for (int step = 0; step < 4; ++step) {
        const StepBytes bytes = LaneBytes(bits, unit, lane, step);
        for (int byte = 0; byte < 4; ++byte) {
          const int k =
              warp % 2 * mma16::kUnitK + step * kIntegerRun + IntegerSource(lane % 4 * 4 + byte);
          const int n = warp / 2 * mma16::kRowTile + lane / 4;
          ASSERT_EQ(bytes.low >> (8 * byte) & 255, static_cast<uint32_t>(weight.Code(k, n)))
              << "warp " << warp << " lane " << lane << " step " << step << " byte " << byte;
          ASSERT_EQ(bytes.high >> (8 * byte) & 255, static_cast<uint32_t>(weight.Code(k, n + 8)))
              << "warp " << warp << " lane " << lane << " step " << step << " byte " << byte;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bits, Integers, ::testing::Range(1, 9));

// The lanes' registers of m16n8k32 as the PTX manual has them.
struct Fragments {
  uint32_t a[32][4];
  uint32_t b[32][2];
};

// d[16][8] += a b.
void Multiply(const Fragments& in, double (&d)[16][8]) {
  double a[16][32], b[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int byte = 0; byte < 4; ++byte) {
      const auto value = [&](uint32_t word) {
        return E4m3ToFloat(static_cast<uint8_t>(word >> (8 * byte)));
      };
      const int k = lane % 4 * 4 + byte;
      for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][k + i / 2 * 16] = value(in.a[lane][i]);
      for (int i = 0; i < 2; ++i) b[k + i * 16][lane / 4] = value(in.b[lane][i]);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int token = 0; token < 8; ++token) {
      for (int k = 0; k < 32; ++k) d[row][token] += a[row][k] * b[k][token];
    }
  }
}

// A record times eight tokens, as float8_consumer.cuh reads both.
TEST(E4m3, ARecordTimesTokensIsTheProduct) {
  constexpr float kScale = 4;  // of E2M1, twice what its codes are multiplied by
  for (const char* const scheme : {"e4m3c+fp32", "e2m1g32+e8m0"}) {
    const HostWeight weight = testing::RandomWeight(
        {.k = mma16::kBlockK, .n = mma16::kTileN, .scheme = ParseScheme(scheme).value()});
    const bool is_e2m1 = weight.scheme.code == CodeKind::kE2m1;
    const int bits = weight.scheme.bits;
    std::vector<uint8_t> record(mma16::CodesBytes(bits));
    mma16::PackCodes(weight, 0, 0, record.data());
    std::vector<uint8_t> x(8 * mma16::kBlockK), staged;
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint8_t>(i * 37 % 0x7f | i % 2 << 7);
    for (size_t i = 0; i < x.size(); ++i) {
      staged.push_back(x[i / kIntegerRun * kIntegerRun + IntegerSource(i % kIntegerRun)]);
    }
    const E4m3Table table = E2m1TableOf(FloatToHalf(kScale));
    for (int row_tile = 0; row_tile < 4; ++row_tile) {
      double d[16][8] = {};
      for (int operand = 0; operand < 4; ++operand) {  // 32 of K
        const uint8_t* const unit =
            record.data() + (row_tile * 2 + operand / 2) * mma16::UnitBytes(bits);
        Fragments in;
        for (int lane = 0; lane < 32; ++lane) {
          for (int s = 0; s < 2; ++s) {
            const int step = operand % 2 * 2 + s;
            if (is_e2m1) {
              E2m1ToE4m3(Load(unit + lane * 16 + step * 4), table, table, &in.a[lane][2 * s]);
            } else {
              const StepBytes bytes = LaneBytes(8, unit, lane, step);
              in.a[lane][2 * s] = bytes.low, in.a[lane][2 * s + 1] = bytes.high;
            }
            in.b[lane][s] = Load(staged.data() + lane / 4 * mma16::kBlockK + operand * 32 + s * 16 +
                                 lane % 4 * 4);
          }
        }
        Multiply(in, d);
      }
      for (int row = 0; row < 16; ++row) {
        for (int token = 0; token < 8; ++token) {
          double want = 0;
          for (int k = 0; k < mma16::kBlockK; ++k) {
            const auto code = static_cast<uint8_t>(weight.Code(k, row_tile * 16 + row));
            want += (is_e2m1 ? E2m1ToFloat(code) * kScale / kE2m1UnitE4m3 : E4m3ToFloat(code)) *
                    double{E4m3ToFloat(x[token * mma16::kBlockK + k])};
          }
          ASSERT_NEAR(d[row][token], want, 1e-9 * std::abs(want) + 1e-6)
              << scheme << " row " << row_tile * 16 + row << " token " << token;
        }
      }
    }
  }
}

TEST(MinusZeroBytes, AreExactForEveryCodeAndZero) {
  for (int zero = 0; zero < 128; ++zero) {
    for (int code = 0; code < 128; ++code) {
      const uint32_t codes = code | (127 - code) << 8 | 127 << 24;
      const uint32_t got = MinusZeroBytes(codes, BelowZero(zero));
      for (int byte = 0; byte < 4; ++byte) {
        EXPECT_EQ(static_cast<int8_t>(got >> (8 * byte)),
                  static_cast<int>(codes >> (8 * byte) & 255) - zero);
      }
    }
  }
  for (int code = 0; code < 256; ++code) {
    EXPECT_EQ(static_cast<int8_t>(MinusHalfBytes(code * 0x01010101u) >> 16), code - 128);
  }
}

TEST(IntegerSource, IsAPermutation) {
  std::set<int> seen;
  for (int at = 0; at < kIntegerRun; ++at) seen.insert(IntegerSource(at));
  EXPECT_EQ(seen.size(), static_cast<size_t>(kIntegerRun));
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), kIntegerRun - 1);
}

}  // namespace
}  // namespace awqd::cuda
