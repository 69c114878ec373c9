// cpu/qmatmul_a8: the product of INT8 activations and a weight of integers, exact in INT32.
// cpu/qmatmul_a8_scaled: the product of quantised activations, y = a * (q @ W) + bias of INT8 q and
// a scale a for each token.
//
// Weight layout: k16. Work split: some tiles of 8 columns a task, for up to 256 tokens, from packed
// panels (bodies/integers/panel_product.h); with scales and codes of 4 or 8 bits also by
// column_product.h, byte_panel_product.h and lane_product.h, where they are faster. Limits: those
// of the layout; what gives no integers, or might pass INT32, is refused when the weight's plan is
// made.
//
// With scales, sums of q * code are exact over each group, whatever its length. Scaled sums of
// groups are added in FP32 in their order, then outer scale, a and bias follow.
#include <algorithm>
#include <array>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::IntegerActivations;
using cpu::K16Weight;

// One of the products that there are for INT8.
struct Choice {
  const cpu::IntegerProduct& product;
  int64_t scratch_bytes;
  // Products of fewer multiplications run on one thread: waking another takes as long as it saves.
  int64_t single;
  int64_t max_tokens;

  int64_t Bytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) const {
    return IntegerActivations::Bytes(w, product, std::min(rows, cpu::kMaxIntegerRows),
                                     device.threads, scratch_bytes);
  }
};

Choice Panels(CpuIsa isa) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(isa);
  return {integers.int8_panels, integers.panel_scratch_bytes, int64_t{1} << 20,
          cpu::IntegerProduct::kNoLimit};
}

// The first that takes as many tokens is the fastest.
std::array<Choice, 3> Choices(const K16Weight& w, CpuIsa isa) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(isa);
  const auto bytes = [&](const cpu::IntegerProduct& product) -> Choice {
    const int64_t columns = cpu::ColumnScratchBytes(w.groups, cpu::kMaxIntegerRows);
    return {product, std::max(integers.panel_scratch_bytes, columns), int64_t{1} << 21,
            cpu::MaxInt8Tokens(w, product)};
  };
  return {bytes(integers.int8_bytes), bytes(integers.int8_lanes), Panels(isa)};
}

// `function`: of the product's integers.
absl::Status Multiply(const MatmulArgs& args, const K16Weight& w, const Choice& choice,
                      decltype(cpu::IntegerProduct::product) function) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const int64_t most = std::min(args.x.rows, cpu::kMaxIntegerRows);
  IntegerActivations tokens(w, choice.product, most, choice.scratch_bytes, args.workspace, device);
  for (int64_t first = 0; first < args.x.rows; first += most) {
    const int64_t count = std::min(most, args.x.rows - first);
    tokens.Convert(args.x, first, count);
    MatrixView y = args.y;
    y.data = static_cast<char*>(y.data) + first * y.cols * SizeOf(y.dtype);
    cpu::IntegerTask task = tokens.Task(0, count, y);
    if (args.x_scale != nullptr) task.x_scale = args.x_scale + first;
    task.bias = args.bias;
    tokens.Run(function, task, cpu::SplitPanels(w, count, device.info().threads, choice.single));
  }
  return absl::OkStatus();
}

int64_t IntegerWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return Panels(device.isa).Bytes(cpu::DescribeK16(shape), device, m);
}

absl::Status IntegerMatmul(const MatmulArgs& args, StreamView) {
  const CpuIsa isa = CpuDevice::Of(args.weight->device).info().isa;
  return Multiply(args, cpu::AccessK16(*args.weight), Panels(isa),
                  cpu::IntegersFor(isa).int32_product);
}

// Enough for fewer tokens too: those of one expert of many.
int64_t ScaledWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  int64_t bytes = 0;
  for (const Choice& choice : Choices(w, device.isa)) {
    bytes = std::max(bytes, choice.Bytes(w, device, std::min(m, choice.max_tokens)));
    if (m <= choice.max_tokens) break;
  }
  return bytes;
}

absl::Status ScaledMatmul(const MatmulArgs& args, StreamView) {
  const CpuIsa isa = CpuDevice::Of(args.weight->device).info().isa;
  const K16Weight w = cpu::AccessK16(*args.weight);
  const std::array<Choice, 3> choices = Choices(w, isa);
  const Choice& choice = *std::find_if(choices.begin(), choices.end(), [&](const Choice& some) {
    return args.x.rows <= some.max_tokens;
  });
  return Multiply(args, w, choice, choice.product.product);
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
                                 .workspace_bytes = IntegerWorkspace,
                                 .matmul = IntegerMatmul};

const KernelRow kCpuQmatmulA8Scaled = {.name = "cpu/qmatmul_a8_scaled",
                                       .op = Op::kQuantizedActivations,
                                       .claims = kIntegerCodes,
                                       .input_form = InputForm::kQuantized,
                                       .inputs = kFloatingMask | MaskOf(DType::kInt8),
                                       .layout = &kK16Layout,
                                       .batch_invariant = true,
                                       .priority = 10,
                                       .workspace_bytes = ScaledWorkspace,
                                       .matmul = ScaledMatmul};

}  // namespace awqd
