// What the rows of the fused product share: from a call to the instantiation that serves it.
#include "kernels/cuda/sm90a/qmatmul.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/tile_list_int8.h"
#include "kernels/cuda/sm90a/tile_list_w4.h"
#include "kernels/cuda/sm90a/tile_list_w8.h"
#include "kernels/layouts/mma16.h"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

absl::Status MapX(const void* data, int64_t stride, const MatmulArgs& args,
                  const PersistentTile& tile, PersistentParams* p) {
  const int64_t m = args.x.rows;
  const int bytes = static_cast<int>(SizeOf(args.x.dtype));
  p->last_rows = LastTokenRows(m, tile);
  p->last_stride = LastTokenStride(m, tile);
  AWQD_RETURN_IF_ERROR(MapTokens(data, m, stride, stride, bytes, p->last_rows, &p->x_last));
  if (m <= tile.tokens || p->last_rows == TokenRows(tile)) {
    p->x = p->x_last;
    return absl::OkStatus();
  }
  return MapTokens(data, m, stride, stride, bytes, TokenRows(tile), &p->x);
}

// Tokens as stage left them.
absl::Status FillX(const MatmulArgs& args, const PersistentTile& tile, PersistentParams* p) {
  p->x_scale = args.x_scale;
  return MapX(args.x.data, args.x_stride == 0 ? args.x.cols : args.x_stride, args, tile, p);
}

// What differs between the two rows.
struct Work {
  PersistentTile tile;
  StreamKSchedule schedule;
  int slots = 1;    // for sums, per cluster
  int k_range = 0;  // steps, 0: sums keep no order
  int64_t sums_bytes = 0;
};

Work PlanTile(const WeightShape& shape, int64_t m, const PersistentTile& tile,
              const DeviceInfo& device) {
  Work out;
  out.tile = tile;
  out.schedule = PersistentSchedule(shape, m, tile, device);
  out.sums_bytes = PersistentSumsBytes(device);
  return out;
}

Work PlanFixedOrderTile(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                        const DeviceInfo& device) {
  Work out;
  out.tile = tile;
  out.schedule = FixedOrderSchedule(shape, m, tile, device);
  out.k_range = ChooseFixedOrder(shape, device).length;
  out.slots = FixedOrderSlots(out.schedule, out.k_range, tile);
  out.sums_bytes = FixedOrderSumsBytes(shape, device);
  return out;
}

Work Plan(const WeightShape& shape, int64_t m, DType x, const DeviceInfo& device) {
  return PlanTile(shape, m, ChoosePersistentTile(shape, m, device, x), device);
}

Work PlanFixedOrder(const WeightShape& shape, int64_t m, DType x, const DeviceInfo& device) {
  return PlanFixedOrderTile(shape, m, ChooseFixedOrderTile(shape, m, device, x), device);
}

template <DType kX>
absl::Status LaunchAs(const PersistentParams& p, const PersistentTile& tile, bool fixed_order,
                      const DeviceInfo& device, StreamView stream) {
  if (p.code == CodeKind::kE2m1) {
    return LaunchProduct<kX, false, kFreeTiles4, kE2m1>(p, tile, device, stream);
  }
  if (p.code == CodeKind::kE4m3) {
    return LaunchProduct<kX, false, kFreeTiles8, kBareE4m3>(p, tile, device, stream);
  }
  if (p.bits == 8)
    return LaunchProduct<kX, false, kFreeTiles8, kBare8, kOneMeta8>(p, tile, device, stream);
  if (fixed_order) {
    return LaunchProduct<kX, true, kFixedOrderTiles4, kOneMeta, kTwoMetas, kFineMetas>(
        p, tile, device, stream);
  }
  return LaunchProduct<kX, false, kFreeTiles4, kOneMeta, kTwoMetas, kFineMetas>(p, tile, device,
                                                                                stream);
}

absl::Status LaunchKind(const PersistentParams& p, const PersistentTile& tile, DType x,
                        bool fixed_order, const DeviceInfo& device, StreamView stream) {
  if (x == DType::kBf16) return LaunchAs<DType::kBf16>(p, tile, fixed_order, device, stream);
  if (x == DType::kFp16) return LaunchAs<DType::kFp16>(p, tile, fixed_order, device, stream);
  return LaunchProduct<DType::kInt8, false, kFreeTilesInt8, kOneMeta, kBare8, kOneMeta8>(
      p, tile, device, stream);
}

absl::Status CheckCounters(StreamView stream) {
  if (stream.counters == nullptr) {
    return absl::InvalidArgumentError(
        "the fused product of sm90a: got a stream without counters, expected one of "
        "Device::CreateStream");
  }
  return absl::OkStatus();
}

