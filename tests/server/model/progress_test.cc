// Lines about a long load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/model/model_loader.h"

namespace awqd::model {
namespace {

using ::testing::ElementsAre;

TEST(ProgressTest, ALineAtMostEveryTwoSeconds) {
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> lines;
  Progress progress(
      "m", 100 << 20, 10, [&](absl::string_view line) { lines.emplace_back(line); },
      [&] { return now; });
  for (int i = 0; i < 9; ++i) {
    now += absl::Milliseconds(500);
    progress.Add(10 << 20);
  }
  EXPECT_THAT(lines,
              ElementsAre("loading model \"m\": 4 of 10 weights, 40 of 100 MiB (40 %), 20 MiB/s",
                          "loading model \"m\": 8 of 10 weights, 80 of 100 MiB (80 %), 20 MiB/s"));
  Progress silent("m", 1, 1, nullptr, [&] { return now; });
  now += absl::Seconds(9);
  silent.Add(1);
  EXPECT_EQ(silent.elapsed(), absl::Seconds(9));
}

}  // namespace
}  // namespace awqd::model
