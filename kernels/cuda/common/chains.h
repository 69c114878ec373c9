// The order of sums of products that are batch-invariant: every such kernel row of the layout mma16
// adds along K in this order.
//
// K is cut into chains of whole records. The records of a chain are added in one accumulator in
// ascending order, 16 rows of K at a time; the sums of the chains are added from the first to the
// last. mma.sync and wgmma give the same bits for the same chain. Chains depend on the weight and
// the device, never on the number of tokens. So a token's result has the same bits whatever it is
// batched with and whichever of these kernel rows computes it.
#pragma once

#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// The size of a record of mma16.
inline constexpr int kRecordN = 64;   // out features
inline constexpr int kRecordK = 128;  // in features

struct Chains {
  int split = 1;      // blocks that share the chains of a tile, where few tokens make few tiles
  int per_block = 2;  // chains of each block
  int length = 1;     // records of a chain; the last chains may be shorter, or empty

  int count() const { return split * per_block; }

  friend bool operator==(const Chains&, const Chains&) = default;
};

Chains MatmulChains(const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd::cuda
