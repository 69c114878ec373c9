// The CPU device, its thread pool, and what the fast rows promise beyond conformance.
#include <atomic>
#include <bit>
#include <thread>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/base/half.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/reference.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;

TEST(CpuDevice, KeepsToItsBudget) {
  auto device = OpenCpuDevice(2, 1000);
  auto first = device->Allocate(MemoryKind::kDevice, 600);
  ASSERT_THAT(first.status(), IsOk());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % 256, 0u);
  EXPECT_EQ(device->UsedBytes(), 600);
  EXPECT_EQ(device->FreeBytes(), 400);
  const auto second = device->Allocate(MemoryKind::kDevice, 500);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(second.status().ToString(), HasSubstr("asked for 500 bytes, 400 bytes are free"));
  EXPECT_THAT(device->Allocate(MemoryKind::kStaging, 500).status(), IsOk());
  first->Reset();
  EXPECT_EQ(device->UsedBytes(), 0);
  device->SetBudget(0);
  EXPECT_GT(device->FreeBytes(), 1000);
  EXPECT_EQ(device->Allocate(MemoryKind::kDevice, int64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device->Allocate(MemoryKind::kDevice, -1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CpuDevice, SeveralHaveIdsAndMemoryOfTheirOwn) {
  const auto plain = OpenDevice("cpu", {}), first = OpenDevice("cpu:0", {.budget_bytes = 1000}),
             second = OpenDevice("cpu:12", {.budget_bytes = 1000});
  ASSERT_TRUE(plain.ok() && first.ok() && second.ok());
  EXPECT_EQ((*plain)->info().id, "cpu");
  EXPECT_EQ((*first)->info().id, "cpu:0");
  EXPECT_EQ((*second)->info().id, "cpu:12");
  EXPECT_EQ((*second)->info().index, 12);
  const auto buffer = (*first)->Allocate(MemoryKind::kWeights, 600);
  ASSERT_THAT(buffer.status(), IsOk());
  EXPECT_EQ((*second)->FreeBytes(), 1000);
  for (const char* bad : {"cpu:", "cpu:-1", "cpu:x", "cpu0", "gpu:0", ""}) {
    EXPECT_EQ(OpenDevice(bad, {}).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(CpuDevice, AFailedPrepareLeavesNothingAllocated) {
  auto device = OpenCpuDevice(1, 4096);
  testing::WeightSpec spec;
  spec.k = 256;
  EXPECT_EQ(PrepareWeight(testing::RandomWeight(spec), *device).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device->UsedBytes(), 0);
}

TEST(ThreadPool, RunsEveryTaskOnceWhoeverCalls) {
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<std::atomic<int>> seen(round % 17 + 1);
        pool.ParallelFor(seen.size(), [&](int64_t task, int thread) {
          if (thread < 0 || thread >= 4) ++wrong;
          ++seen[task];
        });
        for (auto& count : seen) wrong += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Isa, TheEnvironmentOnlyLowers) {
  const char* inherited = std::getenv("AWQD_CPU_ISA");
  const std::string restore = inherited == nullptr ? "" : inherited;
  unsetenv("AWQD_CPU_ISA");
  const CpuIsa best = DetectIsa();
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    ASSERT_EQ(setenv("AWQD_CPU_ISA", std::string(Name(isa)).c_str(), 1), 0);
    EXPECT_EQ(DetectIsa(), std::min(isa, best));
  }
  ASSERT_EQ(setenv("AWQD_CPU_ISA", restore.c_str(), 1), 0);
}

// Row k holds code k; column n has n as its scale, or 0 where that passes `most` in size. Zeros are
// the caller's to fill.
CanonicalWeight EveryScaleAndCode(uint16_t most) {
  CanonicalWeight w;
  w.k = 16;
  w.n = 65536;
  w.scheme.group_size = 16;
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

// All fp16 scales that are finite x all (q, z), against one rounding in software.
TEST(DequantizeW4, EveryScaleCodeAndZero) {
  auto device = OpenCpuDevice(0, 0);
  CanonicalWeight w = EveryScaleAndCode(0x7bff);
  std::vector<uint16_t> out(w.k * w.n);
  for (int z = 0; z < 16; ++z) {
    std::fill(w.zeros.begin(), w.zeros.end(), static_cast<uint8_t>(z));
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk());
    ASSERT_THAT(Dequantize({weight->get(), {out.data(), DType::kFp16, w.k, w.n}}, {}), IsOk());
    int64_t wrong = 0;
    for (int64_t i = 0; i < w.k * w.n; ++i) {
      // Exact in float: 5 bits times 11.
      const float exact = static_cast<float>(i / w.n - z) * w.Scale(0, i % w.n);
      wrong += out[i] != FloatToHalf(exact);
    }
    ASSERT_EQ(wrong, 0) << "zero point " << z;
  }
}

// Large results go around the caches and by other loops than the small ones of conformance.
TEST(DequantizeW4, LargeResultsAreExactToo) {
  auto device = OpenCpuDevice(2, 0);
  for (const auto& [k, n, group] : {std::tuple<int64_t, int64_t, int64_t>{1056, 4128, 32},
                                    {1040, 4072, 16},
                                    {1032, 4096, 24}}) {
    testing::WeightSpec spec;
    spec.k = k;
    spec.n = n;
    spec.scheme.group_size = group;
    spec.scales = testing::Scales::kExtreme;
    const CanonicalWeight w = testing::RandomWeight(spec);
    const auto weight = PrepareWeight(w, *device).value();
    for (DType type : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      const int64_t size = SizeOf(type);
      const Buffer got = device->Allocate(MemoryKind::kDevice, k * n * size).value();
      std::vector<uint8_t> want(k * n * size);
      ASSERT_THAT(Dequantize({weight.get(), {got.data(), type, k, n}}, {}), IsOk());
      for (int64_t i = 0; i < k * n; ++i) {
        StoreElement(want.data(), type, i, ExactWeight(w, i / n, i % n));
      }
      EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0)
          << Name(type) << " " << k << " x " << n << " group " << group;
    }
  }
}

// y of rows [first, first + m) of x, in FP32.
std::vector<float> Product(const DeviceWeight& weight, Device& device,
                           const std::vector<uint8_t>& x, int64_t first, int64_t m) {
  const int64_t k = weight.shape.k, n = weight.shape.n;
  std::vector<float> y(m * n);
  auto workspace =
      device.Allocate(MemoryKind::kDevice, WorkspaceBytes(weight, Path::kFused, m)).value();
  EXPECT_THAT(QuantizedMatmul({&weight,
                               {x.data() + first * k * 2, DType::kFp16, m, k},
                               {y.data(), DType::kFp32, m, n},
                               nullptr,
                               workspace.data()},
                              Path::kFused, {}),
              IsOk());
  return y;
}

struct ProductShape {
  int64_t k, n, group;
};
// Groups of whole blocks, of parts of one, of padded runs; K of several pieces, which end within
// a group.
constexpr ProductShape kProductShapes[] = {
    {768, 264, 128}, {768, 264, 32}, {768, 264, 24}, {4608, 24, 128}, {4608, 24, 96}};

testing::WeightSpec SpecOf(const ProductShape& shape) {
  testing::WeightSpec spec;
  spec.k = shape.k;
  spec.n = shape.n;
  spec.scheme.group_size = shape.group;
  return spec;
}

// All fp16 scales that are finite x all (q, z): x is the identity, so that y is the weight, whose
// tables are made with roundings of their own.
TEST(QmatmulA16W4, EveryScaleCodeAndZero) {
  auto device = OpenCpuDevice(0, 0);
  // Larger scales overflow in products, and 0 * infinity of the zeros in x would be no number.
  // Neighbours in a tile are alike: blocks of ordinary scales and of others are both met.
  CanonicalWeight w = EveryScaleAndCode(0x6800);
  std::vector<uint8_t> x(16 * 16 * 2);
  for (int64_t k = 0; k < 16; ++k) StoreElement(x.data(), DType::kFp16, k * 17, 1.0f);
  for (int z = 0; z < 16; ++z) {
    std::fill(w.zeros.begin(), w.zeros.end(), static_cast<uint8_t>(z));
    const auto weight = PrepareWeight(w, *device);
    ASSERT_THAT(weight.status(), IsOk());
    const std::vector<float> y = Product(**weight, *device, x, 0, 16);
    int64_t wrong = 0;
    for (int64_t i = 0; i < w.k * w.n; ++i) wrong += y[i] != ProductWeight(w, i / w.n, i % w.n);
    ASSERT_EQ(wrong, 0) << "zero point " << z;
  }
}

// A row of a batch has the bits that it has alone.
TEST(QmatmulA16W4, ARowDoesNotDependOnItsBatch) {
  auto device = OpenCpuDevice(0, 0);
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
          << "M " << m << " K " << shape.k << " group " << shape.group;
    }
  }
}

// AVX2 and AVX-512 add in the same order.
TEST(QmatmulA16W4, VectorInstructionSetsAgreeOnBits) {
  if (DetectIsa() != CpuIsa::kAvx512) GTEST_SKIP() << "needs AVX-512, allowed by AWQD_CPU_ISA";
  auto wide = OpenCpuDevice(0, 0);
  const char* inherited = std::getenv("AWQD_CPU_ISA");
  const std::string restore = inherited == nullptr ? "" : inherited;
  ASSERT_EQ(setenv("AWQD_CPU_ISA", "avx2", 1), 0);
  auto narrow = OpenCpuDevice(0, 0);
  ASSERT_EQ(setenv("AWQD_CPU_ISA", restore.c_str(), 1), 0);
  ASSERT_EQ(narrow->info().isa, CpuIsa::kAvx2);
  for (const ProductShape& shape : kProductShapes) {
    const CanonicalWeight canonical = testing::RandomWeight(SpecOf(shape));
    const auto a = PrepareWeight(canonical, *wide).value();
    const auto b = PrepareWeight(canonical, *narrow).value();
    const std::vector<uint8_t> x = testing::RandomMatrix(16, shape.k, DType::kFp16, 2);
    for (int64_t m : {1, 4, 16}) {
      const std::vector<float> y = Product(*a, *wide, x, 0, m);
      const std::vector<float> z = Product(*b, *narrow, x, 0, m);
      EXPECT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0)
          << "M " << m << " K " << shape.k << " group " << shape.group;
    }
  }
}

}  // namespace
}  // namespace awqd
