// The way back into the packing of the format "gemlite".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/format.h"

namespace awqd {

// W_q [N, K] as Gemlite's pack_warped_int32 packs it: 32 / bits codes to a word, rows padded with
// zeros to whole words, the whole to a multiple of 32 words. INVALID_ARGUMENT, naming the part, for
// codes other than integers of 1, 2, 3, 4 or 8 bits and for a weight with an order.
absl::StatusOr<std::vector<uint32_t>> PackWarpedInt32(const HostWeight& weight);

}  // namespace awqd
