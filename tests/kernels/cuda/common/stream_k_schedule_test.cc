// Every step of every tile belongs to exactly one cluster, and clusters that share a tile agree on
// their roles.
#include "kernels/cuda/common/stream_k_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace awqd::cuda {
namespace {

struct Taken {
  int cluster;
  int order;  // position of the work unit in its cluster's run
  WorkUnit work;
};

std::vector<Taken> AllWorkUnits(const StreamKSchedule& s) {
  std::vector<Taken> out;
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    WorkUnits units(s, cluster);
    WorkUnit work;
    for (int order = 0; units.Next(&work); ++order) out.push_back({cluster, order, work});
  }
  return out;
}

class ScheduleTest : public ::testing::TestWithParam<StreamKSchedule> {};

std::vector<StreamKSchedule> Many() {
  std::vector<StreamKSchedule> out;
  for (int tiles :
       {1, 2, 3, 16, 31, 64, 65, 66, 67, 112, 131, 132, 133, 224, 263, 264, 265, 1792}) {
    for (int k_blocks : {1, 2, 7, 32, 112}) {
      for (int clusters : {1, 2, 66, 132}) {
        if (tiles * k_blocks >= clusters)
          out.push_back(MakeStreamKSchedule(tiles, k_blocks, clusters));
      }
    }
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Many, ScheduleTest, ::testing::ValuesIn(Many()),
                         [](const ::testing::TestParamInfo<StreamKSchedule>& info) {
                           const StreamKSchedule& s = info.param;
                           return absl::StrCat("t", s.tiles(), "_k", s.k_blocks, "_c", s.clusters);
                         });

TEST_P(ScheduleTest, EveryStepIsTakenOnce) {
  const StreamKSchedule& s = GetParam();
  std::vector<int> taken(static_cast<size_t>(s.tiles()) * s.k_blocks);
  for (const Taken& t : AllWorkUnits(s)) {
    ASSERT_LT(t.work.begin, t.work.end);
    ASSERT_LE(t.work.end, s.k_blocks);
    for (int k = t.work.begin; k < t.work.end; ++k) ++taken[t.work.tile * s.k_blocks + k];
  }
  EXPECT_EQ(std::count(taken.begin(), taken.end(), 1), static_cast<int64_t>(taken.size()));
}

TEST_P(ScheduleTest, ClustersHaveEqualWork) {
  const StreamKSchedule& s = GetParam();
  std::vector<int> steps(s.clusters);
  for (const Taken& t : AllWorkUnits(s)) steps[t.cluster] += t.work.end - t.work.begin;
  const auto [least, most] = std::minmax_element(steps.begin(), steps.end());
  EXPECT_LE(*most - *least, 1);
}

// The owner of a cut tile adds the sums of clusters ClusterOfStep(first step) .. its own number -
// 1.
TEST_P(ScheduleTest, TheOwnerKnowsWhoHasTheEarlierSteps) {
  const StreamKSchedule& s = GetParam();
  const std::vector<Taken> all = AllWorkUnits(s);
  for (const Taken& owner : all) {
    if (owner.work.begin == 0 || owner.work.end < s.k_blocks) continue;
    std::vector<int> others;
    for (const Taken& t : all) {
      if (t.work.tile == owner.work.tile && t.cluster != owner.cluster) {
        others.push_back(t.cluster);
        // It is the cluster's first work unit, so it is written long before it is needed.
        EXPECT_EQ(t.order, 0);
      }
    }
    std::sort(others.begin(), others.end());
    std::vector<int> expected;
    for (int c = ClusterOfStep(s, owner.work.tile * s.k_blocks); c < owner.cluster; ++c) {
      expected.push_back(c);
    }
    EXPECT_EQ(others, expected);
  }
}

// With at least as many tiles as clusters, no cluster waits for one that waits itself: a tile is
// cut at most once, and its first work unit is its cluster's first.
TEST(ManyTilesTest, AreCutAtMostOnce) {
  for (const StreamKSchedule& s : Many()) {
    if (s.tiles() < s.clusters) continue;
    std::vector<int> units(s.tiles());
    for (const Taken& t : AllWorkUnits(s)) {
      ++units[t.work.tile];
      if (t.work.end < s.k_blocks) {
        EXPECT_EQ(t.work.begin, 0);
        EXPECT_EQ(t.order, 0);
      }
    }
    EXPECT_LE(*std::max_element(units.begin(), units.end()), 2);
  }
}

TEST(PartsTest, EveryTileIsCutAlike) {
  const StreamKSchedule s = MakeSplitKSchedule(3, 43, 4, 11);
  const std::vector<Taken> all = AllWorkUnits(s);
  ASSERT_EQ(all.size(), 12u);
  for (size_t i = 0; i < all.size(); ++i) {
    const int split = static_cast<int>(i) % 4;
    EXPECT_EQ(all[i].cluster, static_cast<int>(i));
    EXPECT_EQ(all[i].work.tile, static_cast<int>(i) / 4);
    EXPECT_EQ(all[i].work.begin, split * 11);
    EXPECT_EQ(all[i].work.end, split == 3 ? 43 : (split + 1) * 11);
  }
}

// One slot and one counter per cluster are enough.
TEST_P(ScheduleTest, AClusterHandsOverAtMostOnce) {
  std::vector<int> handed(GetParam().clusters);
  for (const Taken& t : AllWorkUnits(GetParam())) {
    if (t.work.end < GetParam().k_blocks) ++handed[t.cluster];
  }
  EXPECT_LE(*std::max_element(handed.begin(), handed.end()), 1);
}

}  // namespace
}  // namespace awqd::cuda
