// The dense row on a real GPU, slab by slab against the oracle: dtypes, bias, slab edges.
// Conformance tests its shapes; this tests properties of this row alone. Skips without a GPU.
#include <cmath>
#include <memory>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/dense/matmul.h"
#include "kernels/kernels.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using testing::GuardedBuffer;

struct Case {
  DType in, out;
  bool bias;
  int64_t m, columns;
};

class GpuDenseTest : public ::testing::Test {
 protected:
  static constexpr int64_t kK = 256, kN = 328;

  void SetUp() override {
    auto opened = OpenCudaDevice(0, 0);
    if (!opened.ok()) GTEST_SKIP() << opened.status().message();
    device_ = *std::move(opened);
    if (!device_->info().dense_unavailable.empty()) {
      GTEST_SKIP() << device_->info().dense_unavailable;
    }
    testing::WeightSpec spec;
    spec.k = kK;
    spec.n = kN;
    spec.scheme.block_rows = 64;
    spec.bias = true;
    weight_ = testing::RandomWeight(spec);
    auto prepared = PrepareWeight(weight_, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    prepared_ = *std::move(prepared);
    auto stream = device_->CreateStream();
    ASSERT_TRUE(stream.ok());
    stream_ = *std::move(stream);
  }

  absl::StatusOr<GuardedBuffer> Make(int64_t bytes) {
    return GuardedBuffer::Create(*device_, bytes);
  }

  // Runs one case and returns y; checks the guard bands.
  std::vector<uint8_t> Run(const Case& c, const std::vector<uint8_t>& x) {
    auto x_there = Make(static_cast<int64_t>(x.size()));
    auto y_there = Make(c.m * kN * SizeOf(c.out));
    auto space = Make(dense::PlanWorkspace(prepared_->shape, device_->info()).total());
    EXPECT_TRUE(x_there.ok() && y_there.ok() && space.ok());
    EXPECT_TRUE(x_there->Fill(x).ok());
    MatmulArgs args;
    args.weight = prepared_.get();
    args.x = {x_there->data(), c.in, c.m, kK};
    args.y = {y_there->data(), c.out, c.m, kN};
    args.bias = c.bias ? prepared_->bias() : nullptr;
    args.workspace = space->data();
    const absl::Status ran = dense::MatmulInSlabs(args, c.columns, stream_->view());
    EXPECT_TRUE(ran.ok()) << ran;
    EXPECT_TRUE(stream_->Synchronize().ok());
    EXPECT_TRUE(y_there->CheckBands().ok());
    EXPECT_TRUE(space->CheckBands().ok());
    auto y = y_there->Read();
    EXPECT_TRUE(y.ok());
    return y.ok() ? *std::move(y) : std::vector<uint8_t>();
  }

  HostWeight weight_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::shared_ptr<const DeviceWeight> prepared_;
};

TEST_F(GpuDenseTest, EveryDtypeBiasAndSlabWidth) {
  uint64_t seed = 100;
  for (const DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    for (const DType out : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      for (const bool bias : {false, true}) {
        for (const auto& [m, columns] : {std::pair<int64_t, int64_t>{1, kN}, {257, 128}, {70, 8}}) {
          SCOPED_TRACE(::testing::Message() << Name(in) << " to " << Name(out) << ", bias " << bias
                                            << ", M " << m << ", columns " << columns);
          const auto x = testing::RandomMatrix(m, kK, in, ++seed);
          const Case c{in, out, bias, m, columns};
          const auto y = Run(c, x);
          const auto want = ReferenceProduct(
              weight_, {.x = {x.data(), in, m, kK}, .bias = bias ? weight_.bias.data() : nullptr});
          EXPECT_LE(testing::FrobeniusError(y, out, want), testing::ProductTolerance(out, in));
          EXPECT_EQ(testing::FirstDifference(y, Run(c, x)), -1);
        }
      }
    }
  }
}

TEST_F(GpuDenseTest, Fp32ActivationsAreNotTf32) {
  const auto x = testing::RandomMatrix(33, kK, DType::kFp32, 5);
  const auto y = Run({DType::kFp32, DType::kFp32, false, 33, 128}, x);
  const auto want = ReferenceProduct(weight_, {.x = {x.data(), DType::kFp32, 33, kK}});
  EXPECT_LE(testing::FrobeniusError(y, DType::kFp32, want), 2e-6);
}

TEST_F(GpuDenseTest, OneBadRowLeavesTheOthersAlone) {
  const int64_t m = 300;
  auto x = testing::RandomMatrix(m, kK, DType::kFp16, 6);
  const Case c{DType::kFp16, DType::kFp16, false, m, 128};
  const auto clean = Run(c, x);
  testing::SetElement(&x, DType::kFp16, 7 * kK + 3, NAN);
  const auto dirty = Run(c, x);
  const int64_t row = kN * 2;
  EXPECT_TRUE(std::equal(clean.begin(), clean.begin() + 7 * row, dirty.begin()));
  EXPECT_TRUE(std::equal(clean.begin() + 8 * row, clean.end(), dirty.begin() + 8 * row));
  EXPECT_TRUE(std::isnan(testing::GetElement(dirty, DType::kFp16, 7 * kN)));
}

}  // namespace
}  // namespace awqd
