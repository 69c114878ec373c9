// cpu/qmatmul_a8_scaled: the product of quantised activations.
//
// Computes y = a * (q @ W) + bias of INT8 q and a scale a for each token. Sums of q * code are
// exact over each group, whatever its length; scaled sums of groups are added in FP32 in their
// order, then outer scale, a and bias follow (bodies/panel_product.h; for codes of 4 or 8 bits, where
// it is faster, bodies/quads_body.h). Weight layout: k16. Work split: some tiles of 8 columns a
// task, for up to 192 tokens, whose q is widened to 16 bits first, its groups padded as the layout
// has them. Limits: those of the layout.
#include <algorithm>

#include "kernels/cpu/quads.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::K16Weight;

constexpr int64_t kBlockRows = 128;
// Products of fewer multiplications run on one thread: waking another takes as long as it saves.
constexpr int64_t kAlone = int64_t{1} << 20;

int64_t Stride(const K16Weight& w) { return w.blocks * kBlockRows; }

// The parts of the workspace, one after the other.
struct Parts {
  int64_t scratch_bytes, widened_bytes, sums_bytes;

  Parts(const K16Weight& w, const cpu::IntegerBodies& bodies, int64_t threads, int64_t m)
      : scratch_bytes(bodies.scaled_scratch_bytes * threads),
        widened_bytes(std::min(m, cpu::kScaledRows) * Stride(w) * 2),
        sums_bytes(std::min(m, cpu::kScaledRows) * w.groups * 4) {}
};

// Enough for fewer tokens too: those of one expert of many.
int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t of_quads = std::min(m, cpu::MostTokensOfQuads(w, device.isa));
  int64_t bytes = 0;
  if (of_quads > 0) bytes = cpu::QuadBytes(w, device, std::min(of_quads, cpu::kScaledRows));
  if (of_quads == m) return bytes;
  const Parts parts(w, cpu::IntegerBodiesFor(device.isa), device.threads, m);
  return std::max(bytes, parts.scratch_bytes + parts.widened_bytes + parts.sums_bytes);
}

int64_t TilesPerTask(const K16Weight& w, int64_t rows, int64_t threads) {
  if (rows * w.k <= kAlone / w.n) return w.tiles;
  return cpu::TilesOfPanelTask(w, threads);
}

// Of one token, over the rows of each group.
void SumGroups(const K16Weight& w, const int8_t* x, float* sums) {
  for (int64_t group = 0; group < w.groups; ++group) {
    const int64_t begin = group * w.group_size, end = std::min(begin + w.group_size, w.k);
    int64_t sum = 0;
    for (int64_t k = begin; k < end; ++k) sum += x[k];
    sums[group] = static_cast<float>(sum);
  }
}

void QuadPasses(const MatmulArgs& args, const K16Weight& w) {
  for (int64_t first = 0; first < args.x.rows; first += cpu::kScaledRows) {
    MatmulArgs pass = args;
    pass.x.rows = pass.y.rows = std::min(cpu::kScaledRows, args.x.rows - first);
    pass.x.data = static_cast<const int8_t*>(args.x.data) + first * args.x.cols;
    pass.y.data = static_cast<char*>(args.y.data) + first * args.y.cols * SizeOf(args.y.dtype);
    pass.x_scale = args.x_scale + first;
    cpu::MultiplyByQuads(pass, w, args.workspace);
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const K16Weight w = cpu::AccessK16(*args.weight);
  if (args.x.rows <= cpu::MostTokensOfQuads(w, device.info().isa)) {
    QuadPasses(args, w);
    return absl::OkStatus();
  }
  const cpu::IntegerBodies& bodies = cpu::IntegerBodiesFor(device.info().isa);
  const Parts parts(w, bodies, device.info().threads, args.x.rows);
  char* const scratch = static_cast<char*>(args.workspace);
  auto* const widened = reinterpret_cast<int16_t*>(scratch + parts.scratch_bytes);
  auto* const sums = reinterpret_cast<float*>(scratch + parts.scratch_bytes + parts.widened_bytes);
  const bool real_zeros = args.weight->shape.description.real_zeros();
  for (int64_t first = 0; first < args.x.rows; first += cpu::kScaledRows) {
    const int64_t count = std::min(cpu::kScaledRows, args.x.rows - first);
    device.pool().ForEachRow(count, w.k, kAlone / 16, [&](int64_t m) {
      const int8_t* const x = static_cast<const int8_t*>(args.x.data) + (first + m) * w.k;
      cpu::WidenToken(w, x, widened + m * Stride(w));
      if (real_zeros) SumGroups(w, x, sums + m * w.groups);
    });
    const int64_t tiles = TilesPerTask(w, count, device.info().threads);
    device.pool().ParallelFor(CeilDiv(w.tiles, tiles), [&](int64_t task, int thread) {
      const int64_t y = first * args.y.cols * SizeOf(args.y.dtype);
      bodies.scaled_product(w, {.x = widened,
                                .x_stride = Stride(w),
                                .x_sums = real_zeros ? sums : nullptr,
                                .x_scale = args.x_scale + first,
                                .rows = count,
                                .tile_begin = task * tiles,
                                .tile_end = std::min((task + 1) * tiles, w.tiles),
                                .bias = args.bias,
                                .y = static_cast<char*>(args.y.data) + y,
                                .y_stride = args.y.cols,
                                .y_type = cpu::ElementOf(args.y.dtype),
                                .scratch = scratch + thread * bodies.scaled_scratch_bytes});
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuQmatmulA8Scaled = {.name = "cpu/qmatmul_a8_scaled",
                                       .op = Op::kQuantizedActivations,
                                       .claims = kIntegerCodes,
                                       .staged = Staged::kQuantized,
                                       .inputs = kFloatingMask | MaskOf(DType::kInt8),
                                       .layout = &kK16Layout,
                                       .batch_invariant = true,
                                       .priority = 10,
                                       .workspace_bytes = Workspace,
                                       .matmul = Matmul};

}  // namespace awqd
