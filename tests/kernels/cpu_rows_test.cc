// Properties of the CPU rows beyond conformance: every code, scale and zero; large results; bits
// that depend neither on the batch nor, without VNNI, on the vector instructions.
#include <cmath>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/base/half.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "tests/kernels/cpu_product.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using testing::IsOk;

// Row k holds code k. Column n has n as its scale, or 0 if its magnitude exceeds `most`. The caller
// fills zeros.
HostWeight EveryScaleAndCode(uint16_t most) {
  HostWeight w;
  w.k = 16;
  w.n = 65536;
  w.codes.resize(w.k * w.n / 2);
  w.zeros.resize(w.n);
  w.scales.resize(w.n * 2);
  for (int64_t k = 0; k < 16; ++k) {
    std::fill_n(w.codes.begin() + k * w.n / 2, w.n / 2, static_cast<uint8_t>(k * 17));
  }
  for (int64_t n = 0; n < w.n; ++n) {
    const uint16_t scale = (n & 0x7fff) > most ? 0 : static_cast<uint16_t>(n);
    std::memcpy(&w.scales[n * 2], &scale, 2);
  }
  return w;
}

// All finite FP16 scales x all (q, z), against one rounding in software.
TEST(CpuDequantize, EveryScaleCodeAndZero) {
  auto device = OpenCpuDevice();
  HostWeight w = EveryScaleAndCode(0x7bff);
  std::vector<uint16_t> out(w.k * w.n);
  for (int z = 0; z < 16; ++z) {
    std::fill(w.zeros.begin(), w.zeros.end(), static_cast<uint8_t>(z));
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk());
    ASSERT_THAT(Dequantize({weight->get(), {out.data(), DType::kFp16, w.k, w.n}}, nullptr, {}),
                IsOk());
    int64_t wrong = 0;
    for (int64_t i = 0; i < w.k * w.n; ++i) {
      // Exact in float: 5 bits times 11.
      const float exact = static_cast<float>(i / w.n - z) * w.Scale(0, i % w.n);
      wrong += out[i] != FloatToHalf(exact);
    }
    ASSERT_EQ(wrong, 0) << "zero point " << z;
  }
}

// Row k holds code k, for all codes; column n has the zero n modulo their number, if zeros are
// stored; groups and the rest are random.
HostWeight EveryCode(const QuantizationScheme& scheme) {
  testing::WeightSpec spec;
  spec.k = int64_t{1} << scheme.bits;
  spec.n = 264;
  spec.scheme = scheme;
  HostWeight w = testing::RandomWeight(spec);
  for (int64_t k = 0; k < w.k; ++k) {
    int byte = 0;
    for (int at = 0; at < 8; at += w.code_bits()) byte |= static_cast<int>(k) << at;
    std::fill_n(w.codes.begin() + k * w.row_bytes(), w.row_bytes(), static_cast<uint8_t>(byte));
  }
  if (scheme.zero_kind == ZeroKind::kStored) {
    for (size_t i = 0; i < w.zeros.size(); ++i) w.zeros[i] = static_cast<uint8_t>(i % w.n % w.k);
  }
  return w;
}

// Every kind of code with every kind of zero and scale that has arithmetic of its own.
constexpr const char* kEveryKind[] = {
    "w1cz",      "w2cz",      "w3cz",        "w4cz",      "w5cz",   "w6cz",
    "w7cz",      "w8cz",      "w8cs",        "w8cm3",     "w8g32z", "w8g32s+fp32",
    "w1cs+bf16", "w2g2z+1",   "w3cr:fp32",   "w4cr",      "w4co",   "w8cr",
    "w8co:bf16", "w8cs+1*c",  "w8cs+fp32*t", "w4cs+int8", "e2m1c",  "e2m1c+e4m3*t",
    "e2m1cr",    "e4m3c",     "e4m3c+fp32",  "e4m3g16",   "e4m3co", "e4m3c+e8m0*c",
    "t4c+fp32",  "t4co+bf16", "w4cm200",     "w3g4z*c"};

TEST(CpuDequantize, EveryCodeOfEveryKind) {
  auto device = OpenCpuDevice({.cpu_threads = 1});
  for (const char* text : kEveryKind) {
    const HostWeight w = EveryCode(ParseScheme(text).value());
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk()) << text;
    for (DType type : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      std::vector<uint8_t> got(w.k * w.n * SizeOf(type)), want = got;
      ASSERT_THAT(Dequantize({weight->get(), {got.data(), type, w.k, w.n}}, nullptr, {}), IsOk());
      int64_t nans = 0;
      for (int64_t i = 0; i < w.k * w.n; ++i) {
        const float exact = WeightValue(w, i / w.n, i % w.n);
        StoreElement(want.data(), type, i, exact);
        if (!std::isnan(exact)) continue;
        ++nans;  // with any bits
        EXPECT_TRUE(std::isnan(LoadElement(got.data(), type, i))) << text << " element " << i;
        StoreElement(want.data(), type, i, LoadElement(got.data(), type, i));
      }
      EXPECT_EQ(testing::FirstDifference(got, want), -1) << text << " " << Name(type);
      EXPECT_EQ(nans, w.scheme.code == CodeKind::kE4m3 ? 2 * w.n : 0);
    }
  }
}

