// Row sm90a/qmatmul_a16: the fused product on Hopper's tensor cores, 17 tokens and more.
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/chains.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Up to 16, sm80/qmatmul_a16 is faster nearly everywhere: H100, 2026-11-23, 16 tokens of 28672 x
// 8192 46.5 us there and 47.1 here, of 4096 x 4096 5.9 and 6.7, of 8192 x 8192 15.4 and 16.7; but
// of 8192 x 57344 94.7 and 93.4. From 17 to 24 it depends on the layer: 24 tokens of 4096 x 4096
// take 6.6 and 6.8, of 14336 x 4096 15.5 and 14.2, all layers of an 8B model in turn 61.6 and 61.7.
constexpr int64_t kLeastTokens = 17;

absl::Status MapX(const void* data, int64_t stride, const MatmulArgs& args,
                  const PersistentTile& tile, PersistentParams* p) {
  const int64_t m = args.x.rows;
  p->last_rows = LastTokenRows(m, tile);
  AWQD_RETURN_IF_ERROR(MapTokens(data, m, stride, stride, p->last_rows, &p->x_last));
  if (m <= tile.tokens || p->last_rows == TokenRows(tile)) {
    p->x = p->x_last;
    return absl::OkStatus();
  }
  return MapTokens(data, m, stride, stride, TokenRows(tile), &p->x);
}

// Tokens as stage left them.
absl::Status FillX(const MatmulArgs& args, const PersistentTile& tile, PersistentParams* p) {
  p->x_scale = args.x_scale;
  return MapX(args.x.data, args.x_stride == 0 ? args.x.cols : args.x_stride, args, tile, p);
}

// What differs between the two rows.
struct Work {
  PersistentTile tile;
  Schedule schedule;
  int slots = 1;  // for sums, per cluster
  int chain = 0;  // steps, 0: sums keep no order
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

Work PlanChainedTile(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                     const DeviceInfo& device) {
  Work out;
  out.tile = tile;
  out.schedule = ChainedSchedule(shape, m, tile, device);
  out.chain = MatmulChains(shape, device).length;
  out.slots = ChainedSlots(out.schedule, out.chain, tile);
  out.sums_bytes = ChainedSumsBytes(shape, device);
  return out;
}

Work Plan(const WeightShape& shape, int64_t m, DType x, const DeviceInfo& device) {
  return PlanTile(shape, m, ChoosePersistentTile(shape, m, device, x), device);
}

Work PlanChained(const WeightShape& shape, int64_t m, DType x, const DeviceInfo& device) {
  return PlanChainedTile(shape, m, ChooseChainedTile(shape, m, device, x), device);
}

template <bool kBf16>
absl::Status LaunchAs(const PersistentParams& p, const PersistentTile& tile, bool chained,
                      const DeviceInfo& device, StreamView stream) {
  if (p.bits == 8) {
    return LaunchProduct<kBf16, false, kBare8, kOneMeta8>(p, tile, device, stream);
  }
  if (chained) {
    return LaunchProduct<kBf16, true, kOneMeta, kTwoMetas, kFineMetas>(p, tile, device, stream);
  }
  return LaunchProduct<kBf16, false, kOneMeta, kTwoMetas, kFineMetas>(p, tile, device, stream);
}

absl::Status LaunchKind(const PersistentParams& p, const PersistentTile& tile, bool bf16,
                        bool chained, const DeviceInfo& device, StreamView stream) {
  return bf16 ? LaunchAs<true>(p, tile, chained, device, stream)
              : LaunchAs<false>(p, tile, chained, device, stream);
}

absl::Status Launch(const MatmulArgs& args, const Work& work, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  if (stream.counters == nullptr) {
    return absl::InvalidArgumentError(
        "sm90a/qmatmul_a16: got a stream without counters, expected one of Device::CreateStream");
  }
  const PersistentTile& tile = work.tile;
  PersistentParams p{};
  p.schedule = work.schedule;
  p.slots = work.slots;
  p.chain = work.chain;
  p.sums = static_cast<float*>(args.workspace);
  AWQD_RETURN_IF_ERROR(FillX(args, tile, &p));
  p.records = args.weight->codes();
  p.y = args.y.data;
  p.y_dtype = args.y.dtype;
  p.bias = args.bias;
  p.counters = stream.counters;
  p.token_tiles = static_cast<int>(CeilDiv(args.x.rows, int64_t{tile.tokens}));
  p.m = args.x.rows;
  p.n = shape.n;
  p.tiles_n = static_cast<int>(mma16::TilesN(shape.n));
  p.bits = shape.description.bits;
  p.metas = mma16::MetasPerRecord(shape);
  p.zero = shape.description.zero;
  p.outer = args.weight->outer();
  p.unit = p.metas == 0 && args.x.dtype == DType::kBf16 ? kBareUnitBf16 : 1;
  p.y_wide = shape.n % 4 == 0 &&
             reinterpret_cast<uintptr_t>(args.y.data) % (4 * SizeOf(args.y.dtype)) == 0;
  const bool bf16 = args.x.dtype == DType::kBf16;
  return LaunchKind(p, tile, bf16, /*chained=*/work.chain > 0, device, stream);
}

absl::Status Run(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, Plan(args.weight->shape, args.x.rows, args.x.dtype, device), stream);
}

