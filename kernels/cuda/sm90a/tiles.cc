// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstdint>

#include "kernels/base/math.h"

namespace awqd::cuda {
namespace {

// What a tile costs, in microseconds: a step of a block, all that is not steps (start, sums of cut
// tiles, output), and what it adds when a tile's sums come from more than three clusters.
// LaunchTile in qmatmul_a16w4.cuh compiles exactly these. H100, 2026-11-21, fitted to seven layer
// shapes from 4096 x 4096 to 8192 x 28672 at 32 .. 4096 tokens, within 8 %. Tried as well and never
// the fastest: NOTES.md.
struct Candidate {
  PersistentTile tile;
  double step_us;
  double fixed_us;
  double many_parts_us;
};
constexpr Candidate kCandidates[] = {
    {{32, 2, 1, 2}, 0.505, 5.2, 0.5},
    {{32, 3, 1, 2}, 0.65, 5.6, 1.5},
    {{64, 2, 1, 2}, 0.586, 6.5, 1.2},
    {{64, 4, 1, 1}, 0.99, 9.6, 2.2},
    {{128, 2, 1, 1}, 0.803, 8.3, 1.0},
    {{256, 2, 1, 1}, 1.413, 12.1, 2.8},
    // Two blocks that share tokens win from about a hundred steps on: 4096 x 28672 at 2048 tokens
    // 629 us instead of 644, at 256 tokens 91.0 instead of 90.4.
    {{256, 2, 2, 1}, 1.40, 13.4, 2.8},
};

// Runs shorter than this spend more on meeting than they gain.
constexpr int kLeastSteps = 2;

int64_t Tiles(const WeightShape& shape, int64_t m, const PersistentTile& tile) {
  return CeilDiv(shape.n, int64_t{tile.cluster} * tile.groups * mma16::kTileN) *
         CeilDiv(m, int64_t{tile.tokens});
}

double Microseconds(const WeightShape& shape, int64_t m, const Candidate& candidate,
                    const DeviceInfo& device) {
  const Schedule s = PersistentSchedule(shape, m, candidate.tile, device);
  const double steps = static_cast<double>(s.tiles()) * s.k_blocks / s.clusters;
  const bool many_parts = s.split > 0 && s.clusters > 3 * s.split;
  return steps * candidate.step_us + candidate.fixed_us +
         (many_parts ? candidate.many_parts_us : 0);
}

}  // namespace

std::vector<PersistentTile> PersistentTiles() {
  std::vector<PersistentTile> out;
  for (const Candidate& candidate : kCandidates) out.push_back(candidate.tile);
  return out;
}

Schedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                            const DeviceInfo& device) {
  const int64_t tiles = Tiles(shape, m, tile);
  const int64_t k_blocks = mma16::BlocksK(shape.k);
  const int64_t most = std::min(device.sm_count, kStreamCounters / tile.groups) / tile.cluster;
  const int64_t clusters = std::clamp<int64_t>(tiles * k_blocks / kLeastSteps, 1, most);
  return MakeSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                      static_cast<int>(clusters));
}

int64_t PersistentSumsBytes(const DeviceInfo& device) {
  int64_t floats = 0;
  for (const Candidate& candidate : kCandidates) {
    floats = std::max(floats, PersistentSlotFloats(candidate.tile));
  }
  return device.sm_count * floats * static_cast<int64_t>(sizeof(float));
}

PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device) {
  const Candidate* best = &kCandidates[0];
  for (const Candidate& candidate : kCandidates) {
    if (Microseconds(shape, m, candidate, device) < Microseconds(shape, m, *best, device)) {
      best = &candidate;
    }
  }
  return best->tile;
}

}  // namespace awqd::cuda