// What depends on the weight's shape and on y alone.
void FillOutput(const MatrixView& y, const WeightShape& shape, PersistentParams* p) {
  p->y = y.data;
  p->y_dtype = y.dtype;
  p->y_wide = shape.n % 4 == 0 && reinterpret_cast<uintptr_t>(y.data) % (4 * SizeOf(y.dtype)) == 0;
  p->n = shape.n;
  p->tiles_n = static_cast<int>(mma16::TilesN(shape.n));
  p->code = shape.scheme.code;
  p->bits = shape.scheme.bits;
  p->metas = mma16::MetasPerRecord(shape);
  p->zero = shape.scheme.zero;
  p->unit = 1;
}

// The rows of experts are staged the same way for every tile, so this depends on the call alone.
// FP32 rows come as FP16.
PersistentTile GroupedTileOf(const GroupedArgs& args) {
  const DType x = args.x.dtype == DType::kBf16 ? DType::kBf16 : DType::kFp16;
  return ChooseGroupedTile90(args.experts.front()->shape, args.experts.front()->device->info(), x,
                             [&](int64_t tokens) { return GroupedTileCount(args, tokens); });
}

absl::Status Launch(const MatmulArgs& args, const Work& work, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream));
  const PersistentTile& tile = work.tile;
  PersistentParams p{};
  p.schedule = work.schedule;
  p.slots = work.slots;
  p.k_range = work.k_range;
  p.sums = static_cast<float*>(args.workspace);
  AWQD_RETURN_IF_ERROR(FillX(args, tile, &p));
  p.records = args.weight->codes();
  FillOutput(args.y, shape, &p);
  p.bias = args.bias;
  p.counters = stream.counters;
  p.token_tiles = static_cast<int>(CeilDiv(args.x.rows, int64_t{tile.tokens}));
  p.m = args.x.rows;
  p.outer = args.weight->outer();
  if (p.metas == 0) p.unit = UnitOfBare(p.code, args.x.dtype);
  p.folds = !IntegersScaleOnce(shape);
  return LaunchKind(p, tile, args.x.dtype, /*chained=*/work.k_range > 0, device, stream);
}

std::string Describe(const Work& work) {
  const PersistentTile& tile = work.tile;
  return absl::StrCat(tile.tokens, "x", tile.cluster * tile.records * mma16::kTileN,
                      tile.splits > 1 ? absl::StrCat(" in ", tile.splits, " parts") : "",
                      tile.slices > 1 ? absl::StrCat(" of ", tile.slices, " slices") : "", " on ",
                      work.schedule.clusters, tile.cluster > 1 ? " pairs of blocks" : " blocks");
}

}  // namespace

absl::Status RunProduct(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, Plan(args.weight->shape, args.x.rows, args.x.dtype, device), stream);
}

absl::Status RunFixedOrderProduct(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanFixedOrder(args.weight->shape, args.x.rows, args.x.dtype, device),
                stream);
}

absl::Status RunPersistentTile(const MatmulArgs& args, const PersistentTile& tile,
                               StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanTile(args.weight->shape, args.x.rows, tile, device), stream);
}

absl::Status RunFixedOrderTile(const MatmulArgs& args, const PersistentTile& tile,
                               StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanFixedOrderTile(args.weight->shape, args.x.rows, tile, device), stream);
}

absl::Status RunGroupedProduct(const GroupedArgs& args, StreamView stream) {
  const DeviceInfo& device = args.experts.front()->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream));
  const WeightShape& shape = args.experts.front()->shape;
  const PersistentTile tile = GroupedTileOf(args);
  PersistentParams p{};
  p.token_tiles = static_cast<int>(GroupedTileCount(args, tile.tokens));
  p.schedule = GroupedSchedule(shape, p.token_tiles, tile, device);
  p.slots = 1;
  p.sums = static_cast<float*>(args.workspace);
  const int64_t stride = args.x_stride == 0 ? args.x.cols : args.x_stride;
  AWQD_RETURN_IF_ERROR(MapTokens(args.x.data, args.x.rows, stride, stride,
                                 static_cast<int>(SizeOf(args.x.dtype)), TokenRows(tile), &p.x));
  p.x_last = p.x;
  p.x_scale = args.x_scale;
  p.tiles = static_cast<const GroupedTile*>(args.table);
  FillOutput(args.y, shape, &p);
  p.counters = stream.counters;
  p.m = args.x.rows;
  return args.x.dtype == DType::kBf16 ? LaunchGroupedProduct<DType::kBf16>(p, tile, device, stream)
                                      : LaunchGroupedProduct<DType::kFp16>(p, tile, device, stream);
}

std::string GroupedProductTable(const GroupedArgs& args) {
  return GroupedTiles(args, GroupedTileOf(args).tokens);
}

std::string DescribeTile(const WeightShape& shape, const DeviceInfo& device, int64_t m, DType x) {
  return Describe(Plan(shape, m, x, device));
}

std::string DescribeFixedOrderTile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return Describe(PlanFixedOrder(shape, m, DType::kFp16, device));
}

}  // namespace awqd::cuda
