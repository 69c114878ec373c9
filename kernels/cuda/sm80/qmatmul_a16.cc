// Rows sm80/qmatmul_a16, the fused product on tensor cores for every number of tokens and every
// width of codes that layout mma16 holds, and sm80/qmatmul_a16_scaled_sums, which takes less time
// for up to 16 tokens but does not give the same bits.
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeMatmulTile(ChooseMatmulTile(shape, m, device));
}

// On Hopper, for what no row of sm90a takes. Decoding first by this row's time, H200, 2026-11-29,
// FP16, 14336 x 4096 and 4096 x 28672: 7 bits at 96, 128 and 192 tokens 1.48 and 1.57, 1.11 and
// 0.89, 0.81 and 0.93; E2M1 with FP16 scales 1.45 and 1.27, 1.09 and 1.29, 0.81 and 0.87; 1 bit
// with real zeros, whose tiles have 64 tokens at most, at 64 and 96 1.51 and 1.38, 0.80.
int64_t DenseFrom(const WeightShape& shape, const DeviceInfo& device) {
  if (device.arch < 90) return 0;
  return mma16::HasRealZeros(shape) ? 65 : 192;
}

std::string RefusesScaledSums(const WeightShape& shape, const DeviceInfo&) {
  const int metas = mma16::MetasPerRecord(shape);
  if (mma16::HasRealZeros(shape)) return RefusesRealZeros(shape);
  if (metas == 1 || metas == 2) return "";
  return absl::StrCat("takes groups of 64 and multiples of 128, got ", shape.group_rows());
}

// Blocks of the stream-K kernel have room for the sums of a tile each.
int64_t ScaledSumsWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t) {
  const bool stream_k = StreamKBlocks(shape, 1, device) > 0;
  return stream_k ? int64_t{4} * kMostTokensOfScaledSums * mma16::kTileN * device.sm_count : 0;
}

std::string ScaledSumsTile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const int blocks = StreamKBlocks(shape, m, device);
  if (blocks == 0) return Tile(shape, device, m);
  return absl::StrCat(
      m > kStreamKTiles[0].tokens ? kStreamKTiles[1].tokens : kStreamKTiles[0].tokens, "x",
      mma16::kTileN, " stream-K on ", blocks, " blocks");
}

}  // namespace

const KernelRow& ScaledSumsA16() {
  static const KernelRow row = [] {
    KernelRow out = QMatmulA16();
    out.name = "sm80/qmatmul_a16_scaled_sums";
    out.claims = Mma16ClaimsOfBits(kFourBits);
    out.max_m = kMostTokensOfScaledSums;
    // Rows that serve more tokens give other bits.
    out.batch_invariant = false;
    out.priority = 11;  // above sm80/qmatmul_a16
    out.refuses = RefusesScaledSums;
    out.tile = ScaledSumsTile;
    out.workspace_bytes = ScaledSumsWorkspace;
    out.matmul = RunScaledSums;
    return out;
  }();
  return row;
}

const KernelRow& QMatmulA16() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a16",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfAnyCode(),
      .input_form = InputForm::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 75,
      .dense_from = DenseFrom,
      .batch_invariant = true,
      .priority = 10,
      .tile = Tile,
      .matmul = RunQMatmul,
  };
  return row;
}

}  // namespace awqd::cuda
