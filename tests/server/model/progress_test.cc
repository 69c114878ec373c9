// Log lines of a long load, its progress bar, and its loaded share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/model/model_loader.h"

namespace awqd::model {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ProgressTest, ALineAtMostEveryTwoSeconds) {
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> lines;
  Progress progress("m", 100 << 20, 10,
                    {.log = [&](absl::string_view line) { lines.emplace_back(line); }},
                    [&] { return now; });
  for (int i = 0; i < 9; ++i) {
    now += absl::Milliseconds(500);
    progress.AddWeight(10 << 20);
  }
  EXPECT_THAT(lines,
              ElementsAre("loading model \"m\": 4 of 10 weights, 40 of 100 MiB (40 %), 20 MiB/s",
                          "loading model \"m\": 8 of 10 weights, 80 of 100 MiB (80 %), 20 MiB/s"));
  Progress silent("m", 1, 1, {}, [&] { return now; });
  now += absl::Seconds(9);
  silent.AddWeight(1);
  EXPECT_EQ(silent.elapsed(), absl::Seconds(9));
}

TEST(ProgressTest, ABarInsteadOfLinesUntilTheEnd) {
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> lines, bars;
  {
    Progress progress("m", 100 << 20, 10,
                      {.log = [&](absl::string_view line) { lines.emplace_back(line); },
                       .bar = [&](absl::string_view text) { bars.emplace_back(text); }},
                      [&] { return now; });
    for (int i = 0; i < 10; ++i) {
      now += absl::Milliseconds(50);
      progress.AddWeight(10 << 20);
      now += absl::Seconds(i == 5 ? 9 : 0);
    }
  }
  EXPECT_THAT(lines, IsEmpty());
  ASSERT_EQ(bars.size(), 7u) << "at the start, every 100 ms, at the end";
  EXPECT_EQ(bars[0], "[..............................]   0 %  0 of 100 MiB, 0 MiB/s  m");
  EXPECT_EQ(bars[1], "[######........................]  20 %  20 of 100 MiB, 200 MiB/s  m");
  EXPECT_EQ(bars[5].substr(0, 39), "[###########################...]  90 % ");
  EXPECT_EQ(bars[6], "");
}

TEST(ProgressTest, TheShareIsThatOfTheBytes) {
  std::atomic<float> share{0.5f};
  Progress progress("m", 80, 3, {.share = &share}, [] { return absl::UnixEpoch(); });
  EXPECT_EQ(share, 0.0f);
  progress.AddWeight(20);
  EXPECT_EQ(share, 0.25f);
  progress.AddWeight(60);
  EXPECT_EQ(share, 1.0f);
  Progress empty("m", 0, 1, {.share = &share}, [] { return absl::UnixEpoch(); });
  empty.AddWeight(0);
  EXPECT_EQ(share, 0.0f) << "of nothing";
}

}  // namespace
}  // namespace awqd::model
