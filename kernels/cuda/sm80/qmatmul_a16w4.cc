// Row sm80/qmatmul_a16w4: the fused product on tensor cores for every number of tokens.
#include "kernels/cuda/sm80/qmatmul_a16w4.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/stage_tokens.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

QMatmulParams MakeParams(const MatmulArgs& args, const MatmulTile& tile, const DeviceInfo& device) {
  const WeightShape& shape = args.weight->shape;
  const uintptr_t y_quad = 4 * SizeOf(args.y.dtype);
  QMatmulParams p{};
  p.records = args.weight->codes();
  p.x = args.x.data;
  p.x_stride = args.x.cols;
  p.y = args.y.data;
  p.y_dtype = args.y.dtype;
  p.bias = args.bias;
  p.m = args.x.rows;
  p.n = shape.n;
  p.k = shape.k;
  p.k_blocks = static_cast<int>(mma16::BlocksK(shape.k));
  p.metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  p.chain_blocks = tile.chains.length;
  p.split = tile.chains.split;
  p.prefetch = MatmulPrefetch(tile, args.x.rows, shape.n, device);
  p.y_wide = reinterpret_cast<uintptr_t>(args.y.data) % y_quad == 0;
  return p;
}

absl::Status Run(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const MatmulTile tile = ChooseMatmulTile(args.weight->shape, args.x.rows, device, args.x.dtype);
  QMatmulParams params = MakeParams(args, tile, device);
  if (!TokensAreReady(args.x)) {
    const StagedTokens staged = CarveStagedTokens(args.workspace, params.m, params.k);
    AWQD_RETURN_IF_ERROR(StageTokens(args.x, staged, stream));
    params.x = staged.data;
    params.x_stride = staged.stride;
    if (args.x.dtype == DType::kFp32) params.x_scale = staged.scale;
  }
  // FP32 activations were staged as fp16.
  return args.x.dtype == DType::kBf16 ? LaunchQMatmulBf16(params, tile, device, stream)
                                      : LaunchQMatmulFp16(params, tile, device, stream);
}

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const MatmulTile tile = ChooseMatmulTile(shape, m, device);
  return absl::StrCat(
      tile.tokens, "x", tile.row_tiles * mma16::kTileN, " in ", tile.chains.count(), " chains of K",
      tile.chains.split > 1 ? absl::StrCat(" over ", tile.chains.split, " blocks") : "");
}

// The dtype and alignment of x are not known yet, so room for staging is always asked for.
int64_t Workspace(const WeightShape& shape, const DeviceInfo&, int64_t m) {
  return StagedTokensBytes(m, shape.k);
}

}  // namespace

const KernelRow& QMatmulA16W4() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a16w4",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .bits_mask = 1u << 3 | 1u << 4,
      .group_multiple = mma16::kRowTile,
      .scales = MaskOf(DType::kFp16),
      .layout = &kMma16Layout,
      .min_arch = 80,
      .batch_invariant = true,
      .priority = 10,
      .tile = Tile,
      .workspace_bytes = Workspace,
      .matmul = Run,
  };
  return row;
}

}  // namespace awqd::cuda
