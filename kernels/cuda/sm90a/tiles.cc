// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "absl/types/span.h"
#include "kernels/base/math.h"
#include "kernels/cuda/common/chains.h"
#include "kernels/cuda/sm90a/tile_costs.h"
#include "kernels/cuda/sm90a/tile_list_grouped.h"
#include "kernels/cuda/sm90a/tile_list_int8.h"
#include "kernels/cuda/sm90a/tile_list_w4.h"
#include "kernels/cuda/sm90a/tile_list_w8.h"

namespace awqd::cuda {
namespace {

static_assert(kRecordN == mma16::kTileN && kRecordK == mma16::kBlockK);

RecordKind KindOfRecords(const WeightShape& shape) {
  const WeightDescription& d = shape.description;
  return KindOf(d.code, d.bits, mma16::MetasPerRecord(shape));
}

absl::Span<const TileCost> FreeTiles(const WeightShape& shape, DType x) {
  if (x == DType::kInt8) return kFreeTilesInt8;
  return shape.description.bits == 8 ? absl::MakeConstSpan(kFreeTiles8) : kFreeTiles4;
}

// Those of a list that are compiled for weights like this one.
std::vector<PersistentTile> Compiled(absl::Span<const TileCost> list, const WeightShape& shape) {
  std::vector<PersistentTile> out;
  for (const TileCost& candidate : list) {
    if ((candidate.kinds & KindOfRecords(shape)) != 0) out.push_back(candidate.tile);
  }
  return out;
}

// Runs shorter than this spend more on meeting than they gain.
constexpr int kLeastSteps = 2;

int64_t Tiles(const WeightShape& shape, int64_t m, const PersistentTile& tile) {
  return CeilDiv(shape.n, int64_t{tile.cluster} * tile.records * mma16::kTileN) *
         CeilDiv(m, int64_t{tile.tokens});
}

// Narrow tiles are for few tokens: weights are decoded again for every tile of tokens. 8192 x 10240
// at 192 tokens takes 76.6 us with three tiles of 64, 54 with one of 192; but 4096 x 6144 at 384
// 30.4 us with four of 96 and 34.5 with three of 128.
bool IsTooNarrow(const PersistentTile& tile, int64_t m) {
  const int64_t most_tiles = tile.tokens < 80 ? 1 : 4;
  return tile.tokens < 128 && m > most_tiles * tile.tokens;
}

// Whether a tile can be had in parts: every slice of them with a step, and each part with a
// multiprocessor to itself. More of them than multiprocessors are slower than tiles that are cut
// anywhere (28672 x 8192 at 512 tokens 310 us instead of 299).
bool Suits(const PersistentTile& tile, int64_t tiles, int64_t k_blocks, const DeviceInfo& device) {
  if (StaysWhole(tile)) return tiles <= device.sm_count;
  if (tile.parts == 1) return true;
  const int64_t part_steps = CeilDiv(k_blocks, int64_t{tile.parts});
  const int64_t slice_steps = CeilDiv(part_steps, int64_t{tile.slices});
  if ((tile.parts - 1) * part_steps + (tile.slices - 1) * slice_steps >= k_blocks) return false;
  return tiles * tile.parts <= device.sm_count;
}

// Whether tiles are faster whole, one for each cluster, than cut into so many fewer steps: what the
// steps cost, by a line through tile_list_w4.h, is less than what a cut does.
bool IsFasterWhole(const PersistentTile& tile, double fewer_steps) {
  const double step_us = tile.records * (0.13 + 0.0019 * tile.tokens);
  const double size = TileSize(tile);
  return fewer_steps * step_us <= PutDownUs(size) + TakeOverUs(size);
}

// How many of at most `most` clusters to take so that every one has as many steps, all of one tile
// or of whole tiles; 0 where that would cost more than a cut saves. At 4096 x 4096 (H100,
// 2026-11-21): 128 clusters instead of 132 take 27.0 us instead of 29.2 at 512 tokens, 185 instead
// of 206 at 4096. Beyond a few rounds only the last one is cut and there is nothing to gain.
int64_t EvenClusters(int64_t tiles, int64_t k_blocks, const PersistentTile& tile, int64_t most) {
  constexpr int kMostRounds = 4;
  constexpr double kMostExtra = 1.06;  // steps
  const double cut_steps = static_cast<double>(tiles) * k_blocks / most;
  if (tiles <= most) {
    const int64_t parts = std::min(most / tiles, k_blocks / kLeastSteps);
    if (parts == 1 && IsFasterWhole(tile, k_blocks - cut_steps)) return tiles;
    const bool even = parts > 0 && CeilDiv(k_blocks, parts) <= kMostExtra * cut_steps;
    return even ? tiles * parts : 0;
  }
  const int64_t rounds = CeilDiv(tiles, most);
  const bool even =
      tiles % rounds == 0 && rounds <= kMostRounds && rounds * k_blocks <= kMostExtra * cut_steps;
  return even ? tiles / rounds : 0;
}

int64_t ChainsOfPart(const PersistentTile& tile, int64_t chains) {
  return tile.sets > 0 ? tile.sets * tile.slices : CeilDiv(chains, int64_t{tile.parts});
}

// Whether a tile in parts serves so many chains. Where no part adds its own up, each reads all that
// both put down, which is worth it for one chain each: 14336 x 4096 at 384 tokens, eight chains,
// 79 us with {128, 3}, predicted 65.
bool HasPartsFor(const PersistentTile& tile, int64_t chains) {
  if (tile.parts == 1) return true;
  const int64_t each = ChainsOfPart(tile, chains);
  if (tile.sets > 0) return tile.parts * each == chains;
  const bool affords = each == 2 || (each > 2 && PersistentFirstAddsUp(tile.records));
  return affords && (tile.parts - 1) * each < chains;
}

// Bytes of the sums of a block with the largest tile.
int64_t LargestSums(absl::Span<const TileCost> candidates) {
  int64_t floats = 0;
  for (const TileCost& candidate : candidates) {
    floats = std::max(floats, PersistentSlotFloats(candidate.tile));
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace

bool IntegersScaleOnce(const WeightShape& shape) {
  constexpr int64_t kMostK = 1 << 16;
  return shape.group_rows() == shape.k && shape.k <= kMostK;
}

std::vector<PersistentTile> PersistentTiles(const WeightShape& shape, DType x) {
  return Compiled(FreeTiles(shape, x), shape);
}

std::vector<PersistentTile> ChainedTiles(const WeightShape& shape) {
  return Compiled(kChainedTiles4, shape);
}

namespace {

Schedule ScheduleTiles(int64_t tiles, int64_t k_blocks, const PersistentTile& tile,
                       const DeviceInfo& device) {
  if (tile.parts > 1) {
    return MakeParts(static_cast<int>(tiles), static_cast<int>(k_blocks), tile.parts,
                     static_cast<int>(CeilDiv(k_blocks, int64_t{tile.parts})));
  }
  const int64_t most = device.sm_count / tile.cluster;
  if (StaysWhole(tile)) {
    return MakeSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                        static_cast<int>(std::min(tiles, most)));
  }
  int64_t clusters = std::clamp<int64_t>(tiles * k_blocks / kLeastSteps, 1, most);
  if (const int64_t even = EvenClusters(tiles, k_blocks, tile, most)) clusters = even;
  return MakeSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                      static_cast<int>(clusters));
}

}  // namespace

Schedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                            const DeviceInfo& device) {
  return ScheduleTiles(Tiles(shape, m, tile), mma16::BlocksK(shape.k), tile, device);
}

Schedule GroupedSchedule(const WeightShape& shape, int64_t token_tiles, const PersistentTile& tile,
                         const DeviceInfo& device) {
  return ScheduleTiles(token_tiles * Tiles(shape, 1, tile), mma16::BlocksK(shape.k), tile, device);
}

namespace {

constexpr int64_t kSwizzledRows = 8;

int64_t LastTokens(int64_t m, const PersistentTile& tile) { return (m - 1) % tile.tokens + 1; }

}  // namespace

int LastTokenRows(int64_t m, const PersistentTile& tile) {
  const int64_t of_block = CeilDiv(LastTokens(m, tile), int64_t{tile.cluster});
  return static_cast<int>(RoundUp(of_block, kSwizzledRows));
}

int LastTokenStride(int64_t m, const PersistentTile& tile) {
  const int rows = LastTokenRows(m, tile);
  if (tile.cluster != 2) return rows;
  const auto filled = static_cast<int>(RoundUp(LastTokens(m, tile), kSwizzledRows));
  return std::min(rows, filled - rows);
}

Schedule ChainedSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                         const DeviceInfo& device) {
  const int tiles = static_cast<int>(Tiles(shape, m, tile));
  const int k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  const int length = MatmulChains(shape, device).length;
  const int chains = static_cast<int>(CeilDiv(k_blocks, int64_t{length}));
  if (tile.parts > 1) {
    return MakeParts(tiles, k_blocks, tile.parts,
                     static_cast<int>(ChainsOfPart(tile, chains)) * length);
  }
  const int most = device.sm_count / tile.cluster;
  if (tiles >= most) {
    const int64_t even = EvenClusters(tiles, k_blocks, tile, most);
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
  return device.sm_count * LargestSums(kFreeTiles4);
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
  for (const TileCost& candidate : kChainedTiles4) {
    const bool parks = PersistentParks(candidate.tile.tokens);
    const int64_t slots = parks ? 3 : std::max(2, MatmulChains(shape, device).count() / 2);
    bytes = std::max(bytes, slots * PersistentSlotFloats(candidate.tile) * int64_t{sizeof(float)});
  }
  return device.sm_count * bytes;
}

namespace {

// A product as the choice sees it: which tiles it can have, and what each costs. This one is free
// in the order of its sums.
struct FreeProduct {
  absl::Span<const TileCost> Candidates() const { return FreeTiles(shape, x); }

  bool Allows(const TileCost& candidate) const {
    const PersistentTile& tile = candidate.tile;
    return (candidate.kinds & kind) != 0 && !IsTooNarrow(tile, m) &&
           Suits(tile, Tiles(shape, m, tile), k_blocks, device);
  }
  double Us(const TileCost& cost) const {
    const Schedule s = PersistentSchedule(shape, m, cost.tile, device);
    return Microseconds(s, cost, x, record_bytes, speed);
  }

  const WeightShape& shape;
  const int64_t m;
  const DeviceInfo& device;
  const DType x;
  const int64_t k_blocks = mma16::BlocksK(shape.k);
  const RecordKind kind = KindOfRecords(shape);
  const int record_bytes = mma16::RecordBytes(shape);
  const GpuSpeed speed = SpeedOf(device);
};

// The same where the order of sums is kept.
struct ChainedProduct {
  absl::Span<const TileCost> Candidates() const { return kChainedTiles4; }

  bool Allows(const TileCost& candidate) const {
    return HasPartsFor(candidate.tile, filled_chains) && any.Allows(candidate);
  }
  double Us(const TileCost& cost) const {
    const Schedule s = ChainedSchedule(any.shape, any.m, cost.tile, any.device);
    return ChainedMicroseconds(s, cost, any.x, filled_chains, chain_steps, any.record_bytes,
                               any.speed);
  }

  const FreeProduct any;
  const int chain_steps = MatmulChains(any.shape, any.device).length;
  const int filled_chains = static_cast<int>(CeilDiv(any.k_blocks, int64_t{chain_steps}));
};

template <class Product>
PersistentTile Fastest(const Product& product) {
  const TileCost* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const TileCost& candidate : product.Candidates()) {
    if (!product.Allows(candidate)) continue;
    const double us = product.Us(candidate);
    if (us < least) best = &candidate, least = us;
  }
  return best->tile;
}

template <class Product>
std::vector<RatedTile> Rate(const Product& product) {
  std::vector<RatedTile> out;
  for (const TileCost& candidate : product.Candidates()) {
    if (!product.Allows(candidate)) continue;
    const double us = product.Us(candidate);
    out.push_back({candidate.tile, us, us - product.Us({candidate.tile, 0, 0})});
  }
  return out;
}

}  // namespace

PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x) {
  return Fastest(FreeProduct{shape, m, device, x});
}

PersistentTile ChooseChainedTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                 DType x) {
  return Fastest(ChainedProduct{{shape, m, device, x}});
}

PersistentTile ChooseGroupedTile90(const WeightShape& shape, const DeviceInfo& device, DType x,
                                   absl::FunctionRef<int64_t(int64_t tokens)> token_tiles) {
  const int record_bytes = mma16::RecordBytes(shape);
  const GpuSpeed speed = SpeedOf(device);
  PersistentTile best;
  double least = std::numeric_limits<double>::infinity();
  for (const TileCost& candidate : kGroupedTiles4) {
    const Schedule s =
        GroupedSchedule(shape, token_tiles(candidate.tile.tokens), candidate.tile, device);
    const double us = Microseconds(s, candidate, x, record_bytes, speed);
    if (us < least) best = candidate.tile, least = us;
  }
  return best;
}

std::vector<RatedTile> RatePersistentTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x) {
  return Rate(FreeProduct{shape, m, device, x});
}

std::vector<RatedTile> RateChainedTiles(const WeightShape& shape, int64_t m,
                                        const DeviceInfo& device, DType x) {
  return Rate(ChainedProduct{{shape, m, device, x}});
}

}  // namespace awqd::cuda
