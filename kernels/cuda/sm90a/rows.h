// The rows of this folder, one function per source file.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/registry.h"

namespace awqd::cuda {

const KernelRow& PersistentA16Row();
const KernelRow& FixedOrderA16Row();
const KernelRow& PersistentA8Row();
const KernelRow& PersistentA8ScaledRow();
const KernelRow& PersistentFloat8Row();
const KernelRow& PersistentGroupedRow();
const KernelRow& PersistentGroupedFloat8Row();
const KernelRow& TrellisA16Row();
const KernelRow& VectorsA16Row();

// ---- What the rows share ------------------------------------------------------------------------

inline constexpr int kEveryMeta = 8;  // the most that a record has

// KernelRow::refuses for groups that have more scales in a record than `most_metas`, or if that is
// not kEveryMeta real zeros, and for a K that is larger than a schedule can count.
inline std::string RefusesRecords(const WeightShape& shape, int most_metas) {
  if (most_metas < kEveryMeta && mma16::HasRealZeros(shape)) return RefusesRealZeros(shape);
  if (mma16::MetasPerRecord(shape) > most_metas) {
    return absl::StrCat("group size ", shape.group_rows(), " of ", shape.scheme.bits,
                        "-bit codes is no multiple of ", mma16::kBlockK / most_metas);
  }
  if (mma16::BlocksK(shape.k) <= kMostKBlocks) return "";
  return absl::StrCat("got K ", shape.k, ", expected at most ",
                      int64_t{kMostKBlocks} * mma16::kBlockK);
}

// KernelRow::refuses of 16-bit activations, for rows of any codes.
inline std::string RefusesCodes(const WeightShape& shape) {
  const bool rounds =
      mma16::HasFloatScales(mma16::MetaKindOf(shape)) && !mma16::HasBareRecords(shape);
  if (rounds && shape.large_scales) return "rounds weights to FP16, and some are larger";
  return RefusesRecords(shape, kEveryMeta);
}

// KernelRow::workspace_bytes: the partials of stream-K tiles.
inline int64_t WorkspaceOfSums(const WeightShape&, const DeviceInfo& device, int64_t) {
  return PersistentSumsBytes(device);
}

// For tests: the product with a given tile of PersistentTiles(), or with `fixed_order` of
// FixedOrderTiles(), instead of the fastest. A split-K tile has conditions. In fixed order with
// accumulators > 0 the weight has splits * slices * accumulators k-ranges. Otherwise every slice
// has at least one step, and all its blocks fit the device at once.
absl::Status RunTile(const MatmulArgs& args, const PersistentTile& tile, bool fixed_order,
                     StreamView stream);

}  // namespace awqd::cuda
