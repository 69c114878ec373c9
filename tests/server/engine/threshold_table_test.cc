// The token threshold of a weight: a number, or the choice of its kernels.
#include "server/engine/threshold_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "kernels/backends.h"
#include "kernels/device.h"
#include "kernels/registry.h"

namespace awqd::engine {
namespace {

// A weight whose fused products are `first` below `border` tokens and `second` from there on.
DeviceWeight Weight(const KernelRow& first, int64_t border, const KernelRow& second) {
  DeviceWeight weight;
  weight.plan.matmul = {{Path::kFused, 0, border - 1, &first}, {Path::kFused, border, -1, &second}};
  return weight;
}

const KernelRow kPlain = {.name = "test/plain", .op = Op::kMatmul};
const KernelRow kWinner = {.name = "test/winner", .op = Op::kMatmul, .dense_from = NeverDense};
const KernelRow kMeasured = {
    .name = "test/measured",
    .op = Op::kMatmul,
    .dense_from = [](const WeightShape& shape, const DeviceInfo&) -> int64_t { return shape.k; }};

class ThresholdTableTest : public ::testing::Test {
 protected:
  const std::unique_ptr<Device> device_ = OpenCpuDevice();
};

TEST_F(ThresholdTableTest, ACountIsForEveryWeight) {
  const ThresholdTable table(64, device_.get());
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kWinner)), 64);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kPlain)), 64);
}

TEST_F(ThresholdTableTest, ByKernelIsWhatWasMeasuredOfTheKernel) {
  const ThresholdTable table(ThresholdTable::kByKernel, device_.get());
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kWinner)), ThresholdTable::kNever);
  DeviceWeight measured = Weight(kPlain, 17, kMeasured);
  measured.shape.k = 3072;
  EXPECT_EQ(table.FindThreshold(measured), 3072);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kPlain)), ThresholdTable::kDefault);
  // It must serve every count that would be decoded first.
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 257, kWinner)), ThresholdTable::kDefault);
  EXPECT_EQ(table.FindThreshold(Weight(kWinner, 257, kPlain)), ThresholdTable::kDefault);
}

}  // namespace
}  // namespace awqd::engine
