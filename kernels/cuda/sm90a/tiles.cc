// Tile choice of the persistent product.
#include "kernels/cuda/sm90a/tiles.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "absl/types/span.h"
#include "kernels/base/math.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/sm90a/tile_costs.h"
#include "kernels/cuda/sm90a/tile_list.h"

namespace awqd::cuda {
namespace {

static_assert(kRecordN == mma16::kTileN && kRecordK == mma16::kBlockK);

absl::Span<const TileCost> FreeTiles(const WeightShape& shape, DType x) {
  if (x == DType::kInt8) {
    return SumsStayIntegers(shape) ? absl::MakeConstSpan(kIntegerTilesInt8) : kFreeTilesInt8;
  }
  if (x == DType::kE4m3) return kTilesE4m3;
  return shape.scheme.bits == 8 ? absl::MakeConstSpan(kFreeTiles8) : kFreeTiles4;
}

// Those of a list that are compiled for weights like this one.
std::vector<PersistentTile> Compiled(absl::Span<const TileCost> list, const WeightShape& shape,
                                     DType x) {
  std::vector<PersistentTile> out;
  for (const TileCost& candidate : list) {
    if (Serves(candidate, KindOf(shape), x)) out.push_back(candidate.tile);
  }
  return out;
}

// Work units shorter than this spend more on the fix-up than they gain.
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

// Whether a tile can be split over a cluster: every slice has a step, and each split a
// multiprocessor to itself. More splits than multiprocessors are slower than stream-K (28672 x 8192
// at 512 tokens 310 us instead of 299).
bool Suits(const PersistentTile& tile, int64_t tiles, int64_t k_blocks, const DeviceInfo& device) {
  if (StaysWhole(tile)) return tiles <= device.sm_count;
  if (tile.splits == 1) return true;
  const int64_t split_steps = CeilDiv(k_blocks, int64_t{tile.splits});
  const int64_t slice_steps = CeilDiv(split_steps, int64_t{tile.slices});
  if ((tile.splits - 1) * split_steps + (tile.slices - 1) * slice_steps >= k_blocks) return false;
  return tiles * tile.splits <= device.sm_count;
}

// Whether data-parallel tiles, one for each cluster, are faster than stream-K with so many fewer
// steps: the steps cost less, by a line through tile_list.h, than a fix-up.
bool IsFasterWhole(const PersistentTile& tile, double fewer_steps) {
  const double step_us = tile.records * (0.13 + 0.0019 * tile.tokens);
  const double size = TileSize(tile);
  return fewer_steps * step_us <= StorePartialsUs(size) + LoadPartialsUs(size);
}

// How many of at most `most` clusters to use so that every one has equally many steps, all of one
// tile or of whole tiles; 0 where that would cost more than it saves. At 4096 x 4096 (H100,
// 2026-11-21): 128 clusters instead of 132 take 27.0 us instead of 29.2 at 512 tokens, 185 instead
// of 206 at 4096. Beyond a few rounds only the last one is stream-K and there is nothing to gain.
int64_t StreamKClusters(int64_t tiles, int64_t k_blocks, const PersistentTile& tile, int64_t most) {
  constexpr int kMostRounds = 4;
  constexpr double kMostExtra = 1.06;  // steps
  const double stream_k_steps = static_cast<double>(tiles) * k_blocks / most;
  if (tiles <= most) {
    const int64_t splits = std::min(most / tiles, k_blocks / kLeastSteps);
    if (splits == 1 && IsFasterWhole(tile, k_blocks - stream_k_steps)) return tiles;
    const bool stream_k = splits > 0 && CeilDiv(k_blocks, splits) <= kMostExtra * stream_k_steps;
    return stream_k ? tiles * splits : 0;
  }
  const int64_t rounds = CeilDiv(tiles, most);
  const bool stream_k = tiles % rounds == 0 && rounds <= kMostRounds &&
                        rounds * k_blocks <= kMostExtra * stream_k_steps;
  return stream_k ? tiles / rounds : 0;
}

int64_t KRangesOfSplit(const PersistentTile& tile, int64_t k_ranges) {
  return tile.accumulators > 0 ? tile.accumulators * tile.slices
                               : CeilDiv(k_ranges, int64_t{tile.splits});
}

// Whether a split-K tile serves so many k-ranges. Where no split adds up its own, each reads all
// that both stored, which is worth it for one k-range each: 14336 x 4096 at 384 tokens, eight
// k-ranges, 79 us with {128, 3}, predicted 65.
bool HasPartsFor(const PersistentTile& tile, int64_t k_ranges) {
  if (tile.splits == 1) return true;
  const int64_t each = KRangesOfSplit(tile, k_ranges);
  if (tile.accumulators > 0) return tile.splits * each == k_ranges;
  const bool affords = each == 2 || (each > 2 && PersistentFirstAddsUp(tile.records));
  return affords && (tile.splits - 1) * each < k_ranges;
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

RecordKind KindOf(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  const int metas = mma16::MetasPerRecord(shape);
  if (mma16::HasRealZeros(shape)) return RealZeros(d.bits);
  switch (d.code) {
    case CodeKind::kE2m1:
      return d.scale_dtype == DType::kE4m3 || d.scale_dtype == DType::kE8m0 ? kE2m1
                                                                            : kE2m1LongScales;
    case CodeKind::kTable:
      return kTable;
    case CodeKind::kE4m3:
      return E4m3(metas <= 1 ? metas : 8);
    case CodeKind::kUnsigned:
    case CodeKind::kVector:  // never in records, as the next
    case CodeKind::kTrellis:
      break;
  }
  // Few weights have these widths.
  if (d.bits == 1 || (d.bits > 4 && d.bits < 8)) return Integers(d.bits, 8);
  return Integers(d.bits, metas <= 1 || (metas == 2 && d.bits == 4) ? metas : 8);
}

bool SumsStayIntegers(const WeightShape& shape) {
  constexpr int64_t kTooManyProducts = 1 << 17;  // of two signed bytes
  if (!shape.scheme.scale_dtype) return true;
  return shape.group_rows() == shape.k && shape.k < kTooManyProducts;
}

std::vector<PersistentTile> PersistentTiles(const WeightShape& shape, DType x) {
  return Compiled(FreeTiles(shape, x), shape, x);
}

std::vector<PersistentTile> FixedOrderTiles(const WeightShape& shape) {
  return Compiled(kFixedOrderTiles4, shape, DType::kFp16);
}

namespace {

StreamKSchedule ScheduleTiles(int64_t tiles, int64_t k_blocks, const PersistentTile& tile,
                              const DeviceInfo& device) {
  if (tile.splits > 1) {
    return MakeSplitKSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks), tile.splits,
                              static_cast<int>(CeilDiv(k_blocks, int64_t{tile.splits})));
  }
  const int64_t most = device.sm_count / tile.cluster;
  if (StaysWhole(tile)) {
    return MakeStreamKSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                               static_cast<int>(std::min(tiles, most)));
  }
  int64_t clusters = std::clamp<int64_t>(tiles * k_blocks / kLeastSteps, 1, most);
  if (const int64_t stream_k = StreamKClusters(tiles, k_blocks, tile, most)) clusters = stream_k;
  return MakeStreamKSchedule(static_cast<int>(tiles), static_cast<int>(k_blocks),
                             static_cast<int>(clusters));
}

}  // namespace

StreamKSchedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                                   const DeviceInfo& device) {
  return ScheduleTiles(Tiles(shape, m, tile), mma16::BlocksK(shape.k), tile, device);
}

StreamKSchedule GroupedSchedule(const WeightShape& shape, int64_t token_tiles,
                                const PersistentTile& tile, const DeviceInfo& device) {
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

StreamKSchedule FixedOrderSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                                   const DeviceInfo& device) {
  const int tiles = static_cast<int>(Tiles(shape, m, tile));
  const int k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  const int length = ChooseFixedOrder(shape, device).length;
  const int k_ranges = static_cast<int>(CeilDiv(k_blocks, int64_t{length}));
  if (tile.splits > 1) {
    return MakeSplitKSchedule(tiles, k_blocks, tile.splits,
                              static_cast<int>(KRangesOfSplit(tile, k_ranges)) * length);
  }
  const int most = device.sm_count / tile.cluster;
  if (tiles >= most) {
    const int64_t stream_k = StreamKClusters(tiles, k_blocks, tile, most);
    return MakeStreamKSchedule(tiles, k_blocks, stream_k > 0 ? static_cast<int>(stream_k) : most);
  }
  for (int splits = PersistentParks(tile.tokens) ? 1 : std::min(most / tiles, k_ranges); splits > 1;
       --splits) {
    const int each = static_cast<int>(CeilDiv(k_ranges, int64_t{splits}));
    // None may be left without a k-range.
    if ((splits - 1) * each < k_ranges)
      return MakeSplitKSchedule(tiles, k_blocks, splits, each * length);
  }
  return MakeStreamKSchedule(tiles, k_blocks, tiles);
}

