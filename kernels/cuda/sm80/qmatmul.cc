// Shared by the rows of the fused product: the way from a call to the instantiation that serves it.
#include "kernels/cuda/sm80/qmatmul.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/counters.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

QMatmulParams MakeParams(const MatmulArgs& args, const MatmulTile& tile, const DeviceInfo& device) {
  const WeightShape& shape = args.weight->shape;
  QMatmulParams p = ParamsOf(shape, args.y, tile);
  p.records = args.weight->codes();
  p.x = args.x.data;
  p.x_stride = args.x_stride == 0 ? args.x.cols : args.x_stride;
  p.x_scale = args.x_scale;
  p.outer = args.weight->outer();
  p.bias = args.bias;
  p.m = args.x.rows;
  // INT8 and E4M3 are zero from K to the stride.
  if (SizeOf(args.x.dtype) == 1) p.k = p.x_stride;
  p.table = args.weight->table();
  if (p.metas == 0) p.unit = UnitOfBare(shape.scheme.code, args.x.dtype);
  if (args.x.dtype == DType::kE4m3) {
    p.token_scales = std::exchange(p.x_scale, nullptr);
    p.token_scales_stride = args.x_scale_stride;
    if (shape.scheme.code == CodeKind::kE2m1) p.unit = kE2m1UnitE4m3;
  }
  p.prefetch = MatmulPrefetch(tile, args.x.rows, shape.n, args.from_prologue, device);
  return p;
}

// Activations of 16 bits.
template <CodeKind kCode, int kBits, bool kReal = false>
absl::Status LaunchHalves(const QMatmulParams& p, const MatmulTile& tile, DType x,
                          const DeviceInfo& device, StreamView stream) {
  constexpr DType kSum = DType::kFp32;
  return x == DType::kBf16
             ? LaunchQMatmul<DType::kBf16, kCode, kBits, kSum, kReal>(p, tile, device, stream)
             : LaunchQMatmul<DType::kFp16, kCode, kBits, kSum, kReal>(p, tile, device, stream);
}

// The same and E4M3.
template <CodeKind kCode, int kBits>
absl::Status LaunchFloats(const QMatmulParams& p, const MatmulTile& tile, DType x,
                          const DeviceInfo& device, StreamView stream) {
  return x == DType::kE4m3
             ? LaunchQMatmul<DType::kE4m3, kCode, kBits, DType::kFp32>(p, tile, device, stream)
             : LaunchHalves<kCode, kBits>(p, tile, x, device, stream);
}

// Integer codes.
template <int kBits>
absl::Status LaunchBits(const QMatmulParams& p, const MatmulTile& tile, DType x, bool real_zeros,
                        const DeviceInfo& device, StreamView stream) {
  constexpr CodeKind kCode = CodeKind::kUnsigned;
  constexpr DType kX = DType::kInt8;
  if (real_zeros && x == kX) {
    return LaunchQMatmul<kX, kCode, kBits, DType::kFp32, true>(p, tile, device, stream);
  }
  if (real_zeros) return LaunchHalves<kCode, kBits, true>(p, tile, x, device, stream);
  if (x != kX) return LaunchHalves<kCode, kBits>(p, tile, x, device, stream);
  return p.y_dtype == DType::kInt32
             ? LaunchQMatmul<kX, kCode, kBits, DType::kInt32>(p, tile, device, stream)
             : LaunchQMatmul<kX, kCode, kBits, DType::kFp32>(p, tile, device, stream);
}

}  // namespace

QMatmulParams ParamsOf(const WeightShape& shape, const MatrixView& y, const MatmulTile& tile) {
  QMatmulParams p{};
  p.unit = 1;
  p.y = y.data;
  p.y_dtype = y.dtype;
  p.y_wide = shape.n % 4 == 0 && reinterpret_cast<uintptr_t>(y.data) % (4 * SizeOf(y.dtype)) == 0;
  p.n = shape.n;
  p.k = shape.k;
  p.k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  p.metas = mma16::MetasPerRecord(shape);
  p.zero = shape.scheme.zero;
  p.zero_first = mma16::TakesZeroFirst(shape);
  p.k_range_blocks = tile.k_ranges.length;
  p.splits = tile.k_ranges.splits;
  return p;
}

absl::Status RunQMatmul(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const WeightShape& shape = args.weight->shape;
  const MatmulTile tile = ChooseMatmulTile(shape, args.x.rows, device, args.x.dtype);
  const QMatmulParams p = MakeParams(args, tile, device);
  const DType x = args.x.dtype;
  switch (shape.scheme.code) {
    case CodeKind::kE2m1:
      return LaunchFloats<CodeKind::kE2m1, 4>(p, tile, x, device, stream);
    case CodeKind::kE4m3:
      return LaunchFloats<CodeKind::kE4m3, 8>(p, tile, x, device, stream);
    case CodeKind::kTable:
      return LaunchHalves<CodeKind::kTable, 4>(p, tile, x, device, stream);
    case CodeKind::kUnsigned:
    case CodeKind::kVector:  // never in records, as the next
    case CodeKind::kTrellis:
      break;
  }
  return ForBits(shape.scheme.bits, [&]<int kBits>() {
    return LaunchBits<kBits>(p, tile, x, mma16::HasRealZeros(shape), device, stream);
  });
}

absl::Status RunStreamKScaledSums(const MatmulArgs& args, int blocks, StreamView stream) {
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, "the fused product of sm80"));
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  QMatmulParams p = MakeParams(args, {}, device);
  p.schedule = MakeStreamKSchedule(static_cast<int>(mma16::TilesN(p.n)), p.k_blocks, blocks);
  p.sums = static_cast<float*>(args.workspace);
  p.counters = stream.counters;
  return args.x.dtype == DType::kBf16 ? LaunchStreamKScaledSums<DType::kBf16, 4>(p, device, stream)
                                      : LaunchStreamKScaledSums<DType::kFp16, 4>(p, device, stream);
}

absl::Status RunScaledSums(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  const int64_t m = args.x.rows;
  if (const int blocks = StreamKBlocks(shape, m, device); blocks > 0) {
    return RunStreamKScaledSums(args, blocks, stream);
  }
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const DType x = args.x.dtype;
  const MatmulTile tile = ChooseMatmulTile(shape, m, device, x);
  const QMatmulParams p = MakeParams(args, tile, device);
  return x == DType::kBf16 ? LaunchScaledSums<DType::kBf16, 4>(p, tile, device, stream)
                           : LaunchScaledSums<DType::kFp16, 4>(p, tile, device, stream);
}

std::string DescribeMatmulTile(const MatmulTile& tile) {
  return absl::StrCat(
      tile.tokens, "x", tile.row_tiles * mma16::kTileN, " in ", tile.k_ranges.count(), " k-ranges",
      tile.k_ranges.splits > 1 ? absl::StrCat(" over ", tile.k_ranges.splits, " blocks") : "");
}

}  // namespace awqd::cuda
