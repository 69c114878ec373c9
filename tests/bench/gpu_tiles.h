// awqd_bench --tiles: what the choice of tiles of sm90a/qmatmul_a16 rests on, measured again.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/description.h"
#include "kernels/types.h"
#include "tests/bench/bench.h"

namespace awqd::bench {

// Times, for each shape [K, N] of weights of this description and each count of tokens, every
// compiled tile that the model of costs finds within a quarter of the fastest, and prints it beside
// the model's time; at the end how far what is chosen is from the fastest. Of a device that is
// batch-invariant the tiles that keep the order of sums. Counts that the row does not serve are
// left out. `bytes_of_round` is Prepare's.
void TimeTiles(const std::vector<std::pair<int64_t, int64_t>>& shapes,
               const WeightDescription& description, const std::vector<int64_t>& tokens, DType x,
               int64_t bytes_of_round, Machine& machine);

}  // namespace awqd::bench
