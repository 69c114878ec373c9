// The table of a grouped product, made on the host.
#include "kernels/cuda/common/grouped.h"

#include <algorithm>
#include <vector>

#include "kernels/base/math.h"
#include "kernels/registry.h"

namespace awqd::cuda {

namespace {

void AddTiles(const GroupedArgs& args, int64_t stack, int64_t tokens,
              std::vector<GroupedTile>* tiles) {
  const size_t experts = args.ends.size();
  int64_t begin = 0;
  for (size_t e = 0; e < experts; begin = args.ends[e++]) {
    if (args.ends[e] == begin) continue;
    const size_t at = stack * experts + e;
    const DeviceWeight& weight = *args.experts[at];
    const float* const bias =
        args.bias == nullptr ? weight.bias() : args.bias + at * weight.shape.n;
    for (int64_t first = begin; first < args.ends[e]; first += tokens) {
      tiles->push_back({weight.codes(), weight.outer(), bias, static_cast<int32_t>(first),
                        static_cast<int32_t>(std::min(first + tokens, args.ends[e])),
                        static_cast<int32_t>(stack * args.rows())});
    }
  }
}

}  // namespace

std::string GroupedTiles(const GroupedArgs& args, int64_t tokens) {
  std::vector<GroupedTile> tiles;
  for (int64_t stack = 0; stack < args.stacks(); ++stack) AddTiles(args, stack, tokens, &tiles);
  return {reinterpret_cast<const char*>(tiles.data()), tiles.size() * sizeof(GroupedTile)};
}

int64_t GroupedTileCount(const GroupedArgs& args, int64_t tokens) {
  if (args.device_experts > 0) {
    // The last tile of each expert may have a single row.
    return (args.rows() + args.active() * (tokens - 1)) / tokens * args.stacks();
  }
  int64_t count = 0, begin = 0;
  for (const int64_t end : args.ends) {
    count += CeilDiv(end - begin, tokens);
    begin = end;
  }
  return count * args.stacks();
}

int64_t ExpectedTileCount(const GroupedArgs& args, int64_t tokens) {
  if (args.expected == 0) return GroupedTileCount(args, tokens);
  return args.active() * CeilDiv(args.expected, tokens) * args.stacks();
}

}  // namespace awqd::cuda
