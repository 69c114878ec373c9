// awqd_bench --tiles: measures again the data of the tile choice of sm90a/qmatmul_a16.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/scheme.h"
#include "kernels/types.h"
#include "tests/bench/bench.h"

namespace awqd::bench {

// Times, for each shape [K, N] of weights of this scheme and each count of tokens, every
// compiled tile that the cost model finds within a quarter of the fastest, and prints it beside the
// model's time; at the end it prints how far the chosen tiles are from the fastest. On a
// batch-invariant device it times the tiles that keep the order of sums. Counts that the row does
// not serve are left out. `float8`: with x E4M3. `bytes_of_round` is Prepare's.
void TimeTiles(const std::vector<std::pair<int64_t, int64_t>>& shapes,
               const QuantizationScheme& scheme, const std::vector<int64_t>& tokens, DType x,
               ActivationQuantization float8, int64_t bytes_of_round, Machine& machine);

}  // namespace awqd::bench
