// QuantizationScheme: validation names the part; print and parse are inverse.
#include "kernels/scheme.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

TEST(Scheme, PrintsAndParses) {
  for (const char* text :
       {"w4g128z",           "w4g128s",    "w8g64z+bf16",    "w3g7z+fp32",     "w8cs",
        "w8ts+fp32",         "w2g32s",     "w2cm1",          "w8cz+1",         "w4g64r",
        "w4g32r:fp32+fp32",  "w4co:bf16",  "w4g128z+int8*c", "e2m1g16+e4m3*t", "e2m1g32+e8m0",
        "e4m3b128x128+fp32", "e4m3t+fp32", "e4m3c+bf16",     "t4g64+fp32",     "w4b0x16s",
        "iq2_xxs",           "iq2_xs*t",   "iq1_m*c",        "trellis3*c",     "trellis8mcg",
        "trellis1mul1*t"}) {
    const auto scheme = ParseScheme(text);
    ASSERT_TRUE(scheme.ok()) << text << ": " << scheme.status();
    EXPECT_EQ(ToString(*scheme), text);
  }
  for (const char* text :
       {"",           "w",          "w4",       "w9g128z",     "w0cs",        "w4g0z",
        "w4g128q",    "w4g128z ",   "w4g128z+", "w4g128z+fp8", "w4b128",      "w4b128x1z",
        "a16w4g128z", "w4g128r:",   "e2m1g16*", "w4cm256",     "e3m4c",       "iq2_xxsg256",
        "iq2",        "iq3_s+fp16", "trellis",  "trellis9",    "trellis3g16", "trellis3x"}) {
    EXPECT_FALSE(ParseScheme(text).ok()) << text;
  }
}

TEST(Scheme, EveryCombinationThatIsLegalPrintsAndParses) {
  int combinations = 0;
  for (CodeKind code : {CodeKind::kUnsigned, CodeKind::kE2m1, CodeKind::kE4m3, CodeKind::kTable}) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (ZeroKind zero :
           {ZeroKind::kConstant, ZeroKind::kStored, ZeroKind::kRealBefore, ZeroKind::kRealAfter}) {
        for (int64_t rows : {0, 32}) {
          for (int64_t cols : {0, 1, 16}) {
            for (OuterKind outer : {OuterKind::kNone, OuterKind::kOne, OuterKind::kColumn}) {
              for (std::optional<DType> scale :
                   {std::optional<DType>(), std::optional(DType::kFp16),
                    std::optional(DType::kInt8)}) {
                QuantizationScheme d = {.code = code,
                                        .bits = bits,
                                        .block_rows = rows,
                                        .block_cols = cols,
                                        .zero_kind = zero,
                                        .zero_dtype = DType::kBf16,
                                        .scale_dtype = scale,
                                        .outer = outer};
                if (!d.real_zeros()) d.zero_dtype = DType::kFp16;
                if (zero == ZeroKind::kConstant) d.zero = code == CodeKind::kUnsigned ? bits : 0;
                if (!Validate(d, 64, 64).ok()) continue;
                const auto back = ParseScheme(ToString(d));
                ASSERT_TRUE(back.ok()) << ToString(d);
                EXPECT_EQ(*back, d) << ToString(d);
                ++combinations;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(combinations, 1500);
}

TEST(Scheme, ValidateNamesThePart) {
  const auto error = [](QuantizationScheme d, int64_t k = 256, int64_t n = 64) {
    return Validate(d, k, n).ToString();
  };
  const QuantizationScheme good = Asymmetric(4, 128);
  EXPECT_TRUE(Validate(good, 256, 64).ok());
  EXPECT_TRUE(Validate(good, 250, 63).ok());
  EXPECT_THAT(error(good, 0), HasSubstr("K (in features): got 0"));
  EXPECT_THAT(error(good, 256, 0), HasSubstr("N (out features): got 0"));
  EXPECT_THAT(error(good, 100), HasSubstr("group_size: got 128, expected 1 to K = 100"));
  QuantizationScheme d = good;
  d.bits = 9;
  EXPECT_THAT(error(d), HasSubstr("bits: got 9"));
  d = good;
  d.scale_dtype = DType::kInt32;
  EXPECT_THAT(error(d), HasSubstr("scale dtype: got INT32"));
  d = good;
  d.block_cols = 65;
  EXPECT_THAT(error(d), HasSubstr("block columns: got 65, expected 1 to N = 64"));
  d = good;
  d.zero_kind = ZeroKind::kRealBefore;
  d.zero_dtype = DType::kInt8;
  EXPECT_THAT(error(d), HasSubstr("zero dtype: got INT8"));
  d = good;
  d.code = CodeKind::kE2m1;
  EXPECT_THAT(error(d), HasSubstr("zero: got an integer"));
  d.bits = 8;
  EXPECT_THAT(error(d), HasSubstr("bits: got 8, expected 4"));
  d = Symmetric(8, 0);
  d.zero = 256;
  EXPECT_THAT(error(d), HasSubstr("zero: got 256"));
  d.vector = VectorCode::kIq3S;
  EXPECT_THAT(error(d), HasSubstr("code: got iq3_s, expected no vector code"));
  d = Vectors(VectorCode::kIq3S);
  EXPECT_EQ(error(d), "OK");
  EXPECT_THAT(error(d, 384), HasSubstr("K (in features): got 384, expected a multiple of 256"));
  d.scale_dtype = DType::kFp16;
  EXPECT_THAT(error(d), HasSubstr("got vector codes with other parts, expected blocks alone"));
  EXPECT_THAT(error(Vectors(VectorCode::kNone)), HasSubstr("got vector codes with other parts"));
  d = Trellis(TrellisCode::kMcg, 3);
  EXPECT_EQ(Validate(d, 16, 128).ToString(), "OK");
  EXPECT_THAT(error(d, 24, 128), HasSubstr("K (in features): got 24, expected a multiple of 16"));
  EXPECT_THAT(error(d), HasSubstr("N (out features): got 64, expected a multiple of 128"));
  d.scale_dtype = DType::kFp16;
  EXPECT_THAT(error(d, 16, 128), HasSubstr("got a trellis with other parts, expected tiles alone"));
  EXPECT_THAT(error(Trellis(TrellisCode::kMul1, 9), 16, 128), HasSubstr("bits: got 9"));
  EXPECT_THAT(error(Trellis(TrellisCode::kNone, 4), 16, 128), HasSubstr("with other parts"));
  d = good;
  d.trellis = TrellisCode::kMcg;
  EXPECT_THAT(error(d), HasSubstr("code: got a trellis, expected none for other kinds"));
}

}  // namespace
}  // namespace awqd
