// cpu/qmatmul_a8_scaled: the product of quantised activations.
//
// Computes y = a * (q @ W) + bias of INT8 q and a scale a for each token. Sums of q * code are
// exact over each group, whatever its length; scaled sums of groups are added in FP32 in their
// order, then outer scale, a and bias follow (bodies/integers/panel_product.h; for codes of 4 or 8
// bits, where they are faster, column_product.h and byte_panel_product.h). Weight layout: k16. Work
// split: some tiles of 8 columns a task, for up to 192 tokens. Limits: those of the layout.
#include <algorithm>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::IntegerActivations;
using cpu::K16Weight;

// One of the two products that there are for INT8.
struct Choice {
  const cpu::IntegerProduct& product;
  int64_t scratch_bytes;
  // Products of fewer multiplications run on one thread: waking another takes as long as it saves.
  int64_t single;

  int64_t Bytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) const {
    return IntegerActivations::Bytes(w, product, std::min(rows, cpu::kMaxIntegerRows),
                                     device.threads, scratch_bytes);
  }
};

Choice ChooseBytes(const K16Weight& w, CpuIsa isa) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(isa);
  const int64_t columns = cpu::ColumnScratchBytes(w.groups, cpu::kMaxIntegerRows);
  return {integers.int8_bytes, std::max(integers.panel_scratch_bytes, columns), int64_t{1} << 21};
}

Choice ChoosePanels(CpuIsa isa) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(isa);
  return {integers.int8_panels, integers.panel_scratch_bytes, int64_t{1} << 20};
}

// Enough for fewer tokens too: those of one expert of many.
int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t as_bytes = std::min(m, cpu::MaxInt8ByteTokens(w, device.isa));
  int64_t bytes = 0;
  if (as_bytes > 0) bytes = ChooseBytes(w, device.isa).Bytes(w, device, as_bytes);
  if (as_bytes == m) return bytes;
  return std::max(bytes, ChoosePanels(device.isa).Bytes(w, device, m));
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const CpuIsa isa = device.info().isa;
  const K16Weight w = cpu::AccessK16(*args.weight);
  const Choice choice =
      args.x.rows <= cpu::MaxInt8ByteTokens(w, isa) ? ChooseBytes(w, isa) : ChoosePanels(isa);
  const int64_t most = std::min(args.x.rows, cpu::kMaxIntegerRows);
  IntegerActivations tokens(w, choice.product, most, choice.scratch_bytes, args.workspace, device);
  for (int64_t first = 0; first < args.x.rows; first += most) {
    const int64_t count = std::min(most, args.x.rows - first);
    tokens.Convert(args.x, first, count);
    MatrixView y = args.y;
    y.data = static_cast<char*>(y.data) + first * y.cols * SizeOf(y.dtype);
    cpu::IntegerTask task = tokens.Task(0, count, y);
    task.x_scale = args.x_scale + first;
    task.bias = args.bias;
    tokens.Run(choice.product.product, task,
               cpu::SplitPanels(w, count, device.info().threads, choice.single));
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
