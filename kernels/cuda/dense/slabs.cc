// The slab rule of the dense path.
#include "kernels/cuda/dense/slabs.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/base/math.h"

namespace awqd::dense {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kAlign = 256;
// For many tokens a slab may fill two thirds of the L2, and is 2^n columns wide, 2048 at most:
// cuBLASLt's tiles then come out even. H100, 2026-11-21, M = 4096: 4096 x 28672 1373 us with 2048
// columns, 1561 with 4096, 1560 with 1536; 14336 x 4096 711 with 1024, 868 with 2048, 958 with
// 1408.
constexpr int64_t kMinTargetBytes = 4 * kMiB;
constexpr int64_t kMaxTargetBytes = 32 * kMiB;
constexpr int64_t kMostL2Columns = 2048;
// What a slab takes at most. H100, 2026-11-21, [256, 14336] x [14336, 4096]: 112 us in one slab of
// 112 MiB, 126 in two, 137 in four.
constexpr int64_t kMaxSlabBytes = 128 * kMiB;
// Below kFewTokens a product ends so soon that the starts and tails of slabs cost more than the
// trip of the decoded weight through memory: as few slabs as there is room for. From kManyTokens
// on, slabs stay in L2. Between the two, kMiddleColumns fill the GPU evenly: 4096 x 28672, 512
// tokens, 271 us against 295 in two slabs and 353 in L2.
constexpr int64_t kFewTokens = 512;
constexpr int64_t kManyTokens = 2048;
constexpr int64_t kMiddleColumns = 4096;
constexpr int64_t kScratchBytes = 16 * kMiB;
// Slabs are cut at cuBLASLt's output tiles.
constexpr int64_t kTile = 128;
// What NVIDIA advises for Hopper and what suffices before it.
constexpr int64_t kBlasBytesHopper = 32 * kMiB;
constexpr int64_t kBlasBytesBefore = 8 * kMiB;

// Columns whose decoded weights take at most `bytes`: a multiple of the tile where one fits, else
// of 8, and at least 8.
int64_t ColumnsIn(int64_t bytes, int64_t bytes_per_column) {
  const int64_t columns = bytes / bytes_per_column;
  const int64_t step = columns >= kTile ? kTile : 8;
  return std::max<int64_t>(8, columns / step * step);
}

int64_t WidestSlab(const WeightShape& shape, int64_t bytes_per_column) {
  return std::min(shape.n, ColumnsIn(kMaxSlabBytes, bytes_per_column));
}

// Columns that stay in L2 once decoded; all of them when the whole weight does.
int64_t L2Columns(const WeightShape& shape, int64_t bytes_per_column, const DeviceInfo& device) {
  const int64_t target = std::clamp(device.l2_bytes * 2 / 3, kMinTargetBytes, kMaxTargetBytes);
  if (shape.n * bytes_per_column <= target) return shape.n;
  const int64_t columns = std::clamp<int64_t>(target / bytes_per_column, 8, kMostL2Columns);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(columns)));
}

}  // namespace

int64_t SlabColumns(int64_t m, const WeightShape& shape, DType x, const DeviceInfo& device) {
  const int64_t bytes_per_column = shape.k * SlabBytesPerWeight(x);
  const int64_t widest = WidestSlab(shape, bytes_per_column);
  int64_t most = widest;
  if (m >= kManyTokens) {
    most = std::min(widest, L2Columns(shape, bytes_per_column, device));
  } else if (m >= kFewTokens) {
    most = std::min(widest, kMiddleColumns);
  }
  // Equal slabs: a narrow last one would run on a fraction of the GPU.
  const int64_t even = CeilDiv(shape.n, CeilDiv(shape.n, most));
  return std::min(most, RoundUp(even, most >= kTile ? kTile : 8));
}

int64_t ScratchRows(int64_t m, int64_t columns) {
  return std::clamp<int64_t>(kScratchBytes / (columns * 4), 1, std::max<int64_t>(m, 1));
}

Workspace PlanWorkspace(const WeightShape& shape, const DeviceInfo& device) {
  Workspace out;
  for (const DType x : {DType::kFp16, DType::kFp32}) {
    const int64_t bytes_per_column = shape.k * SlabBytesPerWeight(x);
    const int64_t bytes = WidestSlab(shape, bytes_per_column) * bytes_per_column;
    out.slab_bytes = std::max(out.slab_bytes, RoundUp(bytes, kAlign));
  }
  out.scratch_bytes = kScratchBytes;
  out.blas_bytes = device.arch >= 90 ? kBlasBytesHopper : kBlasBytesBefore;
  return out;
}

}  // namespace awqd::dense
