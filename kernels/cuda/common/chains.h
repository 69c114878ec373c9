// The order in which products add along K, the same for every row of the layout mma16 that is
// batch-invariant.
//
// K is cut into chains of whole records. A chain is one accumulator that its records go through in
// ascending order, 16 rows of K at a time; the chains' sums are added from the first to the last.
// mma.sync and wgmma give the same bits for the same chain. Chains depend on the weight and the
// device alone, never on the number of tokens: a token's result has the same bits whatever it is
// batched with and whichever row computes it.
#pragma once

#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// A record of that layout.
inline constexpr int kRecordN = 64;   // out features
inline constexpr int kRecordK = 128;  // in features

struct Chains {
  int split = 1;   // blocks that the chains are dealt out to where few tokens leave no other work
  int groups = 2;  // chains per block
  int length = 1;  // records; the last chains may be shorter, or empty

  int count() const { return split * groups; }

  friend bool operator==(const Chains&, const Chains&) = default;
};

Chains MatmulChains(const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd::cuda
