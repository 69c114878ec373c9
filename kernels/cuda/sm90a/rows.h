// The rows of this folder, one function per source file.
#pragma once

#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& PersistentA16Row();
const KernelRow& ChainedA16Row();
const KernelRow& PersistentA8ScaledRow();
const KernelRow& PersistentGroupedRow();

// For tests: the same products with the given tile of PersistentTiles() or ChainedTiles() instead
// of the fastest. A tile in parts has conditions: with RunChainedTile and sets > 0 the weight has
// parts * slices * sets chains, with RunPersistentTile every slice has at least one step, and all
// its blocks fit the device at once.
absl::Status RunPersistentTile(const MatmulArgs& args, const PersistentTile& tile,
                               StreamView stream);
absl::Status RunChainedTile(const MatmulArgs& args, const PersistentTile& tile, StreamView stream);

}  // namespace awqd::cuda
