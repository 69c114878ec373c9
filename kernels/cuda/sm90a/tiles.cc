// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/base/math.h"
#include "kernels/cuda/common/chains.h"

namespace awqd::cuda {
namespace {

static_assert(kRecordN == mma16::kTileN && kRecordK == mma16::kBlockK);

// What a tile costs, in microseconds: a step of a block, and all that is not steps (start, sums of
// cut tiles, output) with tiles cut anywhere, cut evenly, and whole; and what is added where a
// tile's sums come from more than three clusters. LaunchTile in qmatmul_a16w4.cuh compiles exactly
// these. H100, 2026-11-22, fitted to eight layer shapes from 4096 x 4096 to 8192 x 57344 at 17 ..
// 4096 tokens, within 10 % up to a millisecond. Tried as well and never the fastest: NOTES.md.
struct Candidate {
  PersistentTile tile;
  double step_us;
  double cut_us;
  double even_us;
  double whole_us;
  double many_us;
  double shared_step_us = 0;  // of tiles in parts, where some blocks share a multiprocessor
};

// For what was not measured, so that it is not chosen.
constexpr double kUnknown = std::numeric_limits<double>::infinity();

// A tile whose parts meet in a cluster.
constexpr Candidate InParts(const PersistentTile& tile, double step_us, double shared_step_us,
                            double rest_us) {
  return {tile, step_us, 0, 0, rest_us, 0, shared_step_us};
}

constexpr Candidate kCandidates[] = {
    {{32, 2, 1, 2}, 0.490, 5.1, 4.6, 5.1, 0.5},
    {{32, 3, 1, 2}, 0.640, 6.5, 6.5, 6.5, 1.0},
    InParts({32, 1, 1, 2, 2}, 0.280, 0.414, 3.6),
    InParts({32, 2, 1, 2, 2}, 0.395, 0.670, 4.6),
    InParts({32, 3, 1, 2, 2}, 0.506, kUnknown, 6.1),
    {{64, 2, 1, 1}, 0.545, 7.0, 6.0, 5.0, 0.7},
    {{64, 3, 1, 1}, 0.755, 8.3, 6.5, 5.0, 2.0},
    InParts({64, 1, 1, 2, 2}, 0.307, 0.510, 3.6),
    InParts({64, 2, 1, 1, 2}, 0.499, kUnknown, 3.8),
    InParts({64, 3, 1, 1, 2}, 0.623, kUnknown, 6.0),
    {{128, 2, 1, 1}, 0.755, 8.6, 7.8, 2.2, 1.0},
    // 192 features win where steps are many, 8192 x 57344 at 96 tokens 165 us instead of 182, and
    // where they leave no rest, 4096 x 6144 at 512 tokens 40.0 instead of 41.8.
    {{128, 3, 1, 1}, 1.110, 9.0, 9.0, 4.4, 3.0},
    InParts({128, 1, 1, 1, 2}, 0.409, kUnknown, 3.9),
    InParts({128, 2, 1, 1, 2}, 0.714, kUnknown, 3.8),
    InParts({128, 3, 1, 1, 2}, 0.862, kUnknown, 9.4),
    {{256, 2, 1, 1}, 1.385, 13.6, 11.5, 6.0, 2.8},
    // Two blocks that share tokens win from about a hundred steps on: 4096 x 28672 at 2048 tokens
    // 631 us instead of 648, at 256 tokens 91.0 instead of 90.4.
    {{256, 2, 2, 1}, 1.375, 14.4, 11.5, 6.2, 2.8},
    InParts({256, 2, 1, 1, 2}, 1.326, kUnknown, 5.4),
};

// The same for tiles that keep the order of sums.
constexpr Candidate kChained[] = {
    {{32, 2, 1, 1}, 0.455, 9.8, 6.5, 2.5, 1.0},
    {{32, 3, 1, 1}, 0.600, 12.0, 6.5, 3.0, 1.0},
    InParts({32, 1, 1, 2, 2}, 0.280, 0.414, 4.1),
    InParts({32, 2, 1, 2, 2}, 0.395, 0.670, 5.1),
    InParts({32, 3, 1, 1, 2}, 0.506, kUnknown, 6.5),
    {{64, 2, 1, 1}, 0.550, 9.0, 6.0, 1.5, 1.5},
    {{64, 3, 1, 1}, 0.760, 11.0, 6.5, 3.0, 2.5},
    InParts({64, 1, 1, 2, 2}, 0.307, 0.510, 4.0),
    InParts({64, 2, 1, 1, 2}, 0.503, kUnknown, 4.3),
    InParts({64, 3, 1, 1, 2}, 0.630, kUnknown, 7.2),
    {{128, 2, 1, 1}, 0.820, 11.0, 7.5, 2.5, 1.0},
    {{128, 2, 2, 1}, 0.800, 14.0, 8.5, 4.5, 1.0},
    InParts({128, 1, 1, 1, 2}, 0.460, kUnknown, 5.0),
    InParts({128, 2, 1, 1, 2}, 0.725, kUnknown, 5.0),
    // Where chains are few or long: 28672 x 8192 at 1024 tokens 631 us instead of 690, 8192 x 8192
    // 204 instead of 205.
    {{256, 2, 2, 1}, 1.375, 17.0, 17.0, 6.2, 0.0},
};
// To park a total and read it back.
constexpr double kParkUs = 5.5;

// Runs shorter than this spend more on meeting than they gain.
constexpr int kLeastSteps = 2;

int64_t Tiles(const WeightShape& shape, int64_t m, const PersistentTile& tile) {
  return CeilDiv(shape.n, int64_t{tile.cluster} * tile.groups * mma16::kTileN) *
         CeilDiv(m, int64_t{tile.tokens});
}

// Whether a tile can be had in parts: each with a step, and all blocks resident at once. More of
// them are slower than tiles that are cut anywhere (28672 x 8192 at 512 tokens 310 us instead of
// 299).
bool Suits(const PersistentTile& tile, int64_t tiles, int64_t k_blocks, const DeviceInfo& device) {
  if (tile.parts == 1) return true;
  const int64_t part_steps = CeilDiv(k_blocks, int64_t{tile.parts});
  return (tile.parts - 1) * part_steps < k_blocks &&
         tiles * tile.parts <= int64_t{tile.blocks} * device.sm_count;
}

double Microseconds(const Schedule& s, const Candidate& candidate, const DeviceInfo& device) {
  if (candidate.tile.parts > 1) {
    const bool shared = s.clusters > device.sm_count;
    return s.part_steps * (shared ? candidate.shared_step_us : candidate.step_us) +
           candidate.whole_us;
  }
  if (s.split == 0) return s.rounds * s.k_blocks * candidate.step_us + candidate.whole_us;
  const double steps = static_cast<double>(s.tiles()) * s.k_blocks / s.clusters;
  const double rest = s.clusters % s.split == 0 ? candidate.even_us : candidate.cut_us;
  return steps * candidate.step_us + rest + (s.clusters > 3 * s.split ? candidate.many_us : 0);
}

// Decoding to BF16 takes longer, and where the tensor cores are the limit its products draw less
// power: 4096 x 4096 at 64 tokens 10.0 us instead of 8.6, at 512 29.0 instead of 26.1 with tiles of
// 128 tokens and 26.9 instead of 27.3 with 256.
double DTypeFactor(const PersistentTile& tile, DType x) {
  if (x != DType::kBf16) return 1;
  return tile.tokens < 128 ? 1.17 : tile.tokens == 128 ? 1.10 : 0.98;
}

// Of `candidates` the fastest for m tokens of dtype `x` that `suits`, schedule(tile) being what
// would run and extra(tile, schedule) the microseconds that are not in the table.
template <class SuitsTile, class ScheduleOf, class Extra>
PersistentTile Fastest(absl::Span<const Candidate> candidates, int64_t m, DType x,
                       const DeviceInfo& device, SuitsTile suits, ScheduleOf schedule,
                       Extra extra) {
  const Candidate* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& candidate : candidates) {
    const PersistentTile& tile = candidate.tile;
    // Narrow tiles are for few tokens: weights that are decoded again for every tile of tokens,
    // 8192 x 10240 at 192 76.6 us instead of 67.4.
    if (tile.tokens < 128 && m > tile.tokens) continue;
    if (!suits(tile)) continue;
    const Schedule s = schedule(tile);
    const double us = Microseconds(s, candidate, device) * DTypeFactor(tile, x) + extra(tile, s);
    if (us < least) best = &candidate, least = us;
  }
  return best->tile;
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

// Of the largest slot for the sums of a block.
int64_t SlotBytes(absl::Span<const Candidate> candidates) {
  int64_t floats = 0;
  for (const Candidate& candidate : candidates) {
    floats = std::max(floats, PersistentSlotFloats(candidate.tile));
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

std::vector<PersistentTile> TilesOf(absl::Span<const Candidate> candidates) {
  std::vector<PersistentTile> out;
  for (const Candidate& candidate : candidates) out.push_back(candidate.tile);
  return out;
}

}  // namespace

std::vector<PersistentTile> PersistentTiles() { return TilesOf(kCandidates); }
std::vector<PersistentTile> ChainedTiles() { return TilesOf(kChained); }

Schedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                            const DeviceInfo& device) {
  const int64_t tiles = Tiles(shape, m, tile), k_blocks = mma16::BlocksK(shape.k);
  if (tile.parts > 1) {
    return MakeParts(static_cast<int>(tiles), static_cast<int>(k_blocks), tile.parts,
                     static_cast<int>(CeilDiv(k_blocks, int64_t{tile.parts})));
  }
  const int64_t most = device.sm_count / tile.cluster;
  int64_t clusters = std::clamp<int64_t>(tiles * k_blocks / kLeastSteps, 1, most);
  if (const int64_t even = EvenClusters(tiles, k_blocks, most)) clusters = even;
  return MakeSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                      static_cast<int>(clusters));
}

int LastTokenRows(int64_t m, const PersistentTile& tile) {
  constexpr int kSwizzledRows = 8;
  const int64_t tokens = (m - 1) % tile.tokens + 1;
  return static_cast<int>(RoundUp(CeilDiv(tokens, int64_t{tile.cluster}), kSwizzledRows));
}

int IdleBlocks(const Schedule& schedule, const PersistentTile& tile, const DeviceInfo& device) {
  const bool most = schedule.clusters * 2 >= device.sm_count;
  const int idle = tile.blocks == 2 && most ? device.sm_count - schedule.clusters : 0;
  return std::max(0, idle / tile.parts * tile.parts);
}

Schedule ChainedSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                         const DeviceInfo& device) {
  const int tiles = static_cast<int>(Tiles(shape, m, tile));
  const int k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  const int length = MatmulChains(shape, device).length;
  const int chains = static_cast<int>(CeilDiv(k_blocks, int64_t{length}));
  if (tile.parts > 1) {
    return MakeParts(tiles, k_blocks, tile.parts, kChainsInParts / tile.parts * length);
  }
  const int most = device.sm_count / tile.cluster;
  if (tiles >= most) {
    const int64_t even = EvenClusters(tiles, k_blocks, most);
    return MakeSchedule(tiles, k_blocks, even > 0 ? static_cast<int>(even) : most);
  }
  for (int parts = PersistentParks(tile.tokens) ? 1 : std::min(most / tiles, chains); parts > 1;
       --parts) {
    const int each = static_cast<int>(CeilDiv(chains, int64_t{parts}));
    // None may be left without a chain.
    if ((parts - 1) * each < chains) return MakeParts(tiles, k_blocks, parts, each * length);
  }
  return MakeSchedule(tiles, k_blocks, tiles);
}

