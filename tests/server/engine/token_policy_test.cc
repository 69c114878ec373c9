// The token-count heuristic: the boundary, and the ends of its range.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "server/engine/threshold_table.h"

namespace awqd::batching {
namespace {

TEST(TokenPolicyTest, FusedBelowTheThresholdOnly) {
  const TokenPolicy policy;
  EXPECT_TRUE(policy.UseFused(0));
  EXPECT_TRUE(policy.UseFused(1));
  EXPECT_TRUE(policy.UseFused(255));
  EXPECT_FALSE(policy.UseFused(256));
  EXPECT_FALSE(policy.UseFused(4096));
}

TEST(TokenPolicyTest, ThresholdEnds) {
  EXPECT_FALSE(TokenPolicy{0}.UseFused(0));
  EXPECT_FALSE(TokenPolicy{1}.UseFused(1));
  EXPECT_TRUE(TokenPolicy{std::numeric_limits<int64_t>::max()}.UseFused(1 << 30));
}

}  // namespace
}  // namespace awqd::batching
