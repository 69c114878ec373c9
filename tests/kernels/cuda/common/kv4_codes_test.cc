// KV4's bit tricks for GPUs by their host code: every code at every place of a word.
#include <gtest/gtest.h>

#include "kernels/base/half.h"
#include "kernels/cuda/common/dequant.cuh"
#include "tests/kernels/kv4_oracle.h"

namespace awqd::cuda {
namespace {

TEST(Kv4Codes, CodesAreExactFloats) {
  for (uint32_t code = 0; code < 16; ++code) EXPECT_EQ(Kv4CodeToFloat(code), code);
}

TEST(Kv4Codes, FusedWordsAreInOrder) {
  for (const auto& [scale, zero] : {std::pair{1.0f, 0.0f},
                                    {0.0371f, 7.31f},
                                    {0.5f, -3.25f},
                                    {0x1p-24f, 9.0f},
                                    {1000.0f, 1400.0f},
                                    {-0.125f, 2.0f}}) {
    const uint16_t factor = FloatToHalf(scale);
    const float stored = HalfToFloat(factor);
    const uint16_t addend = FloatToHalf(kv4::OffsetOf(stored, zero));
    for (uint32_t word : {0x76543210u, 0xfedcba98u, 0x0f1e2d3cu, 0x84a6c2e1u}) {
      const Pairs got = FusedKv4Word(word, Both(factor), Both(addend));
      for (int i = 0; i < 8; ++i) {
        std::vector<uint8_t> want(2);
        testing::OracleElement(word >> (4 * i) & 15, stored, zero, Kv4Form::kFused, DType::kFp16, 0,
                               &want);
        EXPECT_EQ(got.v[i / 2] >> (16 * (i % 2)) & 0xffff, want[0] | want[1] << 8)
            << scale << " " << zero << " element " << i;
      }
    }
  }
}

// The CPU's rounding to odd gives the same as the GPU's instruction.
TEST(Kv4Codes, RoundingToOddIsTheInstruction) {
  uint32_t seed = 1;
  for (int i = 0; i < 200000; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const uint16_t scale = seed >> 16, offset = seed * 2654435761u >> 16;
    if ((scale & 0x7c00) == 0x7c00 || (offset & 0x7c00) == 0x7c00) continue;
    for (int u : {0, 1, 7, 15}) {
      const float odd =
          kv4::FusedToOdd(static_cast<float>(u), HalfToFloat(scale), HalfToFloat(offset));
      ASSERT_EQ(FloatToHalf(odd), host::FmaFp16(FloatToHalf(u), scale, offset))
          << u << " " << scale << " " << offset;
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
