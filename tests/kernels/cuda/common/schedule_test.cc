// Every step of every tile belongs to exactly one cluster, and clusters that share a tile agree on
// their roles.
#include "kernels/cuda/common/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace awqd::cuda {
namespace {

struct Taken {
  int cluster;
  int order;  // position of the piece in its cluster's run
  Piece piece;
};

std::vector<Taken> AllPieces(const Schedule& s) {
  std::vector<Taken> out;
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    Pieces pieces(s, cluster);
    Piece piece;
    for (int order = 0; pieces.Next(&piece); ++order) out.push_back({cluster, order, piece});
  }
  return out;
}

class ScheduleTest : public ::testing::TestWithParam<Schedule> {};

std::vector<Schedule> Many() {
  std::vector<Schedule> out;
  for (int tiles :
       {1, 2, 3, 16, 31, 64, 65, 66, 67, 112, 131, 132, 133, 224, 263, 264, 265, 1792}) {
    for (int k_blocks : {1, 2, 7, 32, 112}) {
      for (int clusters : {1, 2, 66, 132}) {
        if (tiles * k_blocks >= clusters) out.push_back(MakeSchedule(tiles, k_blocks, clusters));
      }
    }
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Many, ScheduleTest, ::testing::ValuesIn(Many()),
                         [](const ::testing::TestParamInfo<Schedule>& info) {
                           const Schedule& s = info.param;
                           return absl::StrCat("t", s.tiles(), "_k", s.k_blocks, "_c", s.clusters);
                         });

TEST_P(ScheduleTest, EveryStepIsTakenOnce) {
  const Schedule& s = GetParam();
  std::vector<int> taken(static_cast<size_t>(s.tiles()) * s.k_blocks);
  for (const Taken& t : AllPieces(s)) {
    ASSERT_LT(t.piece.begin, t.piece.end);
    ASSERT_LE(t.piece.end, s.k_blocks);
    for (int k = t.piece.begin; k < t.piece.end; ++k) ++taken[t.piece.tile * s.k_blocks + k];
  }
  EXPECT_EQ(std::count(taken.begin(), taken.end(), 1), static_cast<int64_t>(taken.size()));
}

TEST_P(ScheduleTest, ClustersHaveEqualWork) {
  const Schedule& s = GetParam();
  std::vector<int> steps(s.clusters);
  for (const Taken& t : AllPieces(s)) steps[t.cluster] += t.piece.end - t.piece.begin;
  const auto [least, most] = std::minmax_element(steps.begin(), steps.end());
  EXPECT_LE(*most - *least, 1);
}

// The owner of a cut tile adds the sums of clusters RunOf(first step) .. its own number - 1.
TEST_P(ScheduleTest, TheOwnerKnowsWhoHasTheEarlierSteps) {
  const Schedule& s = GetParam();
  const std::vector<Taken> all = AllPieces(s);
  for (const Taken& owner : all) {
    if (owner.piece.begin == 0 || owner.piece.end < s.k_blocks) continue;
    std::vector<int> others;
    for (const Taken& t : all) {
      if (t.piece.tile == owner.piece.tile && t.cluster != owner.cluster) {
        others.push_back(t.cluster);
        // It is the cluster's first piece, so it is written long before it is needed.
        EXPECT_EQ(t.order, 0);
      }
    }
    std::sort(others.begin(), others.end());
    std::vector<int> expected;
    for (int c = RunOf(s, owner.piece.tile * s.k_blocks); c < owner.cluster; ++c) {
      expected.push_back(c);
    }
    EXPECT_EQ(others, expected);
  }
}

// With at least as many tiles as clusters, no cluster waits for one that waits itself: a tile is
// cut at most once, and its first piece is its cluster's first.
TEST(ManyTilesTest, AreCutAtMostOnce) {
  for (const Schedule& s : Many()) {
    if (s.tiles() < s.clusters) continue;
    std::vector<int> pieces(s.tiles());
    for (const Taken& t : AllPieces(s)) {
      ++pieces[t.piece.tile];
      if (t.piece.end < s.k_blocks) {
        EXPECT_EQ(t.piece.begin, 0);
        EXPECT_EQ(t.order, 0);
      }
    }
    EXPECT_LE(*std::max_element(pieces.begin(), pieces.end()), 2);
  }
}

TEST(PartsTest, EveryTileIsCutAlike) {
  const Schedule s = MakeParts(3, 43, 4, 11);
  const std::vector<Taken> all = AllPieces(s);
  ASSERT_EQ(all.size(), 12u);
  for (size_t i = 0; i < all.size(); ++i) {
    const int part = static_cast<int>(i) % 4;
    EXPECT_EQ(all[i].cluster, static_cast<int>(i));
    EXPECT_EQ(all[i].piece.tile, static_cast<int>(i) / 4);
    EXPECT_EQ(all[i].piece.begin, part * 11);
    EXPECT_EQ(all[i].piece.end, part == 3 ? 43 : (part + 1) * 11);
  }
}

// One slot and one counter per cluster are enough.
TEST_P(ScheduleTest, AClusterHandsOverAtMostOnce) {
  std::vector<int> handed(GetParam().clusters);
  for (const Taken& t : AllPieces(GetParam())) {
    if (t.piece.end < GetParam().k_blocks) ++handed[t.cluster];
  }
  EXPECT_LE(*std::max_element(handed.begin(), handed.end()), 1);
}

}  // namespace
}  // namespace awqd::cuda
