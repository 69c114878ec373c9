// How many chains a weight has: as many as a single token needs to fill the device, and no more.
#include "kernels/cuda/common/chains.h"

#include <cstdint>

#include "kernels/base/math.h"

namespace awqd::cuda {
namespace {

// Records of the shortest chain worth having: shorter ones cost more to add up than they gain.
// H100, 2026-11-21, 4096 x 4096, one token: chains of 8 records 6.4 us, of 4 6.9.
constexpr int64_t kLeastRecords = 8;
// Records that a block must have, at least, to share a tile's chains with others.
constexpr int64_t kLeastRecordsOfBlock = 4;
// The largest cluster that every device must accept.
constexpr int kMostBlocks = 8;
// The most shared memory that a block of four chains needs.
constexpr int64_t kFourChainsBytes = 208896;

}  // namespace

Chains MatmulChains(const WeightShape& shape, const DeviceInfo& device) {
  const int64_t tiles = CeilDiv(shape.n, kRecordN), records = CeilDiv(shape.k, kRecordK);
  const int64_t sms = device.sm_count;
  const auto fills = [&](int64_t blocks, int tenths) { return blocks * 10 >= tenths * sms; };
  // Two chains are two warps per scheduler, too few to hide the decode where a multiprocessor has
  // one block: 14336 x 4096, one token, 14.8 us with two chains, 14.0 with four.
  const auto takes_four = [&](int split) {
    return tiles * split <= sms && records / (4 * split) >= kLeastRecords &&
           device.shared_bytes_per_block >= kFourChainsBytes;
  };
  Chains out;
  // Where N alone fills most multiprocessors, blocks that meet in clusters gain nothing: 4096 x
  // 6144 7.6 us instead of 8.5, 8192 x 8192 14.3 instead of 14.9. Below sm_90 there are none.
  const bool alone =
      device.arch < 90 || fills(CeilDiv(tiles, 2), 9) || (fills(tiles, 7) && takes_four(1));
  // Two blocks cost next to nothing: a pair of neighbouring multiprocessors always has room for
  // them. Larger clusters leave multiprocessors empty, so they are for small N only: four or more
  // instead of two 8.5 us at 4096 x 4096 instead of 7.3.
  while (!alone && out.split < kMostBlocks && (out.split == 1 || !fills(tiles * out.split, 9)) &&
         records / (2 * out.split) >= kLeastRecordsOfBlock) {
    out.split *= 2;
  }
  if (takes_four(out.split)) out.per_block = 4;
  out.length = static_cast<int>(CeilDiv(records, int64_t{out.count()}));
  return out;
}

}  // namespace awqd::cuda
