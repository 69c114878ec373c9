// Fixed-order split-K: the order of sums of batch-invariant products. Every such kernel row of the
// layout mma16 adds along K in this order.
//
// K is divided into k-ranges of whole records. The records of a k-range are added in one
// accumulator in ascending order, 16 rows of K at a time; the sums of the k-ranges are added from
// the first to the last. mma.sync and wgmma give the same bits for the same k-range. K-ranges
// depend on the weight and the device, never on the number of tokens. So a token's result has the
// same bits whatever it is batched with and whichever of these kernel rows computes it.
#pragma once

#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// The size of a record of mma16.
inline constexpr int kRecordN = 64;   // out features
inline constexpr int kRecordK = 128;  // in features

struct FixedOrder {
  int splits = 1;     // blocks that share the k-ranges of a tile, where few tokens make few tiles
  int per_block = 2;  // k-ranges of each block
  int length = 1;     // records of a k-range; the last k-ranges may be shorter, or empty

  int count() const { return splits * per_block; }

  friend bool operator==(const FixedOrder&, const FixedOrder&) = default;
};

FixedOrder ChooseFixedOrder(const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd::cuda
