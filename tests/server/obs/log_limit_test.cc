// The limit on lines with the same message.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/obs/logging.h"

namespace awqd::obs {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

TEST(LogLimit, LeavesOutWhatIsOverTheLimitAndThenSaysHowMuch) {
  LogLimit limit(3, absl::Minutes(1), 10);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.CountLine("a", kStart).log);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(limit.CountLine("a", kStart + absl::Seconds(59)).log);
  EXPECT_TRUE(limit.CountLine("b", kStart + absl::Seconds(59)).log) << "of its own";
  const LogLimit::Verdict next = limit.CountLine("a", kStart + absl::Minutes(1));
  EXPECT_TRUE(next.log);
  EXPECT_EQ(next.left_out, 5);
  EXPECT_EQ(limit.CountLine("a", kStart + absl::Minutes(1)).left_out, 0) << "said once";
}

TEST(LogLimit, ManyKeysShareOne) {
  LogLimit limit(2, absl::Minutes(1), 4);
  int logged = 0;
  for (int i = 0; i < 1000; ++i)
    logged += limit.CountLine(absl::StrCat("key ", i), kStart).log ? 1 : 0;
  EXPECT_EQ(logged, 4 + 2);
  EXPECT_TRUE(limit.CountLine("key 1", kStart).log) << "one of the four";
  EXPECT_TRUE(limit.CountLine("new", kStart + absl::Minutes(2)).log) << "the others are forgotten";
}

TEST(LogLimit, AClockThatGoesBackDoesNotSilenceIt) {
  LogLimit limit(1, absl::Minutes(1), 4);
  EXPECT_TRUE(limit.CountLine("a", kStart + absl::Hours(24)).log);
  EXPECT_TRUE(limit.CountLine("a", kStart).log);
}

}  // namespace
}  // namespace awqd::obs
