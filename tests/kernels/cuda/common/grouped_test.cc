// The table of a grouped product: every row once for each stack, with the weight of its expert.
#include "kernels/cuda/common/grouped.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

std::vector<GroupedTile> TilesOf(const GroupedArgs& args, int64_t tokens) {
  const std::string bytes = GroupedTiles(args, tokens);
  std::vector<GroupedTile> out(bytes.size() / sizeof(GroupedTile));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

TEST(GroupedTiles, HaveEveryRowOnce) {
  const std::vector<int64_t> ends = {0, 5, 5, 22, 30};
  DeviceWeight weights[10];
  std::vector<const DeviceWeight*> experts;
  for (DeviceWeight& weight : weights) {
    weight.shape.n = 64;
    experts.push_back(&weight);
  }
  const std::vector<float> biases(10 * 64);
  for (const int64_t stacks : {1, 2}) {
    const GroupedArgs args = {
        .experts = absl::MakeConstSpan(experts).subspan(0, stacks * ends.size()),
        .ends = ends,
        .bias = biases.data()};
    EXPECT_EQ(args.stacks(), stacks);
    EXPECT_EQ(args.active(), 3);
    for (const int64_t tokens : {1, 8, 16, 64}) {
      const std::vector<GroupedTile> tiles = TilesOf(args, tokens);
      EXPECT_EQ(static_cast<int64_t>(tiles.size()), GroupedTileCount(args, tokens));
      std::vector<int> seen(stacks * args.rows());
      for (const GroupedTile& tile : tiles) {
        ASSERT_LT(tile.first_token, tile.end_token);
        ASSERT_LE(tile.end_token - tile.first_token, tokens);
        const int64_t stack = tile.y_shift / args.rows();
        const auto expert = (tile.bias - biases.data()) / 64 - stack * 5;
        EXPECT_GE(tile.first_token, expert == 0 ? 0 : ends[expert - 1]);
        EXPECT_LE(tile.end_token, ends[expert]);
        for (int row = tile.first_token; row < tile.end_token; ++row) ++seen[tile.y_shift + row];
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << tokens << " tokens";
    }
  }
}

// Where the device alone knows the rows of each expert, the table has room for every division, and
// no more than the worst needs.
TEST(GroupedTiles, TheirNumberHasALeastBound) {
  const DeviceWeight weight;
  const DeviceWeight* const three[] = {&weight, &weight, &weight};
  for (int64_t rows = 1; rows <= 40; ++rows) {
    for (const int64_t tokens : {1, 3, 8, 16}) {
      int64_t most = 0;
      for (int64_t a = 0; a <= rows; ++a) {  // of three experts
        for (int64_t b = 0; a + b <= rows; ++b) {
          const std::vector<int64_t> ends = {a, a + b, rows};
          most = std::max(most, GroupedTileCount({.experts = three, .ends = ends}, tokens));
        }
      }
      const GroupedArgs args = {.experts = absl::MakeConstSpan(three).first(2),
                                .x = {nullptr, DType::kFp16, rows, 64},
                                .device_experts = 3};
      EXPECT_EQ(GroupedTileCount(args, tokens), 2 * most) << rows << " rows, " << tokens;
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
