// cpu/qmatmul_a8: the product of INT8 activations and a weight of integers, exact in INT32.
//
// Weight layout: k16. Work split: some tiles of 8 columns a task, for up to 192 tokens, from packed
// panels (bodies/integers/panel_product.h). Limits: those of the layout; what gives no integers, or
// might pass INT32, is refused when the weight's plan is made.
#include <algorithm>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::IntegerActivations;
using cpu::K16Weight;

// Products of fewer multiplications run on one thread: waking another takes as long as it saves.
constexpr int64_t kSingle = int64_t{1} << 20;

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.isa);
  return IntegerActivations::Bytes(cpu::DescribeK16(shape), integers.int8_panels,
                                   std::min(m, cpu::kMaxIntegerRows), device.threads,
                                   integers.panel_scratch_bytes);
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  const int64_t most = std::min(args.x.rows, cpu::kMaxIntegerRows);
  IntegerActivations tokens(w, integers.int8_panels, most, integers.panel_scratch_bytes,
                            args.workspace, device);
  for (int64_t first = 0; first < args.x.rows; first += most) {
    const int64_t count = std::min(most, args.x.rows - first);
    tokens.Convert(args.x, first, count);
    MatrixView y = args.y;
    y.data = static_cast<int32_t*>(y.data) + first * y.cols;
    tokens.Run(integers.int32_product, tokens.Task(0, count, y),
               cpu::SplitPanels(w, count, device.info().threads, kSingle));
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
