// Row sm80/qmatmul_grouped: the products of a stack of experts by one kernel, that of
// sm80/qmatmul_a16 with a table of tiles: each names its rows and the expert that multiplies them.
#include <string>

#include "kernels/base/status.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// From here on products of their own are faster, because an expert fills the GPU.
constexpr int64_t kMostRows = 96;
// Records of each k-range that a block brings into L2 before its tokens are known.
constexpr int kPrefetch = 2;

const WeightShape& ShapeOf(const GroupedArgs& args) { return args.experts.front()->shape; }

// The narrowest tile that few experts need two of: those decode their weight twice. With 16 rows of
// an expert on average half of them have more.
MatmulTile TileOf(const GroupedArgs& args) {
  const DeviceInfo& device = args.experts.front()->device->info();
  const WeightShape& shape = ShapeOf(args);
  // Many experts have more rows than the average, and the device alone knows how many.
  if (args.device_experts > 0) {
    return ChooseGroupedTile(shape, 2 * args.mean(), device);
  }
  const int64_t experts = args.active() * args.stacks();
  MatmulTile tile = ChooseGroupedTile(shape, args.mean(), device);
  while (4 * GroupedTileCount(args, tile.tokens) > 5 * experts) {
    const MatmulTile wider = ChooseGroupedTile(shape, 2 * tile.tokens, device);
    if (wider.tokens == tile.tokens) break;
    tile = wider;
  }
  return tile;
}

std::string Table(const GroupedArgs& args) { return GroupedTiles(args, TileOf(args).tokens); }

template <DType kX>
absl::Status Launch(const WeightShape& shape, const QMatmulParams& p, const MatmulTile& tile,
                    const DeviceInfo& device, StreamView stream) {
  const auto run = [&]<CodeKind kCode, int kBits, bool kReal = false>() {
    return LaunchQMatmul<kX, kCode, kBits, DType::kFp32, kReal, /*kGrouped=*/true>(p, tile, device,
                                                                                   stream);
  };
  constexpr CodeKind kIntegers = CodeKind::kUnsigned;
  const int bits = shape.scheme.bits;
  if (shape.scheme.code == CodeKind::kE2m1) return run.template operator()<CodeKind::kE2m1, 4>();
  if (shape.scheme.code == CodeKind::kE4m3) return run.template operator()<CodeKind::kE4m3, 8>();
  if (!mma16::HasRealZeros(shape)) {
    return bits == 8 ? run.template operator()<kIntegers, 8>()
                     : run.template operator()<kIntegers, 4>();
  }
  return bits == 4   ? run.template operator()<kIntegers, 4, true>()
         : bits == 5 ? run.template operator()<kIntegers, 5, true>()
                     : run.template operator()<kIntegers, 6, true>();
}

absl::Status Run(const GroupedArgs& args, StreamView stream) {
  const DeviceInfo& device = args.experts.front()->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const WeightShape& shape = ShapeOf(args);
  const MatmulTile tile = TileOf(args);
  QMatmulParams p = ParamsOf(shape, args.y, tile);
  p.x = args.x.data;
  p.x_stride = args.x_stride == 0 ? args.x.cols : args.x_stride;
  p.x_scale = args.x_scale;
  p.prefetch = kPrefetch;
  p.tiles = static_cast<const GroupedTile*>(args.table);
  p.tile_count = static_cast<int>(GroupedTileCount(args, tile.tokens));
  if (p.metas == 0) p.unit = UnitOfBare(shape.scheme.code, args.x.dtype);
  return args.x.dtype == DType::kBf16 ? Launch<DType::kBf16>(shape, p, tile, device, stream)
                                      : Launch<DType::kFp16>(shape, p, tile, device, stream);
}

}  // namespace

const KernelRow& QMatmulGrouped() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_grouped",
      .op = Op::kGroupedMatmul,
      .device = DeviceKind::kCuda,
      .claims = ClaimsOfExperts(),
      .input_form = InputForm::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 75,
      .max_m = kMostRows,
      .batch_invariant = true,
      .priority = 10,
      .refuses = [](const WeightShape& shape, const DeviceInfo&) { return RefusesExperts(shape); },
      .grouped_table = Table,
      .grouped_tile = [](const GroupedArgs& args) { return int64_t{TileOf(args).tokens}; },
      .grouped = Run,
  };
  return row;
}

}  // namespace awqd::cuda
