// Shared by the rows of the fused product: the way from a call to the instantiation that serves it.
#include "kernels/cuda/sm90a/qmatmul.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/counters.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/tile_list.h"
#include "kernels/layouts/mma16.h"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

// Args: MatmulArgs or GroupedArgs.
template <typename Args>
void FillScales(const Args& args, PersistentParams* p) {
  if (args.x_scale_stride > 0) {
    p->token_scales = args.x_scale;
    p->token_scales_stride = args.x_scale_stride;
  } else {
    p->x_scale = args.x_scale;
  }
}

absl::Status FillX(const MatmulArgs& args, const PersistentTile& tile, PersistentParams* p) {
  const int64_t m = args.x.rows;
  FillScales(args, p);
  p->last_rows = LastTokenRows(m, tile);
  p->last_stride = LastTokenStride(m, tile);
  AWQD_RETURN_IF_ERROR(MapTokens(args.x, args.x_stride, p->last_rows, &p->x_last));
  if (m <= tile.tokens || p->last_rows == TokenRows(tile)) {
    p->x = p->x_last;
    return absl::OkStatus();
  }
  return MapTokens(args.x, args.x_stride, TokenRows(tile), &p->x);
}

// The choices in which the rows with and without a fixed order of sums differ.
struct Work {
  PersistentTile tile;
  StreamKSchedule schedule;
  int slots = 1;    // for sums, per cluster
  int k_range = 0;  // steps, 0: sums keep no order
};

Work PlanTile(const WeightShape& shape, int64_t m, const PersistentTile& tile, bool fixed_order,
              const DeviceInfo& device) {
  if (!fixed_order) return {tile, PersistentSchedule(shape, m, tile, device)};
  const StreamKSchedule schedule = FixedOrderSchedule(shape, m, tile, device);
  const int k_range = ChooseFixedOrder(shape, device).length;
  return {tile, schedule, FixedOrderSlots(schedule, k_range, tile), k_range};
}

// Chooses the tile.
Work Plan(const WeightShape& shape, int64_t m, DType x, bool fixed_order,
          const DeviceInfo& device) {
  const PersistentTile tile = fixed_order ? ChooseFixedOrderTile(shape, m, device, x)
                                          : ChoosePersistentTile(shape, m, device, x);
  return PlanTile(shape, m, tile, fixed_order, device);
}

// Where a call goes on: the arguments of LaunchProduct.
struct Target {
  const PersistentParams& p;
  const PersistentTile& tile;
  const DeviceInfo& device;
  StreamView stream;

  template <DType kX, ProductKind kProduct, const auto& kList, RecordKind... kKinds>
  absl::Status To() const {
    return LaunchProduct<kX, kProduct, kList, kKinds...>(p, tile, device, stream);
  }
};

absl::Status NotCompiled(const RecordKind& kind) {
  return absl::InternalError(
      absl::StrCat("sm90a: no kernel for records of ", kind.bits, " bits was compiled"));
}

template <DType kX, int kBits>
absl::Status LaunchIntegers(const Target& go) {
  using enum ProductKind;
  constexpr RecordKind kOne = Integers(kBits, 1), kFine = Integers(kBits, 8);
  if constexpr (kBits == 4) {
    return go.To<kX, kFree, kFreeTiles4, kOne, Integers(4, 2), kFine>();
  } else if constexpr (kBits == 8) {
    return go.To<kX, kFree, kFreeTiles8, Integers(8, 0), kOne, kFine>();
  } else if constexpr (kBits == 2 || kBits == 3) {
    return go.To<kX, kFree, kFreeTiles4, kOne, kFine>();
  } else if constexpr (IsCompiled(kFine)) {
    return go.To<kX, kFree, kFreeTiles4, kFine>();
  }
  return NotCompiled(go.p.kind);
}

template <DType kX, int kBits>
absl::Status LaunchRealZeros(const Target& go) {
  using enum ProductKind;
  if constexpr (kBits == 8) {
    return go.To<kX, kFree, kFreeTiles8, RealZeros(8)>();
  } else if constexpr (IsCompiled(RealZeros(kBits))) {
    return go.To<kX, kFree, kFreeTiles4, RealZeros(kBits)>();
  }
  return NotCompiled(go.p.kind);
}

// Activations of 16 bits, any order of sums.
template <DType kX>
absl::Status LaunchFree(const Target& go) {
  using enum ProductKind;
  switch (go.p.kind.code) {
    case CodeKind::kE2m1:
      if constexpr (kX == DType::kBf16) {
        if (go.p.kind == kE2m1LongScales) return go.To<kX, kFree, kFreeTiles4, kE2m1LongScales>();
      }
      return go.To<kX, kFree, kFreeTiles4, kE2m1>();
    case CodeKind::kTable:
      return go.To<kX, kFree, kFreeTiles4, kTable>();
    case CodeKind::kE4m3:
      return go.To<kX, kFree, kFreeTiles8, E4m3(0), E4m3(1), E4m3(8)>();
    case CodeKind::kUnsigned:
    case CodeKind::kVector:  // never in records, as the next
    case CodeKind::kTrellis:
      break;
  }
  return ForBits(go.p.kind.bits, [&]<int kBits>() {
    return go.p.kind.real_zeros ? LaunchRealZeros<kX, kBits>(go) : LaunchIntegers<kX, kBits>(go);
  });
}