// Every legal kind of weight has rows that are meant to serve it.
TEST(CpuRows, TheOracleServesNothing) {
  const DeviceInfo device = OpenCpuDevice({.cpu_threads = 1})->info();
  int served = 0;
  for (const char* code : {"w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "e2m1", "e4m3", "t4"}) {
    for (const char* block : {"c", "t", "g1", "g7", "g16", "g48", "b1x8", "b32x32", "b0x3"}) {
      for (const char* zero : {"", "z", "s", "m7", "r", "o", "r:fp32", "o:bf16"}) {
        for (const char* scale : {"", "+bf16", "+fp32", "+e4m3", "+e8m0", "+int8", "+1"}) {
          for (const char* outer : {"", "*c", "*t"}) {
            const QuantizationScheme d =
                ParseScheme(absl::StrCat(code, block, zero, scale, outer)).value();
            if (!Validate(d, 100, 33).ok()) continue;
            const auto plan = Select({100, 33, d}, device, AllKernels());
            ASSERT_THAT(plan.status(), IsOk()) << ToString(d);
            EXPECT_NE(plan->rows.dequantize, &kCpuReferenceDequantize) << ToString(d);
            EXPECT_NE(plan->rows.Matmul(Path::kFused, 1), &kCpuReferenceMatmul) << ToString(d);
            EXPECT_NE(plan->rows.Matmul(Path::kFused, 1), nullptr) << ToString(d);
            ++served;
          }
        }
      }
    }
  }
  EXPECT_GT(served, 5000);
}

// Large results bypass the caches, in other loops than the small results of conformance.
TEST(CpuDequantize, LargeResultsAreExactToo) {
  auto device = OpenCpuDevice({.cpu_threads = 2});
  for (const auto& [k, n, scheme] :
       {std::tuple<int64_t, int64_t, const char*>{1056, 4128, "w4g32z"},
        {1040, 4072, "w4g16z"},
        {1032, 4096, "w4g24z"},
        {1056, 4128, "w8g32z"},
        {1040, 4100, "e4m3g128+fp32*c"},
        {1056, 4128, "w3g32z*c"},
        {1056, 4128, "e2m1g32+e8m0"},
        {1040, 4128, "w2g16r+fp32"},
        {1040, 4128, "w1g16o"}}) {
    testing::WeightSpec spec;
    spec.k = k;
    spec.n = n;
    spec.scheme = ParseScheme(scheme).value();
    spec.scales = testing::Scales::kExtreme;
    const HostWeight w = testing::RandomWeight(spec);
    const auto weight = PrepareWeight(w, *device).value();
    for (DType type : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      const int64_t size = SizeOf(type);
      const Buffer got = device->Allocate(MemoryKind::kDevice, k * n * size).value();
      std::vector<uint8_t> want(k * n * size);
      ASSERT_THAT(Dequantize({weight.get(), {got.data(), type, k, n}}, nullptr, {}), IsOk());
      for (int64_t i = 0; i < k * n; ++i) {
        StoreElement(want.data(), type, i, WeightValue(w, i / n, i % n));
      }
      EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0)
          << Name(type) << " " << k << " x " << n << " " << scheme;
    }
  }
}

struct ProductShape {
  int64_t k, n;
  const char* scheme;
};
// Groups of whole blocks, of parts of one, of padded runs; K of several pieces, which end within a
// group; all ways to decode.
constexpr ProductShape kProductShapes[] = {
    {768, 264, "w4g128z"},          {768, 264, "w4g32z"},
    {768, 264, "w4g24z"},           {4608, 24, "w4g128z"},
    {4608, 24, "w4g96z"},           {4600, 21, "w4g128s+bf16"},
    {4608, 24, "w3g64z"},           {800, 37, "w2g128s"},
    {4608, 24, "w1g96z"},           {4608, 24, "w8cs"},
    {4600, 21, "w8g128z*c"},        {4608, 24, "e4m3c+fp32"},
    {800, 37, "e4m3b128x128+bf16"}, {800, 40, "t4g64o+fp32"}};

testing::WeightSpec SpecOf(const ProductShape& shape) {
  testing::WeightSpec spec;
  spec.k = shape.k;
  spec.n = shape.n;
  spec.scheme = ParseScheme(shape.scheme).value();
  if (spec.scheme.block_cols > shape.n) spec.scheme.block_cols = 0;
  return spec;
}

// The factor that a product in FP32 with FP16 scales uses: the result of Dequantize to FP16.
float RoundedWeight(const HostWeight& w, int64_t row, int64_t col) {
  return HalfToFloat(FloatToHalf(WeightValue(w, row, col)));
}

