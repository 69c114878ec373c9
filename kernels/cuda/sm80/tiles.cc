// Tile choice of the fused product.
#include "kernels/cuda/sm80/tiles.h"

#include <algorithm>

#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

static_assert(kRecordN == mma16::kTileN && kRecordK == mma16::kBlockK);

// Whether the k-ranges of one block are divided among two blocks, of two row tiles each: where K is
// long, activations are read as often as weights, and this halves them. H100, 2026-11-22, 16
// tokens: 28672 x 8192 47.8 us instead of 50.3, 8192 x 8192 16.7 instead of 16.6; 8 tokens: 45.8
// instead of 44.9. To BF16 two row tiles decode too slowly: 62.4 instead of 56.5.
bool DealsOut(const FixedOrder& k_ranges, int tokens, DType x, const DeviceInfo& device) {
  constexpr int kLongKRange = 32;  // records
  return x == DType::kFp16 && tokens == 16 && device.arch >= 90 && k_ranges.splits == 1 &&
         k_ranges.per_block == 4 && k_ranges.length >= kLongKRange;
}

bool Fits(const MatmulVariant& variant, RingBytes bytes, int splits, const DeviceInfo& device) {
  return MatmulSharedBytes(variant, bytes, splits, device) <= device.shared_bytes_per_block;
}

// One consumer's. Rings of two slots may be too small for the reduction.
int64_t RingSize(const MatmulVariant& variant, int64_t slot, const DeviceInfo& device) {
  if (device.arch >= 80) return variant.stages * slot;
  const int64_t sums = int64_t{4} * variant.tokens * SumStride(variant.row_tiles * mma16::kTileN);
  return std::max(kHeldSlots * slot, sums);
}

}  // namespace

absl::Span<const MatmulVariant> MatmulVariants(const WeightShape& shape, DType x) {
  if (x == DType::kE4m3) return kFloat8Tiles;
  if (!shape.scheme.is_integer()) return kFloatTiles;
  if (mma16::HasRealZeros(shape)) return kRealTiles;
  if (x == DType::kInt8) return kInt8Tiles;
  if (shape.scheme.bits > 4) return kTiles8;
  if (shape.scheme.bits < 4) return kNarrowTiles;
  return mma16::MetasPerRecord(shape) == 1 ? absl::MakeConstSpan(kTiles4) : kFewTiles4;
}

RingBytes RingBytesOf(const WeightShape& shape, DType x) {
  return {mma16::RecordBytes(shape), static_cast<int>(SizeOf(x)), x == DType::kE4m3 ? 4 : 0,
          PairTableBytes(shape.scheme.code)};
}

int64_t MatmulSharedBytes(const MatmulVariant& variant, RingBytes bytes, int splits,
                          const DeviceInfo& device) {
  const int64_t stage =
      variant.row_tiles * bytes.record + variant.tokens * (mma16::kBlockK * bytes.x + bytes.scale);
  const int64_t rings = bytes.table + variant.k_ranges * RingSize(variant, stage, device);
  if (splits == 1) return rings;
  const int64_t slot = variant.tokens * SumStride(variant.row_tiles * mma16::kTileN / splits) * 4;
  return rings + kReductionBarrierBytes + splits * variant.k_ranges * slot;
}

MatmulTile ChooseMatmulTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                            DType x) {
  const RingBytes bytes = RingBytesOf(shape, x);
  const absl::Span<const MatmulVariant> variants = MatmulVariants(shape, x);
  const FixedOrder k_ranges = ChooseFixedOrder(shape, device);
  int tokens = variants[0].tokens;
  for (const MatmulVariant& variant : variants) {
    if (variant.k_ranges != k_ranges.per_block || !Fits(variant, bytes, k_ranges.splits, device))
      continue;
    tokens = variant.tokens;
    if (tokens >= m) break;
  }
  // Two row tiles share each load of activations but halve the blocks: worth it once those still
  // fill the device. The smallest products want more blocks in flight, but all at once; the largest
  // take a multiprocessor each and gain most. H100, 2026-11-21: 4096 x 6144, 128 tokens, 31.4 us
  // with two and 41.0 with one; 8192 x 57344, one token, 109 with two and 90 with one.
  const int64_t blocks = CeilDiv(shape.n, 2 * mma16::kTileN) * k_ranges.splits * CeilDiv(m, tokens);
  const int64_t tenths = blocks * 10 / std::max(1, device.sm_count);
  const bool fills = tokens <= 16 ? tenths >= 15 && tenths <= 30 : tenths >= (tokens < 96 ? 9 : 7);
  MatmulTile tile{tokens, 1, k_ranges};
  // A GPU with room for four k-ranges has room for this.
  if (DealsOut(k_ranges, tokens, x, device)) return {tokens, 2, {2, 2, k_ranges.length}};
  for (const MatmulVariant& variant : variants) {
    if (fills && variant.tokens == tokens && variant.k_ranges == k_ranges.per_block &&
        Fits(variant, bytes, k_ranges.splits, device)) {
      tile.row_tiles = variant.row_tiles;
    }
  }
  return tile;
}

