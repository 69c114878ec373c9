// The fused product of few tokens with equally many records for each block, on many numbers of
// blocks, against the oracle: tiles cut among several blocks, among two, and dealt out whole.
// Conformance covers what is chosen. Skips without a GPU from compute capability 9.0 on.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/kernels.h"
#include "kernels/layouts/mma16.h"
#include "kernels/plan/plan.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd {
namespace {

using testing::GuardedBuffer;

constexpr int64_t kMostTokens = 16;

// N and K that fill no tile and that do; K of one record; one meta and two.
struct Shape {
  int64_t k, n;
  const char* scheme;
};
constexpr Shape kShapes[] = {{1000, 456, "w4g128z"}, {1024, 640, "w4g64z"}, {4096, 200, "w4g128s"},
                             {128, 3000, "w4g64z"},  {384, 999, "w4g128z"}, {1152, 64, "w4g128z"}};

using Param = std::tuple<Shape, DType>;

class StreamKTest : public ::testing::TestWithParam<Param> {
 protected:
  static void SetUpTestSuite() {
    if (auto opened = OpenCudaDevice(0, 0); opened.ok()) device_ = std::move(*opened);
  }
  static void TearDownTestSuite() { device_.reset(); }

  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << "no GPU";
    if (device_->info().arch < 90)
      GTEST_SKIP() << "got arch " << device_->info().arch << ", expected 90 or more";
  }

  static inline std::unique_ptr<Device> device_;
};

TEST_P(StreamKTest, IsRightOnAnyNumberOfBlocks) {
  const auto& [of, dtype] = GetParam();
  const HostWeight canonical = testing::RandomWeight(
      {.k = of.k, .n = of.n, .scheme = ParseScheme(of.scheme).value(), .bias = true});
  const KernelRow& row = cuda::ScaledSumsA16();
  const auto weight = testing::PrepareFor(row, canonical, *device_).value();
  const auto values = testing::RandomMatrix(kMostTokens, of.k, dtype, 7);
  const std::vector<double> want = ReferenceProduct(
      canonical, {.x = {values.data(), dtype, kMostTokens, of.k}, .bias = canonical.bias.data()});
  auto x = GuardedBuffer::Create(*device_, static_cast<int64_t>(values.size())).value();
  ASSERT_THAT(x.Fill(values), testing::IsOk());
  auto stream = device_->CreateStream().value();
  const auto run = [&](int64_t m, int blocks, DType out) {
    auto y = GuardedBuffer::Create(*device_, m * of.n * SizeOf(out)).value();
    auto workspace =
        GuardedBuffer::CreateScratch(*device_, int64_t{4} * kMostTokens * mma16::kTileN * blocks)
            .value();
    const MatmulArgs args = {.weight = weight.get(),
                             .x = {x.data(), dtype, m, of.k},
                             .y = {y.data(), out, m, of.n},
                             .bias = weight->bias(),
                             .workspace = workspace.data()};
    EXPECT_THAT(cuda::RunStreamKScaledSums(args, blocks, stream->view()), testing::IsOk());
    EXPECT_THAT(stream->Synchronize(), testing::IsOk());
    EXPECT_THAT(y.CheckBands(), testing::IsOk());
    EXPECT_THAT(workspace.CheckBands(), testing::IsOk());
    return y.Read().value();
  };
  for (int blocks : {1, 2, 3, 5, 7, 16, 31, 64, 100, device_->info().sm_count}) {
    // Some blocks would have no work.
    if (blocks > mma16::TilesN(of.n) * mma16::BlocksK(of.k)) continue;
    for (int64_t m : {1, 7, 8, 9, 16}) {
      const DType out = m % 2 == 0 ? dtype : DType::kFp32;
      SCOPED_TRACE(absl::StrCat(blocks, " blocks, M ", m, ", ", Name(out)));
      const auto y = run(m, blocks, out);
      EXPECT_LE(testing::FrobeniusError(y, out, {want.begin(), want.begin() + m * of.n}),
                testing::ProductTolerance(out, dtype));
      EXPECT_EQ(testing::FirstDifference(y, run(m, blocks, out)), -1) << "run again";
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<Param>& info) {
  const auto& [of, dtype] = info.param;
  return absl::StrCat("k", of.k, "_n", of.n, "_", of.scheme, "_", Name(dtype));
}

INSTANTIATE_TEST_SUITE_P(Shapes, StreamKTest,
                         ::testing::Combine(::testing::ValuesIn(kShapes),
                                            ::testing::Values(DType::kFp16, DType::kBf16)),
                         NameOf);

}  // namespace
}  // namespace awqd
