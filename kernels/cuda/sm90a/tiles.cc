// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/base/math.h"

namespace awqd::cuda {
namespace {

// What a tile costs, in microseconds: a step of a block, and all that is not steps (start, sums of
// cut tiles, output) with tiles cut anywhere, cut into even parts, and whole; and what is added
// where a tile's sums come from more than three clusters. LaunchTile in qmatmul_a16w4.cuh compiles
// exactly these. H100, 2026-11-21, fitted to eight layer shapes from 4096 x 4096 to 8192 x 57344 at
// 32 .. 4096 tokens, within 10 % up to a millisecond. Tried as well and never the fastest:
// NOTES.md.
struct Candidate {
  PersistentTile tile;
  double step_us;
  double cut_us;
  double parts_us;
  double whole_us;
  double many_parts_us;
};
constexpr Candidate kCandidates[] = {
    {{32, 2, 1, 2}, 0.490, 5.1, 5.1, 5.1, 0.5},
    {{32, 3, 1, 2}, 0.630, 5.5, 5.5, 5.5, 1.5},
    {{64, 2, 1, 2}, 0.565, 6.8, 6.8, 6.8, 1.2},
    {{128, 2, 1, 1}, 0.746, 8.6, 7.8, 4.5, 1.0},
    {{256, 2, 1, 1}, 1.385, 13.6, 11.5, 6.0, 2.8},
    // Two blocks that share tokens win from about a hundred steps on: 4096 x 28672 at 2048 tokens
    // 631 us instead of 648, at 256 tokens 91.0 instead of 90.4.
    {{256, 2, 2, 1}, 1.375, 14.4, 11.5, 6.2, 2.8},
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
  if (s.split == 0) return s.rounds * s.k_blocks * candidate.step_us + candidate.whole_us;
  const double steps = static_cast<double>(s.tiles()) * s.k_blocks / s.clusters;
  const double rest = s.clusters % s.split == 0 ? candidate.parts_us : candidate.cut_us;
  return steps * candidate.step_us + rest +
         (s.clusters > 3 * s.split ? candidate.many_parts_us : 0);
}

// How many of at most `most` clusters to take so that every one has as many steps, all of one tile
// or of whole tiles; 0 where that would cost more than a cut saves. At 4096 x 4096 (H100,
// 2026-11-21): 128 clusters instead of 132 take 27.0 us instead of 29.2 at 512 tokens, 185 instead
// of 206 at 4096. Beyond a few rounds only the last one is cut and there is nothing to gain.
int64_t EvenClusters(int64_t tiles, int64_t k_blocks, int64_t most) {
  constexpr int kMostRounds = 4;
  constexpr double kMostExtra = 1.06;  // steps
  const double cut_steps = static_cast<double>(tiles) * k_blocks / most;
  if (tiles <= most) {
    const int64_t parts = std::min(most / tiles, k_blocks / kLeastSteps);
    const bool even = parts > 0 && CeilDiv(k_blocks, parts) <= kMostExtra * cut_steps;
    return even ? tiles * parts : 0;
  }
  const int64_t rounds = CeilDiv(tiles, most);
  const bool even =
      tiles % rounds == 0 && rounds <= kMostRounds && rounds * k_blocks <= kMostExtra * cut_steps;
  return even ? tiles / rounds : 0;
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
  int64_t clusters = std::clamp<int64_t>(tiles * k_blocks / kLeastSteps, 1, most);
  if (tile.blocks == 1) {
    if (const int64_t even = EvenClusters(tiles, k_blocks, most)) clusters = even;
  }
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
  const Candidate* best = std::end(kCandidates) - 1;
  for (const Candidate& candidate : kCandidates) {
    // Two blocks to a multiprocessor are for few tokens: weights that are decoded again for every
    // tile of tokens, 8192 x 10240 at 192 76.6 us instead of 67.4.
    if (candidate.tile.blocks == 2 && m > candidate.tile.tokens) continue;
    if (Microseconds(shape, m, candidate, device) < Microseconds(shape, m, *best, device)) {
      best = &candidate;
    }
  }
  return best->tile;
}

}  // namespace awqd::cuda
