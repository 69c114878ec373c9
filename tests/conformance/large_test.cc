// A weight of more than 2^31 elements: indices must not wrap.
#include "gtest/gtest.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::testing {
namespace {

constexpr int64_t kK = 32896, kN = 65536;
static_assert(kK * kN > int64_t{1} << 31);

class Large : public ::testing::Test {
 protected:
  void SetUp() override {
    const int64_t need = int64_t{3} << 30;
    if (TestDevice().FreeBytes() < need) GTEST_SKIP() << "needs 3 GiB of device memory";
    WeightSpec spec;
    spec.k = kK;
    spec.n = kN;
    weight_ = RandomWeight(spec);
    auto prepared = PrepareWeight(weight_, TestDevice());
    ASSERT_THAT(prepared.status(), IsOk());
    prepared_ = *prepared;
  }

  // A product of `m` tokens, checked in some columns of its last token.
  void ExpectProduct(int64_t m) {
    Device& device = TestDevice();
    auto stream = device.CreateStream().value();
    const std::vector<uint8_t> x = RandomMatrix(m, kK, DType::kFp16, 3);
    auto device_x = GuardedBuffer::Create(device, x.size()).value();
    ASSERT_THAT(device_x.Fill(x), IsOk());
    auto y = GuardedBuffer::Create(device, m * kN * 4).value();
    auto workspace =
        device.Allocate(MemoryKind::kDevice, WorkspaceBytes(*prepared_, Path::kFused, m)).value();
    ASSERT_THAT(QuantizedMatmul({prepared_.get(),
                                 {device_x.data(), DType::kFp16, m, kK},
                                 {y.data(), DType::kFp32, m, kN},
                                 nullptr,
                                 workspace.data()},
                                Path::kFused, stream->view()),
                IsOk());
    ASSERT_THAT(stream->Synchronize(), IsOk());
    const std::vector<uint8_t> got = y.Read().value();
    double error = 0, norm = 0;
    for (int64_t n : {int64_t{0}, kN / 2 - 1, kN - 8, kN - 1}) {
      double sum = 0;
      for (int64_t k = 0; k < kK; ++k) {
        const double element = GetElement(x, DType::kFp16, (m - 1) * kK + k);
        sum += element * WeightValue(weight_, k, n);
      }
      const double off = GetElement(got, DType::kFp32, (m - 1) * kN + n) - sum;
      error += off * off;
      norm += sum * sum;
    }
    EXPECT_LE(std::sqrt(error / norm), 1e-3) << m << " tokens";
  }

  HostWeight weight_;
  std::shared_ptr<const DeviceWeight> prepared_;
};

TEST_F(Large, LastRowsAndColumnsAreRight) {
  Device& device = TestDevice();
  auto stream = device.CreateStream().value();
  const int64_t rows = 3;
  auto out = GuardedBuffer::Create(device, rows * kN * 2).value();
  ASSERT_THAT(Dequantize({prepared_.get(), {out.data(), DType::kFp16, rows, kN}, kK - rows, 0},
                         nullptr, stream->view()),
              IsOk());
  ASSERT_THAT(stream->Synchronize(), IsOk());
  std::vector<uint8_t> want(out.size());
  for (int64_t i = 0; i < rows * kN; ++i) {
    StoreElement(want.data(), DType::kFp16, i, WeightValue(weight_, kK - rows + i / kN, i % kN));
  }
  EXPECT_EQ(FirstDifference(out.Read().value(), want), -1);

  // On GPUs 24 tokens are served by other kernels than one.
  for (int64_t m : {1, 24}) ExpectProduct(m);
}

}  // namespace
}  // namespace awqd::testing