template <DType kX>
absl::Status LaunchFixedOrder(const Target& go) {
  return go.To<kX, ProductKind::kFixedOrder, kFixedOrderTiles4, Integers(4, 1), Integers(4, 2),
               Integers(4, 8)>();
}

template <DType kX>
absl::Status LaunchGrouped(const Target& go) {
  using enum ProductKind;
  const RecordKind& kind = go.p.kind;
  if (kind.real_zeros) {
    return go.To<kX, kGrouped, kExpertTiles, RealZeros(4), RealZeros(5), RealZeros(6)>();
  }
  if (kind.code == CodeKind::kE2m1) return go.To<kX, kGrouped, kExpertTiles, kE2m1>();
  if (kind.code == CodeKind::kE4m3) {
    return go.To<kX, kGrouped, kExpertTiles, E4m3(0), E4m3(1)>();
  }
  if (kind.bits == 8) {
    return go.To<kX, kGrouped, kExpertTiles, Integers(8, 0), Integers(8, 1)>();
  }
  return go.To<kX, kGrouped, kExpertTiles, Integers(4, 1), Integers(4, 2), Integers(4, 8)>();
}

absl::Status LaunchKind(const Target& go, DType x, bool fixed_order) {
  const bool bf16 = x == DType::kBf16;
  if (fixed_order) {
    return bf16 ? LaunchFixedOrder<DType::kBf16>(go) : LaunchFixedOrder<DType::kFp16>(go);
  }
  return bf16 ? LaunchFree<DType::kBf16>(go) : LaunchFree<DType::kFp16>(go);
}

absl::Status LaunchInt8(const Target& go, bool integers) {
  using enum ProductKind;
  constexpr DType kX = DType::kInt8;
  if (integers) return go.To<kX, kIntegers, kIntegerTilesInt8, Integers(4, 1), Integers(8, 0)>();
  return go.To<kX, kFree, kFreeTilesInt8, Integers(4, 1), Integers(8, 1)>();
}

absl::Status LaunchE4m3(const Target& go) {
  using enum ProductKind;
  constexpr DType kX = DType::kE4m3;
  if (go.p.token_scales != nullptr) {
    return go.To<kX, kTokenScales, kTilesE4m3, E4m3(0), E4m3(1), kE2m1>();
  }
  return go.To<kX, kFree, kTilesE4m3, E4m3(0), E4m3(1), kE2m1>();
}

absl::Status LaunchGroupedE4m3(const Target& go) {
  using enum ProductKind;
  constexpr DType kX = DType::kE4m3;
  if (go.p.token_scales != nullptr) {
    return go.To<kX, kGroupedTokenScales, kExpertTilesE4m3, E4m3(0), E4m3(1), kE2m1>();
  }
  return go.To<kX, kGrouped, kExpertTilesE4m3, E4m3(0), E4m3(1), kE2m1>();
}

// Sets the parameters that depend on the weight's shape and on y alone.
void FillOutput(const MatrixView& y, const WeightShape& shape, PersistentParams* p) {
  p->y = y.data;
  p->y_dtype = y.dtype;
  p->y_wide = shape.n % 4 == 0 && reinterpret_cast<uintptr_t>(y.data) % (4 * SizeOf(y.dtype)) == 0;
  p->n = shape.n;
  p->tiles_n = static_cast<int>(mma16::TilesN(shape.n));
  p->kind = KindOf(shape);
  p->metas = mma16::MetasPerRecord(shape);
  p->zero = shape.scheme.zero;
  p->zero_first = mma16::TakesZeroFirst(shape);
}

float UnitOf(const PersistentParams& p, DType x) {
  if (p.metas == 0) return UnitOfBare(p.kind.code, x);
  return p.kind.code == CodeKind::kE2m1 && x == DType::kE4m3 ? kE2m1UnitE4m3 : 1;
}

// The prologue treats the rows of experts alike for every tile, so this depends on the call alone.
// `x`: the type of the rows that the prologue leaves.
PersistentTile GroupedTileOf(const GroupedArgs& args, DType x) {
  return ChooseGroupedTile90(args.experts.front()->shape, args.experts.front()->device->info(), x,
                             [&](int64_t tokens) { return ExpectedTileCount(args, tokens); });
}

