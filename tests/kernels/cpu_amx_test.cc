// AMX's products have the bits of AVX-512 VNNI's: with AMX instructions if the machine has them,
// and in software (emulated_amx.h).
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/k16_access.h"
#include "kernels/cpu/stand_ins.h"
#include "tests/kernels/cpu_product.h"
#include "tests/kernels/emulated_amx.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using cpu::K16Weight;
using cpu::QuadBodies;
using cpu::StandInBodies;

struct Amx {
  const char* name;
  CpuIsa needs;
  const QuadBodies& quads;
  const StandInBodies& digits;
};

class CpuAmx : public ::testing::TestWithParam<Amx> {
 protected:
  void SetUp() override {
    if (DetectIsa() < GetParam().needs) {
      GTEST_SKIP() << "needs " << Name(GetParam().needs) << ", allowed by AWQD_CPU_ISA";
    }
  }

  std::shared_ptr<const DeviceWeight> Weight(const char* description, int64_t k) {
    testing::WeightSpec spec;
    spec.k = k;
    spec.n = 71;
    spec.description = ParseDescription(description).value();
    return PrepareWeight(testing::RandomWeight(spec), device_).value();
  }
  // 64-byte aligned.
  Buffer Memory(int64_t bytes) { return device_.Allocate(MemoryKind::kDevice, bytes).value(); }
  Buffer Scratch(const K16Weight& w) {
    const int64_t panels = cpu::IntegerBodiesFor(CpuIsa::kAvx512Vnni).scaled_scratch_bytes;
    return Memory(std::max(panels, 3 * w.groups * 8 * 4));
  }

  // Computes all of y in two calls, the first with one panel.
  template <typename Bodies, typename Task>
  std::vector<float> Multiply(const Bodies& bodies, const K16Weight& w, Task task) {
    Buffer scratch = Scratch(w);
    std::vector<float> y(task.rows * w.n, -1);
    task.y = y.data();
    task.y_stride = w.n;
    task.y_type = cpu::Element::kFp32;
    task.scratch = scratch.data();
    task.tile_end = 4;
    bodies.product(w, task);
    task.tile_begin = 4;
    task.tile_end = w.tiles;
    bodies.product(w, task);
    return y;
  }

  std::vector<float> Quantized(const QuadBodies& bodies, const K16Weight& w, int64_t m) {
    const std::vector<uint8_t> x = testing::RandomMatrix(m, w.k, DType::kInt8, 3);
    Buffer values = Memory(m * w.blocks * cpu::kIntegerRows);
    std::vector<int32_t> sums(m * w.groups);
    std::vector<float> scales(m);
    for (int64_t t = 0; t < m; ++t) {
      scales[t] = 0.01f * static_cast<float>(t + 1);
      bodies.order(w, reinterpret_cast<const int8_t*>(x.data()) + t * w.k,
                   {.values = static_cast<int8_t*>(values.data()) + t * w.blocks * 128,
                    .sums = sums.data() + t * w.groups});
    }
    return Multiply(bodies, w,
                    cpu::QuadTask{.x = static_cast<const int8_t*>(values.data()),
                                  .sums = sums.data(),
                                  .x_scale = scales.data(),
                                  .rows = m});
  }

  std::vector<float> Floating(const StandInBodies& bodies, const K16Weight& w, int64_t m) {
    const std::vector<uint8_t> x = testing::RandomMatrix(m, w.k, DType::kFp16, 4);
    Buffer memory = Memory(cpu::StandIns::Bytes(w, m));
    cpu::StandIns tokens(w, m, memory.data());
    tokens.Make(bodies.make, {x.data(), DType::kFp16, m, w.k}, 0, m, device_);
    tokens.ForNeighbours(m, [&](int64_t, int64_t count, bool made) {
      EXPECT_TRUE(made && count == m) << "random tokens suit integers";
    });
    const cpu::TokenIntegers all = tokens.Of(0);
    return Multiply(
        bodies, w,
        cpu::StandInTask{.values = all.values, .steps = all.steps, .sums = all.sums, .rows = m});
  }

  CpuDevice device_{1, 0, std::nullopt, false};
};

// From less than a register to all tokens of a task, and ragged counts.
constexpr int64_t kTokens[] = {1, 16, 21, 32, 45, 192};

TEST_P(CpuAmx, QuantisedActivations) {
  for (const char* description :
       {"w4g128z", "w4g128s", "w4g128r", "w4g128o", "w4g64z", "w4g192z+bf16", "w4g32z",
        "w4g128m200", "w4g640m128", "w4g640z", "w4cz", "w4co", "w8g128z", "w8g64r", "w8g1024z",
        "w8cs", "w8cr*c"}) {
    for (const int64_t k : {200, 1500}) {
      const auto weight = Weight(description, k);
      const K16Weight w = cpu::AccessK16(*weight);
      for (const int64_t m : kTokens) {
        ASSERT_EQ(Quantized(GetParam().quads, w, m), Quantized(cpu::kAvx512VnniQuads, w, m))
            << description << " k " << k << ", " << m << " tokens";
      }
    }
  }
}

TEST_P(CpuAmx, FloatingActivations) {
  for (const char* description :
       {"w4g128z", "w4g128s", "w4g128r", "w4g128m200", "w4g128m128", "w4g384o", "w4g640z+bf16",
        "w4cz", "w4co", "w8g128z", "w8g1024r", "w8cs", "w8cr*c"}) {
    for (const int64_t k : {200, 1500}) {
      const auto weight = Weight(description, k);
      const K16Weight w = cpu::AccessK16(*weight);
      for (const int64_t m : kTokens) {
        ASSERT_EQ(Floating(GetParam().digits, w, m), Floating(cpu::kAvx512VnniPairs, w, m))
            << description << " k " << k << ", " << m << " tokens";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Registers, CpuAmx,
                         ::testing::Values(Amx{"emulated", CpuIsa::kAvx512Vnni,
                                               cpu::kEmulatedAmxQuads, cpu::kEmulatedAmxDigits},
                                           Amx{"amx", CpuIsa::kAmx, cpu::kAmxQuads,
                                               cpu::kAmxDigits}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace awqd