MatmulTile ChooseGroupedTile(const WeightShape& shape, int64_t rows, const DeviceInfo& device) {
  constexpr int kLongK = 64;  // records
  const int k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  const RingBytes bytes = RingBytesOf(shape, DType::kFp16);
  const bool four_fit = std::all_of(
      std::begin(kGroupedTiles), std::end(kGroupedTiles), [&](const MatmulVariant& variant) {
        return variant.k_ranges != 4 || Fits(variant, bytes, 1, device);
      });
  const int k_ranges = k_blocks >= kLongK && four_fit ? 4 : 2;
  MatmulTile tile{0, 1, {1, k_ranges, (k_blocks + k_ranges - 1) / k_ranges}};
  for (const MatmulVariant& variant : kGroupedTiles) {
    if (variant.k_ranges != k_ranges || !Fits(variant, bytes, 1, device)) continue;
    tile.tokens = variant.tokens;
    if (tile.tokens >= rows) break;
  }
  return tile;
}

int64_t StreamKSharedBytes(const MatmulVariant& variant, RingBytes bytes) {
  const int64_t slot = bytes.record + variant.tokens * mma16::kBlockK * bytes.x;
  const int64_t place = int64_t{4} * variant.tokens * SumStride(mma16::kTileN);
  return variant.k_ranges * (variant.stages * slot + kStreamKBuffers * place) + kStreamKBuffers * 8;
}

// When stream-K gains. Times in us of one token and of 16, data parallel and then stream-K,
// 2026-11-27. Tiles for each multiprocessor: H100, 3584 x 37888, 4.48 tiles: 29.9 and 38.4, 27.3
// and 30.8; 8192 x 57344, 6.79: 89.7 and 98.8, 86.0 and 91.6; 8192 x 10240, 1.21: 18.0 and 21.0,
// 17.8 and 19.7. H200, 3584 x 18944, 2.24: 12.4 and 16.5, 11.6 and 14.6.
//
// A multiprocessor has room for four blocks of whole tiles, and three or four hide each other's
// waits: 4096 x 28672, 3.39, H100 24.2 and 26.4, stream-K 23.6 and 26.5, H200 17.7 and 21.8, 18.2
// and 22.6. Where tiles are fewer than the multiprocessors every block waits for another to its
// end: H100, 8192 x 8192, 0.97, 13.3 and 15.3, 14.7 and 15.9.
int StreamKBlocks(const WeightShape& shape, int64_t m, const DeviceInfo& device) {
  // The least that were measured.
  constexpr int64_t kLeastRecordsOfTile = 28, kLeastRecordsOfBlock = 60;
  constexpr int kMostBlocks = 256;  // stream_k_schedule.h
  const int64_t tiles = mma16::TilesN(shape.n), k_blocks = mma16::BlocksK(shape.k);
  const int64_t sms = device.sm_count;
  const MatmulVariant& variant = kStreamKTiles[m > kStreamKTiles[0].tokens];
  const bool serves = device.arch >= 90 && sms <= kMostBlocks && k_blocks <= kMostKBlocks &&
                      StreamKSharedBytes(variant, RingBytesOf(shape, DType::kFp16)) <=
                          device.shared_bytes_per_block;
  const bool uneven = (tiles > sms && 2 * tiles <= 5 * sms) || tiles > 4 * sms;
  const bool pays =
      uneven && k_blocks >= kLeastRecordsOfTile && tiles * k_blocks >= kLeastRecordsOfBlock * sms;
  return serves && pays ? device.sm_count : 0;
}

int MatmulPrefetch(const MatmulTile& tile, int64_t m, int64_t n, bool after_prologue,
                   const DeviceInfo& device) {
  constexpr int kRing = 8;  // as much as it holds
  const int64_t blocks = CeilDiv(n, tile.row_tiles * mma16::kTileN) * tile.k_ranges.splits *
                         CeilDiv(m, int64_t{tile.tokens});
  if (after_prologue || blocks > device.sm_count) return kRing;
  return tile.tokens <= 8 ? 2 : 1;
}

int64_t MatmulLaunchBytes(const MatmulVariant& variant, RingBytes bytes, int64_t blocks, int splits,
                          const DeviceInfo& device) {
  // Each block costs 1 KB more than it asks for, and the opt-in maximum already leaves that out.
  constexpr int64_t kReserved = 1024;
  int64_t per_sm = std::max<int64_t>(1, CeilDiv(blocks, device.sm_count));
  if (splits > 2) ++per_sm;
  const int64_t share = (device.shared_bytes_per_block + kReserved) / per_sm - kReserved;
  return std::max(MatmulSharedBytes(variant, bytes, splits, device), share / 128 * 128);
}

}  // namespace awqd::cuda
