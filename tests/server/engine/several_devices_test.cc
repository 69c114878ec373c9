// Several CPU devices: replicas and columns give the results of one device.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "server/engine/matmul_work.h"
#include "tests/server/engine/several_devices_fixture.h"
#include "tests/testing/find_kernel.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/rendezvous.h"

namespace awqd::engine {
namespace {

using Answer = Machine::Answer;
using testing::RandomMatrix;
using testing::RandomWeight;
using testing::WeightSpec;

WeightSpec RandomSpec(std::mt19937& random) {
  WeightSpec spec;
  spec.k = 32 * (1 + random() % 6);
  spec.n = 8 * (1 + random() % 60);
  spec.scheme.block_rows = random() % 3 == 0 ? 0 : 32;
  spec.bias = random() % 2 == 0;
  spec.seed = random();
  return spec;
}

double Difference(const Answer& got, const Answer& want, DType dtype) {
  const std::vector<uint8_t> bytes(got.bytes.begin(), got.bytes.end());
  const std::vector<uint8_t> expected(want.bytes.begin(), want.bytes.end());
  if (bytes.size() != expected.size()) return HUGE_VAL;
  std::vector<double> values;
  for (size_t i = 0; i < expected.size() / SizeOf(dtype); ++i) {
    values.push_back(testing::GetElement(expected, dtype, static_cast<int64_t>(i)));
  }
  return testing::FrobeniusError(bytes, dtype, values);
}

// The largest difference that another order of k sums in FP32 makes, including the rounding of the
// result.
double Reordering(int64_t k, DType dtype) {
  const double rounding = dtype == DType::kFp16 ? 0x1p-11 : dtype == DType::kBf16 ? 0x1p-8 : 0;
  return static_cast<double>(k) * 0x1p-24 + rounding;
}

// Bit for bit: ragged N, every dtype, both paths, a bias of the weight or of the request, 2 to 5
// devices.
TEST_P(SeveralDevicesTest, ProductsAreThoseOfOneDevice) {
  std::mt19937 random(7);
  Machine one(1, GetParam());
  std::vector<std::unique_ptr<Machine>> machines;
  for (int devices = 2; devices <= 5; ++devices) {
    machines.push_back(std::make_unique<Machine>(devices, GetParam()));
  }
  for (int round = 0; round < 60; ++round) {
    const WeightSpec spec = RandomSpec(random);
    const HostWeight weight = RandomWeight(spec);
    const int64_t tokens = round % 5 == 0 ? 40 : 1 + random() % 7;
    const DType dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[random() % 3];
    const std::vector<uint8_t> x = RandomMatrix(tokens, spec.k, dtype, random());
    std::vector<float> bias;
    for (int64_t i = 0; i < spec.n && round % 3 == 0; ++i) bias.push_back(0.25f * i);
    for (Path path : {Path::kFused, Path::kDequantize}) {
      const auto run = [&](Machine& machine, bool cut) {
        MatmulWork work = machine.Product(machine.Place(weight, cut), x, dtype);
        work.bias = bias;
        work.path = path;
        return machine.Run(std::move(work));
      };
      const Answer expected = run(one, false);
      ASSERT_TRUE(expected.status.ok()) << expected.status;
      for (const auto& machine : machines) {
        for (bool cut : {false, true}) {
          const Answer answer = run(*machine, cut);
          ASSERT_TRUE(answer.status.ok()) << answer.status;
          const bool same = answer.bytes == expected.bytes;
          // A dense product of fewer columns may be summed in another order.
          const bool near = cut && path == Path::kDequantize &&
                            Difference(answer, expected, dtype) <= Reordering(spec.k, dtype);
          ASSERT_TRUE(same || near)
              << "k " << spec.k << ", n " << spec.n << ", tokens " << tokens << ", "
              << machine->engine().devices().size() << " devices, cut " << cut << ", " << Name(path)
              << ": " << Difference(answer, expected, dtype);
          EXPECT_EQ(answer.report.path, path);
        }
      }
    }
  }
}

TEST_P(SeveralDevicesTest, BlocksAcrossBordersHaveTheBitsOfOneDevice) {
  std::mt19937 random(8);
  Machine one(1, GetParam()), three(3, GetParam());
  for (int round = 0; round < 40; ++round) {
    const WeightSpec spec = RandomSpec(random);
    const HostWeight weight = RandomWeight(spec);
    DequantizeWork work;
    work.out_dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[random() % 3];
    const auto expected_weight = one.Place(weight, false);
    for (bool cut : {false, true}) {
      const auto placed = three.Place(weight, cut);
      for (int block = 0; block < 10; ++block) {
        work.row_begin = random() % spec.k;
        work.rows = random() % (spec.k - work.row_begin + 1);
        work.col_begin = random() % spec.n;
        work.cols = random() % (spec.n - work.col_begin + 1);
        work.weight = expected_weight;
        const Answer expected = one.Run(work);
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        work.weight = placed;
        const Answer answer = three.Run(work);
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        ASSERT_TRUE(answer.bytes == expected.bytes)
            << "n " << spec.n << ", columns " << work.col_begin << " + " << work.cols;
      }
    }
  }
}

// Down projections of gated MLPs: the parts of a row are summed, then come bias, activation and
// rounding. Groups have 64 rows or all, so that borders at multiples of 128 cut none.
TEST_P(SeveralDevicesTest, ProductsCutAtRows) {
  std::mt19937 random(9);
  Machine one(1, GetParam()), three(3, GetParam());
  for (int round = 0; round < 24; ++round) {
    WeightSpec spec = RandomSpec(random);
    spec.k = 384 + 8 * static_cast<int64_t>(random() % 40);
    spec.scheme.block_rows = round % 3 == 0 ? 0 : 64;
    const HostWeight weight = RandomWeight(spec);
    const auto whole = one.Place(weight, false);
    const auto cut = three.Place(weight, model::Placing::kMlpRows);
    ASSERT_TRUE(cut->partitioned_at_rows());
    const DType dtype = std::vector{DType::kFp16, DType::kBf16, DType::kFp32}[round % 3];
    const int64_t tokens = round % 6;
    const std::vector<uint8_t> x = RandomMatrix(tokens, spec.k, dtype, random());
    const auto run = [&](Machine& machine, std::shared_ptr<const model::PlacedWeight> placed) {
      MatmulWork work = machine.Product(std::move(placed), x, dtype);
      if (round % 2 == 0) work.bias.assign(spec.n, 0.25f);
      work.activation = round % 4 < 2 ? ActivationFunction::kGelu : ActivationFunction::kNone;
      return machine.Run(std::move(work));
    };
    const Answer expected = run(one, whole), answer = run(three, cut);
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    ASSERT_EQ(answer.bytes.size(), expected.bytes.size());
    if (tokens == 0) continue;
    EXPECT_LE(Difference(answer, expected, dtype), Reordering(spec.k, dtype)) << "round " << round;
    EXPECT_EQ(answer.report.device, "cpu:0,cpu:1,cpu:2");
  }
}

// Integer sums are exact in any order; a token has one scale for all of its parts.
TEST_P(SeveralDevicesTest, QuantisedActivationsAndIntegersCutAtRows) {
  Machine one(1, GetParam()), three(3, GetParam());
  WeightSpec spec = {.k = 512, .n = 40, .scheme = Symmetric(8, 0)};
  spec.scheme.scale_dtype.reset();
  const HostWeight integers = RandomWeight(spec);
  spec.scheme = Symmetric(4, 128);
  const HostWeight scaled = RandomWeight(spec);
  const auto run = [&](Machine& machine, const HostWeight& weight, bool cut, auto change) {
    const bool whole_numbers = &weight == &integers;
    const DType dtype = whole_numbers ? DType::kInt8 : DType::kFp16;
    MatmulWork work = machine.Product(
        machine.Place(weight, cut ? model::Placing::kMlpRows : model::Placing::kWhole),
        RandomMatrix(5, 512, dtype, 3), dtype);
    change(work);
    return machine.Run(std::move(work));
  };
  const auto to_int32 = [](MatmulWork& work) { work.out_dtype = DType::kInt32; };
  const Answer sums = run(one, integers, false, to_int32);
  ASSERT_TRUE(sums.status.ok()) << sums.status;
  EXPECT_TRUE(run(three, integers, true, to_int32).bytes == sums.bytes);
  for (ActivationQuantization how :
       {ActivationQuantization::kPerToken, ActivationQuantization::kStatic,
        ActivationQuantization::kFloat8PerToken, ActivationQuantization::kFloat8PerBlock,
        ActivationQuantization::kFloat8Static}) {
    const auto quantise = [how](MatmulWork& work) {
      work.quantization = how;
      if (HasGivenScales(how)) work.scales = {0.03f};
    };
    const Answer expected = run(one, scaled, false, quantise);
    const Answer answer = run(three, scaled, true, quantise);
    ASSERT_TRUE(expected.status.ok() && answer.status.ok()) << expected.status << answer.status;
    EXPECT_LE(Difference(answer, expected, DType::kFp16), Reordering(512, DType::kFp16));
  }
}

TEST_P(SeveralDevicesTest, BlocksOfRowsHaveTheBitsOfOneDevice) {
  std::mt19937 random(10);
  Machine one(1, GetParam()), three(3, GetParam());
  const HostWeight weight = RandomWeight({.k = 420, .n = 72, .scheme = Asymmetric(4, 32)});
  const auto whole = one.Place(weight, false);
  const auto cut = three.Place(weight, model::Placing::kMlpRows);
  ASSERT_TRUE(cut->partitioned_at_rows());
  for (int block = 0; block < 60; ++block) {
    DequantizeWork work;
    work.row_begin = random() % 420;
    work.rows = random() % (420 - work.row_begin + 1);
    work.col_begin = random() % 72;
    work.cols = random() % (72 - work.col_begin + 1);
    work.weight = whole;
    const Answer expected = one.Run(work);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    work.weight = cut;
    const Answer answer = three.Run(work);
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    ASSERT_TRUE(answer.bytes == expected.bytes) << "rows " << work.row_begin << " + " << work.rows;
  }
}

TEST_P(SeveralDevicesTest, ColumnsReportEveryDeviceAndWarmUp) {
  EngineOptions options;
  options.token_threshold = ThresholdTable::kAuto;
  Machine machine(2, GetParam(), options);
  const auto weight = machine.Place(RandomWeight({.k = 64, .n = 256}), true);
  ASSERT_TRUE(machine.engine().WarmUp(weight).ok());
  const auto x = RandomMatrix(2, 64, DType::kFp16, 1);
  const Answer answer = machine.Run(machine.Product(weight, x, DType::kFp16));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.report.device, "cpu:0,cpu:1");
  EXPECT_NE(testing::FindKernel(answer.report.kernel), nullptr) << answer.report.kernel;
}

// Each waits for the other within the first allocation of its warm-up.
TEST(SeveralDevicesWarmUpTest, IsAtTheSameTime) {
  Machine machine(2, /*host_addressable=*/false);
  const auto weight = machine.Place(RandomWeight({.k = 64, .n = 64}), false);
  testing::Rendezvous rendezvous(2);
  for (size_t i : {0, 1}) {
    machine.member(i).wrapped().OnAllocate([&, once = std::make_shared<std::once_flag>()] {
      std::call_once(*once, [&] { rendezvous.Meet(); });
    });
  }
  ASSERT_TRUE(machine.engine().WarmUp(weight).ok());
  EXPECT_EQ(rendezvous.met(), 1);
}

TEST_P(SeveralDevicesTest, AnInlineWeightRunsOnOneOfThem) {
  Machine machine(3, GetParam());
  const HostWeight weight = RandomWeight({.k = 64, .n = 72, .bias = true});
  const auto prepared = machine.engine().Prepare(weight);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const auto x = RandomMatrix(2, 64, DType::kFp16, 1);
  const Answer expected =
      machine.Run(machine.Product(machine.Place(weight, true), x, DType::kFp16));
  const Answer answer = machine.Run(machine.Product(*prepared, x, DType::kFp16));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.bytes, expected.bytes);
}

// Also for the cases of several_devices_faults_test.cc.
INSTANTIATE_TEST_SUITE_P(Memory, SeveralDevicesTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