// FP32 rows and rounded ones come as FP16.
DType DTypeOfRows(const GroupedArgs& args) {
  const bool fp16 = args.x.dtype == DType::kFp32 || IsFloat8(args.quantization);
  return fp16 ? DType::kFp16 : args.x.dtype;
}

absl::Status Launch(const MatmulArgs& args, const Work& work, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, "the fused product of sm90a"));
  const PersistentTile& tile = work.tile;
  PersistentParams p{};
  p.schedule = work.schedule;
  p.slots = work.slots;
  p.k_range = work.k_range;
  p.sums = static_cast<float*>(args.workspace);
  AWQD_RETURN_IF_ERROR(FillX(args, tile, &p));
  p.records = args.weight->codes();
  FillOutput(args.y, shape, &p);
  // FP16 holds the products that BF16 does not.
  if (p.kind == kE2m1LongScales && args.x.dtype == DType::kFp16) p.kind = kE2m1;
  p.bias = args.bias;
  p.counters = stream.counters;
  p.token_tiles = static_cast<int>(CeilDiv(args.x.rows, int64_t{tile.tokens}));
  p.m = args.x.rows;
  // Exact integers have no factor, though bare records come with one of 1.
  p.outer = args.y.dtype == DType::kInt32 ? nullptr : args.weight->outer();
  p.table = args.weight->table();
  p.unit = UnitOf(p, args.x.dtype);
  const Target go = {p, tile, device, stream};
  if (args.x.dtype == DType::kInt8) return LaunchInt8(go, SumsStayIntegers(shape));
  if (args.x.dtype == DType::kE4m3) return LaunchE4m3(go);
  return LaunchKind(go, args.x.dtype, /*fixed_order=*/work.k_range > 0);
}

std::string Describe(const Work& work) {
  const PersistentTile& tile = work.tile;
  return absl::StrCat(tile.tokens, "x", tile.cluster * tile.records * mma16::kTileN,
                      tile.splits > 1 ? absl::StrCat(" in ", tile.splits, " splits") : "",
                      tile.slices > 1 ? absl::StrCat(" of ", tile.slices, " slices") : "", " on ",
                      work.schedule.clusters, tile.cluster > 1 ? " pairs of blocks" : " blocks");
}

}  // namespace

absl::Status RunProduct(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, Plan(args.weight->shape, args.x.rows, args.x.dtype, false, device), stream);
}

absl::Status RunFixedOrderProduct(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, Plan(args.weight->shape, args.x.rows, args.x.dtype, true, device), stream);
}

absl::Status RunTile(const MatmulArgs& args, const PersistentTile& tile, bool fixed_order,
                     StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanTile(args.weight->shape, args.x.rows, tile, fixed_order, device), stream);
}

absl::Status RunGroupedProduct(const GroupedArgs& args, StreamView stream) {
  const DeviceInfo& device = args.experts.front()->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, "the fused product of sm90a"));
  const WeightShape& shape = args.experts.front()->shape;
  const PersistentTile tile = GroupedTileOf(args, DTypeOfRows(args));
  PersistentParams p{};
  p.token_tiles = static_cast<int>(GroupedTileCount(args, tile.tokens));
  p.schedule = GroupedSchedule(shape, p.token_tiles, tile, device);
  p.slots = 1;
  p.sums = static_cast<float*>(args.workspace);
  AWQD_RETURN_IF_ERROR(MapTokens(args.x, args.x_stride, TokenRows(tile), &p.x));
  p.x_last = p.x;
  FillScales(args, &p);
  p.tiles = static_cast<const GroupedTile*>(args.table);
  FillOutput(args.y, shape, &p);
  p.counters = stream.counters;
  p.m = args.x.rows;
  p.unit = UnitOf(p, args.x.dtype);
  const Target go = {p, tile, device, stream};
  if (args.x.dtype == DType::kE4m3) return LaunchGroupedE4m3(go);
  return args.x.dtype == DType::kBf16 ? LaunchGrouped<DType::kBf16>(go)
                                      : LaunchGrouped<DType::kFp16>(go);
}

int64_t GroupedProductTile(const GroupedArgs& args) {
  return GroupedTileOf(args, DTypeOfRows(args)).tokens;
}

int64_t GroupedFloat8Tile(const GroupedArgs& args) {
  return GroupedTileOf(args, DType::kE4m3).tokens;
}

std::string GroupedProductTable(const GroupedArgs& args) {
  return GroupedTiles(args, GroupedProductTile(args));
}

std::string GroupedFloat8Table(const GroupedArgs& args) {
  return GroupedTiles(args, GroupedFloat8Tile(args));
}

std::string DescribeTile(const WeightShape& shape, const DeviceInfo& device, int64_t m, DType x) {
  return Describe(Plan(shape, m, x, false, device));
}

std::string DescribeFixedOrderTile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return Describe(Plan(shape, m, DType::kFp16, true, device));
}

}  // namespace awqd::cuda
