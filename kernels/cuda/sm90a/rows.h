// The rows of this folder, one function per source file.
#pragma once

#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& PersistentA16W4Row();
const KernelRow& ChainedA16W4Row();

// The same products with a tile of PersistentTiles() or ChainedTiles() instead of the fastest, so
// that every one can be tested. In parts, a tile takes weights of parts * slices * sets chains or,
// where sums keep no order, of as many steps as parts, and no more tokens than fit its blocks at a
// time.
absl::Status RunPersistentTile(const MatmulArgs& args, const PersistentTile& tile,
                               StreamView stream);
absl::Status RunChainedTile(const MatmulArgs& args, const PersistentTile& tile, StreamView stream);

}  // namespace awqd::cuda
