// The geometry of layout "vectors", which kernels share with the packer. vectors.cc specifies it.
#pragma once

#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/base/vector_codes.h"
#include "kernels/layouts/layout.h"

namespace awqd::vectors {

inline constexpr int kTileColumns = 16;    // out features of a tile, which has one block of each
inline constexpr int kRecordColumns = 64;  // out features of four tiles, which lie together
inline constexpr int kRecordTiles = kRecordColumns / kTileColumns;

constexpr bool HasPairs(VectorCode code) {  // an index for each four elements
  return code == VectorCode::kIq3Xxs || code == VectorCode::kIq3S;
}
constexpr bool HasOffsets(VectorCode code) {  // in place of signs
  return code == VectorCode::kIq1S || code == VectorCode::kIq1M;
}

// Bytes of a lane in the planes of a round, which has two groups of 32 elements for each lane.
constexpr int IndexPlanes(VectorCode code) { return HasPairs(code) ? 2 : 1; }
inline constexpr int kIndexBytes = 8;
constexpr int SignBytes(VectorCode code) { return HasOffsets(code) ? 0 : 8; }
constexpr int HighBytes(VectorCode code) {
  if (HasOffsets(code)) return 4;
  return code == VectorCode::kIq2S || code == VectorCode::kIq3S ? 2 : 0;
}
constexpr int ScaleBytes(VectorCode code) {
  if (code == VectorCode::kIq3S) return 1;
  const bool own = code == VectorCode::kIq2Xs || code == VectorCode::kIq2S;
  return own || code == VectorCode::kIq1M ? 2 : 0;
}

// Where the planes of a round begin, in the order in which they lie.
constexpr int SignsAt(VectorCode code) { return 32 * kIndexBytes * IndexPlanes(code); }
constexpr int HighAt(VectorCode code) { return SignsAt(code) + 32 * SignBytes(code); }
constexpr int ScalesAt(VectorCode code) { return HighAt(code) + 32 * HighBytes(code); }
constexpr int RoundBytes(VectorCode code) { return ScalesAt(code) + 32 * ScaleBytes(code); }
// In a tile, after two rounds.
constexpr int FactorsAt(VectorCode code) { return 2 * RoundBytes(code); }
constexpr int TileBytes(VectorCode code) { return kTileColumns * VectorBlockBytes(code); }

constexpr int64_t Records(int64_t n) { return CeilDiv(n, kRecordColumns); }

}  // namespace awqd::vectors
