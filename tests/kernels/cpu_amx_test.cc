// Products of integers have the bits of AVX-512's panels: those with tokens in lanes, those of AMX
// with its instructions if the machine has them, and in software (emulated_amx.h).
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/integer_product.h"
#include "tests/kernels/cpu_product.h"
#include "tests/kernels/emulated_amx.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using cpu::IntegerActivations;
using cpu::IntegerProduct;
using cpu::IntegerTask;
using cpu::K16Weight;

struct Products {
  const char* name;
  CpuIsa needs;
  const IntegerProduct& int8;
  const IntegerProduct& int16;
};

class CpuIntegerProducts : public ::testing::TestWithParam<Products> {
 protected:
  void SetUp() override {
    if (DetectIsa() < GetParam().needs) {
      GTEST_SKIP() << "needs " << Name(GetParam().needs) << ", allowed by AWQD_CPU_ISA";
    }
  }

  std::shared_ptr<const DeviceWeight> Weight(const char* scheme, int64_t k) {
    testing::WeightSpec spec;
    spec.k = k;
    spec.n = 71;
    spec.scheme = ParseScheme(scheme).value();
    return PrepareWeight(testing::RandomWeight(spec), device_).value();
  }
  // The sums of all of y, in two tasks.
  std::vector<float> Multiply(const IntegerProduct& product, const K16Weight& w, DType type,
                              int64_t m, const float* scales) {
    const std::vector<uint8_t> x = testing::RandomMatrix(m, w.k, type, 3);
    const int64_t scratch = std::max(cpu::IntegersFor(CpuIsa::kAvx512Vnni).panel_scratch_bytes,
                                     cpu::ColumnScratchBytes(w.groups, m));
    Buffer memory =
        device_.Allocate(MemoryKind::kDevice, IntegerActivations::Bytes(w, product, m, 1, scratch))
            .value();
    IntegerActivations tokens(w, product, m, scratch, memory.data(), device_);
    tokens.Convert({x.data(), type, m, w.k}, 0, m);
    tokens.ForNeighbours(m, [&](int64_t, int64_t count, bool held) {
      EXPECT_TRUE(held && count == m) << "INT16 holds random tokens well";
    });
    std::vector<float> y(m * w.n, -1);
    IntegerTask task = tokens.Task(0, m, {y.data(), DType::kFp32, m, w.n});
    task.x_scale = scales;
    tokens.Run(product.product, task, {.tiles_per_task = 8, .tile_tasks = (w.tiles + 7) / 8});
    return y;
  }

  std::vector<float> Quantized(const IntegerProduct& product, const K16Weight& w, int64_t m) {
    std::vector<float> scales(m);
    for (int64_t t = 0; t < m; ++t) scales[t] = 0.01f * static_cast<float>(t + 1);
    return Multiply(product, w, DType::kInt8, m, scales.data());
  }

  std::vector<float> Floating(const IntegerProduct& product, const K16Weight& w, int64_t m) {
    return Multiply(product, w, DType::kFp16, m, nullptr);
  }

  CpuDevice device_{{.cpu_threads = 1}, std::nullopt};
};

// From less than a register to all tokens of a task, and ragged counts.
constexpr int64_t kTokens[] = {1, 8, 16, 21, 32, 45, 256};

TEST_P(CpuIntegerProducts, QuantisedActivations) {
  for (const char* scheme : {"w4g128z", "w4g128s", "w4g128r", "w4g128o", "w4g64z", "w4g192z+bf16",
                             "w4g32z", "w4g128m200", "w4g640m128", "w4g640z", "w4cz", "w4co",
                             "w8g128z", "w8g64r", "w8g1024z", "w8cs", "w8cr*c"}) {
    for (const int64_t k : {200, 1500}) {
      const auto weight = Weight(scheme, k);
      const K16Weight w = cpu::AccessK16(*weight);
      for (const int64_t m : kTokens) {
        if (cpu::MaxInt8Tokens(w, GetParam().int8) == 0) continue;
        ASSERT_EQ(Quantized(GetParam().int8, w, m),
                  Quantized(cpu::kAvx512Integers.int8_panels, w, m))
            << scheme << " k " << k << ", " << m << " tokens";
      }
    }
  }
}

TEST_P(CpuIntegerProducts, FloatingActivations) {
  for (const char* scheme :
       {"w4g128z", "w4g128s", "w4g128r", "w4g128m200", "w4g128m128", "w4g384o", "w4g640z+bf16",
        "w4cz", "w4co", "w8g128z", "w8g1024r", "w8cs", "w8cr*c"}) {
    for (const int64_t k : {200, 1500}) {
      const auto weight = Weight(scheme, k);
      const K16Weight w = cpu::AccessK16(*weight);
      for (const int64_t m : kTokens) {
        ASSERT_EQ(Floating(GetParam().int16, w, m),
                  Floating(cpu::kAvx512Integers.int16_panels, w, m))
            << scheme << " k " << k << ", " << m << " tokens";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Bodies, CpuIntegerProducts,
    ::testing::Values(Products{"lanes", CpuIsa::kAvx512Vnni, cpu::kAvx512VnniIntegers.int8_lanes,
                               cpu::kAvx512VnniIntegers.int16_lanes},
                      Products{"emulated", CpuIsa::kAvx512Vnni, cpu::kEmulatedAmxInt8,
                               cpu::kEmulatedAmxInt16},
                      Products{"amx", CpuIsa::kAmx, cpu::kAmxInt8, cpu::kAmxInt16}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace awqd
