// The token threshold of a weight: a number, or the choice of its kernels.
#include "server/engine/threshold_table.h"

#include <gtest/gtest.h>

#include <cstdint>

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
const KernelRow kWinner = {.name = "test/winner", .op = Op::kMatmul, .replaces_dense = true};

TEST(ThresholdTableTest, ACountIsForEveryWeight) {
  const ThresholdTable table(64, nullptr);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kWinner)), 64);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kPlain)), 64);
}

TEST(ThresholdTableTest, ByKernelSparesWeightsWhoseFusedKernelReplacesDense) {
  const ThresholdTable table(ThresholdTable::kByKernel, nullptr);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kWinner)), ThresholdTable::kNever);
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 17, kPlain)), ThresholdTable::kDefault);
  // It must serve every count that would be decoded first.
  EXPECT_EQ(table.FindThreshold(Weight(kPlain, 257, kWinner)), ThresholdTable::kDefault);
  EXPECT_EQ(table.FindThreshold(Weight(kWinner, 257, kPlain)), ThresholdTable::kDefault);
}

}  // namespace
}  // namespace awqd::engine