absl::Status RunChained(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanChained(args.weight->shape, args.x.rows, args.x.dtype, device), stream);
}

std::string Describe(const Work& work) {
  const PersistentTile& tile = work.tile;
  return absl::StrCat(tile.tokens, "x", tile.cluster * tile.records * mma16::kTileN,
                      tile.parts > 1 ? absl::StrCat(" in ", tile.parts, " parts") : "",
                      tile.slices > 1 ? absl::StrCat(" of ", tile.slices, " slices") : "", " on ",
                      work.schedule.clusters, tile.cluster > 1 ? " pairs of blocks" : " blocks");
}

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return Describe(Plan(shape, m, DType::kFp16, device));
}

std::string ChainedTile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return Describe(PlanChained(shape, m, DType::kFp16, device));
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  const int metas = mma16::MetasPerRecord(shape);
  if (shape.description.bits == 8 && metas > 1) {
    return absl::StrCat("group size ", shape.group_rows(), " of 8-bit codes is no multiple of ",
                        mma16::kBlockK);
  }
  if (mma16::BlocksK(shape.k) <= kMostKBlocks) return "";
  return absl::StrCat("got K ", shape.k, ", expected at most ",
                      int64_t{kMostKBlocks} * mma16::kBlockK);
}

// The sums of cut tiles.
int64_t Workspace(const WeightShape&, const DeviceInfo& device, int64_t) {
  return PersistentSumsBytes(device);
}

int64_t ChainedWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t) {
  return ChainedSumsBytes(shape, device);
}

Claims Claims4And8() {
  Claims out = Mma16Claims();
  out.bits = 1u << 4 | 1u << 8;
  return out;
}

}  // namespace

absl::Status RunPersistentTile(const MatmulArgs& args, const PersistentTile& tile,
                               StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanTile(args.weight->shape, args.x.rows, tile, device), stream);
}

absl::Status RunChainedTile(const MatmulArgs& args, const PersistentTile& tile, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return Launch(args, PlanChainedTile(args.weight->shape, args.x.rows, tile, device), stream);
}

const KernelRow& PersistentA16Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_a16",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Claims4And8(),
      .staged = Staged::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      // tests/bench/README.md has the table.
      .replaces_dense = true,
      .priority = 20,
      .refuses = Refuses,
      .tile = Tile,
      .workspace_bytes = Workspace,
      .matmul = Run,
  };
  return row;
}

const KernelRow& ChainedA16Row() {
  static const KernelRow row = [] {
    KernelRow out = PersistentA16Row();
    out.name = "sm90a/qmatmul_a16_chained";
    out.batch_invariant = true;
    out.claims.bits = 1u << 4;
    // Above sm80/qmatmul_a16, whose sums have the same order, and below the row that keeps none.
    out.priority = 15;
    out.tile = ChainedTile;
    out.workspace_bytes = ChainedWorkspace;
    out.matmul = RunChained;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
