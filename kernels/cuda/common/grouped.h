// The tiles of a grouped product, which its rows share: each names its rows and the weight of their
// expert. The host or common/routing.cu makes the list, kernels read it from GroupedArgs::table.
#pragma once

#include <cstdint>
#include <string>

namespace awqd {

struct GroupedArgs;  // kernels/registry.h, which kernels need not see

namespace cuda {

struct GroupedTile {
  const uint8_t* records;  // layout mma16
  const float* outer;
  const float* bias;
  int32_t first_token;
  int32_t end_token;  // not above the first: the tile is empty
  int32_t y_shift;    // rows of y before that of token 0
};

// One for every `tokens` rows of an expert, in the order of rows, stack after stack; as bytes.
std::string GroupedTiles(const GroupedArgs& args, int64_t tokens);

// How many those are; with GroupedArgs::device_experts, how many they can be.
int64_t GroupedTileCount(const GroupedArgs& args, int64_t tokens);
// The same as far as GroupedArgs::expected tells.
int64_t ExpectedTileCount(const GroupedArgs& args, int64_t tokens);

}  // namespace cuda
}  // namespace awqd
