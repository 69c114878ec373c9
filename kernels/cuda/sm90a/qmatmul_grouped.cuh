// The kernels of grouped products: those of qmatmul.cuh, compiled for the tiles of experts.
#pragma once

#include "kernels/cuda/sm90a/qmatmul.cuh"
#include "kernels/cuda/sm90a/tile_list_grouped.h"

namespace awqd::cuda {
namespace {

template <DType kX, size_t... kIndex>
Launcher FindGroupedLauncher(const PersistentTile& tile, std::index_sequence<kIndex...>) {
  Launcher found = nullptr;
  ((found = kGroupedTiles4[kIndex].tile == tile
                ? LaunchConfigured<
                      PersistentConfig<kX, kOneMeta, false, kGroupedTiles4[kIndex].tile, true>>
                : found),
   ...);
  return found;
}

}  // namespace

template <DType kX>
absl::Status LaunchGroupedProduct(const PersistentParams& p, const PersistentTile& tile,
                                  const DeviceInfo& device, StreamView stream) {
  const Launcher launch =
      FindGroupedLauncher<kX>(tile, std::make_index_sequence<std::size(kGroupedTiles4)>());
  return launch == nullptr ? NoSuchTile(tile) : launch(p, device, stream);
}

}  // namespace awqd::cuda