int64_t PersistentSumsBytes(const DeviceInfo& device) {
  return device.sm_count * LargestSums(kFreeTiles4);
}

// A split stores its k-ranges one by one. A cluster that continues a tile for the next one stores
// the sum of complete k-ranges and the open k-range. Where totals are kept in global memory it
// needs one more slot for the total of the tile that it works on meanwhile.
int FixedOrderSlots(const StreamKSchedule& schedule, int k_range, const PersistentTile& tile) {
  if (schedule.splits > 0) return schedule.split_steps / k_range;
  return PersistentParks(tile.tokens) ? 3 : 2;
}

int64_t FixedOrderSumsBytes(const WeightShape& shape, const DeviceInfo& device) {
  int64_t bytes = 0;
  for (const TileCost& candidate : kFixedOrderTiles4) {
    const bool parks = PersistentParks(candidate.tile.tokens);
    const int64_t slots = parks ? 3 : std::max(2, ChooseFixedOrder(shape, device).count() / 2);
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
    return Serves(candidate, kind, x) && !IsTooNarrow(tile, m) &&
           Suits(tile, Tiles(shape, m, tile), k_blocks, device);
  }
  double Us(const TileCost& cost) const {
    const StreamKSchedule s = PersistentSchedule(shape, m, cost.tile, device);
    return Microseconds(s, cost, x, record_bytes, speed);
  }

  const WeightShape& shape;
  const int64_t m;
  const DeviceInfo& device;
  const DType x;
  const int64_t k_blocks = mma16::BlocksK(shape.k);
  const RecordKind kind = KindOf(shape);
  const int record_bytes = mma16::RecordBytes(shape);
  const GpuSpeed speed = SpeedOf(device);
};

// The same where the order of sums is kept.
struct FixedOrderProduct {
  absl::Span<const TileCost> Candidates() const { return kFixedOrderTiles4; }

  bool Allows(const TileCost& candidate) const {
    return HasPartsFor(candidate.tile, filled_k_ranges) && any.Allows(candidate);
  }
  double Us(const TileCost& cost) const {
    const StreamKSchedule s = FixedOrderSchedule(any.shape, any.m, cost.tile, any.device);
    return FixedOrderMicroseconds(s, cost, any.x, filled_k_ranges, k_range_steps, any.record_bytes,
                                  any.speed);
  }

  const FreeProduct any;
  const int k_range_steps = ChooseFixedOrder(any.shape, any.device).length;
  const int filled_k_ranges = static_cast<int>(CeilDiv(any.k_blocks, int64_t{k_range_steps}));
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

PersistentTile ChooseFixedOrderTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x) {
  return Fastest(FixedOrderProduct{{shape, m, device, x}});
}

PersistentTile ChooseGroupedTile90(const WeightShape& shape, const DeviceInfo& device, DType x,
                                   absl::FunctionRef<int64_t(int64_t tokens)> token_tiles) {
  const int record_bytes = mma16::RecordBytes(shape);
  const GpuSpeed speed = SpeedOf(device);
  PersistentTile best;
  double least = std::numeric_limits<double>::infinity();
  const RecordKind kind = KindOf(shape);
  for (const TileCost& candidate :
       x == DType::kE4m3 ? absl::MakeConstSpan(kExpertTilesE4m3) : kExpertTiles) {
    if (!Serves(candidate, kind, x)) continue;
    const StreamKSchedule s =
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

std::vector<RatedTile> RateFixedOrderTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x) {
  return Rate(FixedOrderProduct{{shape, m, device, x}});
}

}  // namespace awqd::cuda
