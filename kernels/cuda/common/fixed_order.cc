// How many k-ranges a weight has: as many as a single token needs to fill the device, and no more.
#include "kernels/cuda/common/fixed_order.h"

#include <cstdint>

#include "kernels/base/math.h"

namespace awqd::cuda {
namespace {

// Records of the shortest k-range worth having: shorter ones cost more to add up than they gain.
// H100, 2026-11-21, 4096 x 4096, one token: k-ranges of 8 records 6.4 us, of 4 6.9.
constexpr int64_t kLeastRecords = 8;
// Records that a block must have, at least, to share a tile's k-ranges with others.
constexpr int64_t kLeastRecordsOfBlock = 4;
// The largest cluster that every device must accept.
constexpr int kMostBlocks = 8;
// The most shared memory that a block of four k-ranges needs.
constexpr int64_t kFourKRangesBytes = 208896;

}  // namespace

FixedOrder ChooseFixedOrder(const WeightShape& shape, const DeviceInfo& device) {
  const int64_t tiles = CeilDiv(shape.n, kRecordN), records = CeilDiv(shape.k, kRecordK);
  const int64_t sms = device.sm_count;
  const auto fills = [&](int64_t blocks, int tenths) { return blocks * 10 >= tenths * sms; };
  // Two k-ranges are two warps per scheduler, too few to hide the decode where a multiprocessor has
  // one block: 14336 x 4096, one token, 14.8 us with two k-ranges, 14.0 with four.
  const auto takes_four = [&](int splits) {
    return tiles * splits <= sms && records / (4 * splits) >= kLeastRecords &&
           device.shared_bytes_per_block >= kFourKRangesBytes;
  };
  FixedOrder out;
  // Where N alone fills most multiprocessors, blocks that meet in clusters gain nothing: 4096 x
  // 6144 7.6 us instead of 8.5, 8192 x 8192 14.3 instead of 14.9. Below sm_90 there are none.
  const bool alone =
      device.arch < 90 || fills(CeilDiv(tiles, 2), 9) || (fills(tiles, 7) && takes_four(1));
  // Two blocks cost next to nothing: a pair of neighbouring multiprocessors always has room for
  // them. Larger clusters leave multiprocessors empty, so they are for small N only: four or more
  // instead of two 8.5 us at 4096 x 4096 instead of 7.3.
  while (!alone && out.splits < kMostBlocks && (out.splits == 1 || !fills(tiles * out.splits, 9)) &&
         records / (2 * out.splits) >= kLeastRecordsOfBlock) {
    out.splits *= 2;
  }
  if (takes_four(out.splits)) out.per_block = 4;
  out.length = static_cast<int>(CeilDiv(records, int64_t{out.count()}));
  return out;
}

}  // namespace awqd::cuda
