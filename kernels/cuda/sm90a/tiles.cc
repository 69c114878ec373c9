// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstdint>

#include "kernels/base/math.h"

namespace awqd::cuda {
namespace {

// What a tile costs: microseconds of a step of a block, and of all that is not steps (start, sums
// of cut tiles, output). LaunchTile in qmatmul_a16w4.cuh compiles exactly these. H100, 2026-11-21,
// read off 4096 x 28672, 4096 x 4096 and 14336 x 4096 at 16 .. 4096 tokens. Tried as well and never
// the fastest: tiles of 16 and 32 tokens (sm80/qmatmul_a16w4 serves these), clusters of two with 64
// and 128 tokens.
struct Candidate {
  PersistentTile tile;
  double step_us;
  double fixed_us;
};
constexpr Candidate kCandidates[] = {
    {{64, 2, 1}, 0.57, 8},
    {{64, 4, 1}, 1.03, 10},
    {{128, 2, 1}, 0.81, 9},
    {{256, 2, 1}, 1.40, 14},
    // Sharing tokens between two blocks pays once there is more than one round of tiles: 4096 x
    // 4096 at 4096 tokens 189.5 us instead of 200.6, at 1024 tokens 53.8 instead of 52.7.
    {{256, 2, 2}, 1.38, 16},
};
// A tile whose sums come from more than three clusters waits for all of them.
constexpr double kManyPartsUs = 4;

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
  return steps * candidate.step_us + candidate.fixed_us + (many_parts ? kManyPartsUs : 0);
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
