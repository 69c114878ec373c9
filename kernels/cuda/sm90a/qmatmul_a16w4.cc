// Row sm90a/qmatmul_a16w4: the fused product on Hopper's tensor cores for every number of tokens.
#include "kernels/cuda/sm90a/qmatmul_a16w4.h"

#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/stage_tokens.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Up to 16, sm80/qmatmul_a16w4 is faster: H100, 2026-11-21, 16 tokens: 8.1 us against 9.5 at 4096 x
// 4096, 17.9 against 19.3 at 14336 x 4096, 27.9 against 31.3 at 4096 x 28672. At 24 it is 8.9, 20.3
// and 32.3.
constexpr int64_t kLeastTokens = 17;

absl::Status FillX(const MatmulArgs& args, void* staging, StreamView stream, int box_rows,
                   PersistentParams* p) {
  if (TokensAreReady(args.x)) {
    return MapTokens(args.x.data, args.x.rows, args.x.cols, args.x.cols, box_rows, &p->x);
  }
  const StagedTokens staged = CarveStagedTokens(staging, args.x.rows, args.x.cols);
  AWQD_RETURN_IF_ERROR(StageTokens(args.x, staged, stream));
  if (args.x.dtype == DType::kFp32) p->x_scale = staged.scale;
  return MapTokens(staged.data, args.x.rows, staged.stride, staged.stride, box_rows, &p->x);
}

absl::Status Run(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  if (stream.counters == nullptr) {
    return absl::InvalidArgumentError(
        "sm90a/qmatmul_a16w4: got a stream without counters, expected one of Device::CreateStream");
  }
  const PersistentTile tile = ChoosePersistentTile(shape, args.x.rows, device);
  PersistentParams p{};
  p.schedule = PersistentSchedule(shape, args.x.rows, tile, device);
  p.sums = static_cast<float*>(args.workspace);
  char* const staging = static_cast<char*>(args.workspace) + PersistentSumsBytes(device);
  AWQD_RETURN_IF_ERROR(FillX(args, staging, stream, tile.tokens / tile.cluster, &p));
  p.records = args.weight->codes();
  p.y = args.y.data;
  p.y_dtype = args.y.dtype;
  p.bias = args.bias;
  p.counters = stream.counters;
  p.token_tiles = static_cast<int>(CeilDiv(args.x.rows, int64_t{tile.tokens}));
  p.m = args.x.rows;
  p.n = shape.n;
  p.tiles_n = static_cast<int>(mma16::TilesN(shape.n));
  p.metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  p.y_wide = shape.n % 4 == 0 &&
             reinterpret_cast<uintptr_t>(args.y.data) % (4 * SizeOf(args.y.dtype)) == 0;
  // FP32 activations were staged as fp16.
  return args.x.dtype == DType::kBf16 ? LaunchPersistentBf16(p, tile, device, stream)
                                      : LaunchPersistentFp16(p, tile, device, stream);
}

// The sums of cut tiles, then staged tokens. The dtype and alignment of x are not known yet, so
// room for staging is always asked for.
int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return PersistentSumsBytes(device) + StagedTokensBytes(m, shape.k);
}

}  // namespace

const KernelRow& PersistentA16W4Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_a16w4",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .bits_mask = 1u << 3 | 1u << 4,
      .group_multiple = mma16::kRowTile,
      .scales = MaskOf(DType::kFp16),
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      // tests/bench/README.md has the table.
      .replaces_dense = true,
      .priority = 20,
      .workspace_bytes = Workspace,
      .matmul = Run,
  };
  return row;
}

}  // namespace awqd::cuda