// All fp16 scales that are finite x all (q, z): x is the identity, so that y is the weight. Tables
// of weights are made with roundings of their own; INT16 is multiplied by the code less its
// zero, and the scale follows.
TEST(CpuQmatmulA16, EveryScaleCodeAndZero) {
  auto device = OpenCpuDevice();
  // Larger scales overflow in products, and 0 * infinity from zeros in x would be NaN. Neighbours
  // in a tile are alike, so both ordinary and other blocks of scales occur.
  HostWeight w = EveryScaleAndCode(0x6800);
  std::vector<uint8_t> x(16 * 16 * 2);
  for (int64_t k = 0; k < 16; ++k) StoreElement(x.data(), DType::kFp16, k * 17, 1.0f);
  for (int z = 0; z < 16; ++z) {
    std::fill(w.zeros.begin(), w.zeros.end(), static_cast<uint8_t>(z));
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk());
    const std::vector<float> y = Product(**weight, *device, x, 0, 16);
    int64_t wrong = 0;
    for (int64_t i = 0; i < w.k * w.n; ++i) {
      const int64_t row = i / w.n, col = i % w.n;
      wrong += y[i] != (device->info().isa >= CpuIsa::kNeonDot ? WeightValue(w, row, col)
                                                               : RoundedWeight(w, row, col));
    }
    ASSERT_EQ(wrong, 0) << "zero point " << z;
  }
}

// The same for every code of every kind: the rounding of weights that are multiplied directly
// differs by one from Dequantize.
TEST(CpuQmatmulA16, EveryCodeOfEveryKind) {
  auto device = OpenCpuDevice({.cpu_threads = 1});
  for (const char* text : kEveryKind) {
    HostWeight w = EveryCode(ParseScheme(text).value());
    if (w.scheme.code == CodeKind::kE4m3) {  // a NaN would spoil every sum of its column
      for (int64_t k : {0x7f, 0xff}) {
        std::fill_n(w.codes.begin() + k * w.row_bytes(), w.row_bytes(), uint8_t{0});
      }
    }
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk()) << text;
    std::vector<uint8_t> x(w.k * w.k * 2);
    for (int64_t k = 0; k < w.k; ++k) StoreElement(x.data(), DType::kFp16, k * (w.k + 1), 1.0f);
    const std::vector<float> y = Product(**weight, *device, x, 0, w.k);
    const bool halves = w.scheme.bits <= 4 && w.scheme.is_integer();
    for (int64_t i = 0; i < w.k * w.n; ++i) {
      const float exact = WeightValue(w, i / w.n, i % w.n);
      const float most = w.Outer(i % w.n) * 448 * std::fabs(w.Scale(0, i % w.n)) + 1;
      ASSERT_NEAR(y[i], exact, halves ? std::fabs(exact) * 0x1p-11f + 0x1p-25f : most * 0x1p-22f)
          << text << " element " << i;
    }
  }
}

// A row of a batch has the bits that it has alone.
TEST(CpuQmatmulA16, ARowDoesNotDependOnItsBatch) {
  auto device = OpenCpuDevice();
  for (const ProductShape& shape : kProductShapes) {
    const testing::WeightSpec spec = SpecOf(shape);
    const auto weight = PrepareWeight(testing::RandomWeight(spec), *device).value();
    const int64_t max_m = 200;
    const std::vector<uint8_t> x = testing::RandomMatrix(max_m, spec.k, DType::kFp16, 1);
    std::vector<float> alone;
    for (int64_t m = 0; m < max_m; ++m) {
      const std::vector<float> row = Product(*weight, *device, x, m, 1);
      alone.insert(alone.end(), row.begin(), row.end());
    }
    for (int64_t m : {2, 3, 4, 5, 6, 7, 8, 13, 49, 64, 193, 200}) {
      const std::vector<float> y = Product(*weight, *device, x, 0, m);
      EXPECT_EQ(std::memcmp(y.data(), alone.data(), m * spec.n * sizeof(float)), 0)
          << "M " << m << " K " << shape.k << " " << shape.scheme;
    }
  }
}

// AVX2 and AVX-512 add in the same order. (AVX-512 VNNI has FP16 activations as integers.)
TEST(CpuQmatmulA16, VectorInstructionSetsAgreeOnBits) {
  if (DetectIsa() < CpuIsa::kAvx512) GTEST_SKIP() << "needs AVX-512, allowed by AWQD_CPU_ISA";
  auto wide = OpenCpuDeviceOf("avx512");
  auto narrow = OpenCpuDeviceOf("avx2");
  ASSERT_EQ(narrow->info().isa, CpuIsa::kAvx2);
  for (const ProductShape& shape : kProductShapes) {
    const HostWeight canonical = testing::RandomWeight(SpecOf(shape));
    const auto a = PrepareWeight(canonical, *wide).value();
    const auto b = PrepareWeight(canonical, *narrow).value();
    const std::vector<uint8_t> x = testing::RandomMatrix(16, shape.k, DType::kFp16, 2);
    for (int64_t m : {1, 4, 16}) {
      const std::vector<float> y = Product(*a, *wide, x, 0, m);
      const std::vector<float> z = Product(*b, *narrow, x, 0, m);
      EXPECT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0)
          << "M " << m << " K " << shape.k << " " << shape.scheme;
    }
  }
}

}  // namespace
}  // namespace awqd
