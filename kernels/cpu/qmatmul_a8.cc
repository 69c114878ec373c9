// cpu/qmatmul_a8: the product of INT8 activations and a weight of integers, exact in INT32.
//
// Weight layout: k16. Work split: up to 16 tiles of 8 columns a task, for up to 192 tokens, whose x
// is widened to 16 bits first, its groups padded as the layout has them. Limits: those of the
// layout; what gives no integers, or might pass INT32, is refused when the weight's plan is made.
#include <algorithm>

#include "kernels/cpu/k16_access.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::K16Weight;

constexpr int64_t kTokens = 192;
constexpr int64_t kTilesPerTask = 16;
constexpr int64_t kBlockRows = 128, kTileColumns = 8;

int64_t Stride(const K16Weight& w) { return w.blocks * kBlockRows; }

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const int64_t rows = std::min(m, kTokens) + kTileColumns * device.threads;
  const int64_t elements = rows * Stride(cpu::DescribeK16(shape));
  return elements * static_cast<int64_t>(sizeof(int16_t));
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::IntegerBodies& bodies = cpu::IntegerBodiesFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  auto* const widened = static_cast<int16_t*>(args.workspace);
  int16_t* const scratch = widened + std::min(kTokens, args.x.rows) * Stride(w);
  for (int64_t first = 0; first < args.x.rows; first += kTokens) {
    const int64_t count = std::min(kTokens, args.x.rows - first);
    device.pool().ParallelFor(count, [&](int64_t m, int) {
      cpu::WidenToken(w, static_cast<const int8_t*>(args.x.data) + (first + m) * w.k,
                      widened + m * Stride(w));
    });
    device.pool().ParallelFor(CeilDiv(w.tiles, kTilesPerTask), [&](int64_t task, int thread) {
      const int64_t begin = task * kTilesPerTask;
      bodies.integer_product(w, {.x = widened,
                                 .x_stride = Stride(w),
                                 .rows = count,
                                 .tile_begin = begin,
                                 .tile_end = std::min(begin + kTilesPerTask, w.tiles),
                                 .y = static_cast<int32_t*>(args.y.data) + first * args.y.cols,
                                 .y_stride = args.y.cols,
                                 .scratch = scratch + thread * kTileColumns * Stride(w)});
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuQmatmulA8 = {.name = "cpu/qmatmul_a8",
                                 .op = Op::kIntegerMatmul,
                                 .claims = kIntegers,
                                 .inputs = MaskOf(DType::kInt8),
                                 .outputs = MaskOf(DType::kInt32),
                                 .layout = &kK16Layout,
                                 .batch_invariant = true,
                                 .priority = 10,
                                 .workspace_bytes = Workspace,
                                 .matmul = Matmul};

}  // namespace awqd