int64_t PersistentSumsBytes(const DeviceInfo& device) {
  return device.sm_count * SlotBytes(kCandidates);
}

// A part puts down its chains one by one. A cluster that leaves a tile to the next one puts down
// the sum of whole chains and the chain that the cut goes through, and one that parks totals needs
// a place for that of the tile that it works on meanwhile.
int ChainedSlots(const Schedule& schedule, int chain, const PersistentTile& tile) {
  if (schedule.parts > 0) return schedule.part_steps / chain;
  return PersistentParks(tile.tokens) ? 3 : 2;
}

int64_t ChainedSumsBytes(const WeightShape& shape, const DeviceInfo& device) {
  int64_t bytes = 0;
  for (const Candidate& candidate : kChained) {
    const bool parks = PersistentParks(candidate.tile.tokens);
    const int64_t slots = parks ? 3 : std::max(2, MatmulChains(shape, device).count() / 2);
    bytes = std::max(bytes, slots * PersistentSlotFloats(candidate.tile) * int64_t{sizeof(float)});
  }
  return device.sm_count * bytes;
}

PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x) {
  const int64_t k_blocks = mma16::BlocksK(shape.k);
  return Fastest(
      kCandidates, m, x, device,
      [&](const PersistentTile& tile) {
        return Suits(tile, Tiles(shape, m, tile), k_blocks, device);
      },
      [&](const PersistentTile& tile) { return PersistentSchedule(shape, m, tile, device); },
      [](const PersistentTile&, const Schedule&) { return 0.0; });
}

PersistentTile ChooseChainedTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                 DType x) {
  const int64_t k_blocks = mma16::BlocksK(shape.k);
  const Chains chains = MatmulChains(shape, device);
  const bool in_parts = CeilDiv(k_blocks, int64_t{chains.length}) == kChainsInParts;
  return Fastest(
      kChained, m, x, device,
      [&](const PersistentTile& tile) {
        return (tile.parts == 1 || in_parts) &&
               Suits(tile, Tiles(shape, m, tile), k_blocks, device);
      },
      [&](const PersistentTile& tile) { return ChainedSchedule(shape, m, tile, device); },
      [&](const PersistentTile& tile, const Schedule& s) {
        return PersistentParks(tile.tokens)
                   ? kParkUs * (chains.count() - 1) * s.tiles() / s.clusters
                   : 0.0;
      });
}

}  // namespace awqd::cuda
