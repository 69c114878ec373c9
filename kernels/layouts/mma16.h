// Declares the layout "mma16" and its geometry, which kernels share with the packer.
//
// Weights are the A operand of m16n8k16 (rows = out features), four fragments per 16-byte load. The
// unit of storage is a record: 64 out features x 128 in features, codes first, then what decodes
// them, so that one contiguous read brings all that a block needs for one step. Records follow each
// other along K, then along N. README.md has the worked example.
#pragma once

#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/layouts/layout.h"

namespace awqd {

extern const Layout kMma16Layout;

namespace mma16 {

inline constexpr int kTileN = 64;       // out features of a record
inline constexpr int kBlockK = 128;     // in features of a record
inline constexpr int kRowTile = 16;     // out features of a fragment
inline constexpr int kUnitK = 64;       // in features of one lane's 16 bytes: four steps of 16
inline constexpr int kUnitBytes = 512;  // 32 lanes x 16 bytes
inline constexpr int kCodesBytes = kTileN * kBlockK / 2;
// One meta: 64 scales (16 bits), then 64 zero points (4 bits).
inline constexpr int kMetaScalesBytes = kTileN * 2;
inline constexpr int kMetaBytes = kMetaScalesBytes + kTileN / 2;

// Metas per record, 1, 2, 4 or 8: each serves 128 / that many rows of K. A group longer than its
// share is repeated, so that kernels never divide by the group size. Group sizes are multiples of
// 16, or K itself.
constexpr int MetasPerRecord(int64_t k, int64_t group_size) {
  if (group_size == k || group_size % 128 == 0) return 1;
  if (group_size % 64 == 0) return 2;
  return group_size % 32 == 0 ? 4 : 8;
}

constexpr int RecordBytes(int metas) { return kCodesBytes + metas * kMetaBytes; }
constexpr int64_t TilesN(int64_t n) { return CeilDiv(n, kTileN); }
constexpr int64_t BlocksK(int64_t k) { return CeilDiv(k, kBlockK); }

}  // namespace mma16
}  // namespace awqd
