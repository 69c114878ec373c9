// cpu/qmatmul_a16_pairs: the fused product of many tokens of FP16 or BF16, as integers.
//
// Computes y = x @ W + bias, x as INT16 by blocks of 128 rows (bodies/integers/int16_block.h) and W
// as codes less their zeros in packed panels, whose scales multiply the sums of blocks in FP32
// (bodies/integers/panel_product.h; AMX: amx_product.h). Bits are those of cpu/qmatmul_a16, which
// multiplies fewer tokens. Weight layout: k16. Work split: some tiles of 8 columns a task, for up
// to 192 tokens. Limits: codes of 4 or 8 bits, groups of whole blocks, floating scales; AVX2. FP32
// activations and tokens that INT16 holds badly go to cpu/qmatmul_a16.
#include <algorithm>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::IntegerActivations;
using cpu::K16Weight;

// Fewer tokens repay the decoding of a panel nowhere. From how many on they do is said by the body;
// below that the product is that of cpu/qmatmul_a16.
constexpr int64_t kMinTokens = 6;

std::string Refuses(const WeightShape& shape, const DeviceInfo& device) {
  if (cpu::IntegersFor(device.isa).int16_panels.product == nullptr) return "needs AVX2";
  if (cpu::SuitsInt16(cpu::DescribeK16(shape))) return "";
  return "needs codes of 4 or 8 bits, groups of a multiple of 128 rows, or one";
}

int64_t OwnBytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) {
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.isa);
  return IntegerActivations::Bytes(w, integers.int16_panels, rows, device.threads,
                                   integers.panel_scratch_bytes);
}

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const int64_t rows = std::min(m, cpu::kMaxIntegerRows);
  // The second is for the tokens that are left to it.
  return OwnBytes(cpu::DescribeK16(shape), device, rows) +
         kCpuQmatmulA16.workspace_bytes(shape, device, rows);
}

MatmulArgs RowsOf(const MatmulArgs& args, int64_t first, int64_t count) {
  MatmulArgs rows = args;
  const int64_t x = first * args.x.cols * SizeOf(args.x.dtype);
  const int64_t y = first * args.y.cols * SizeOf(args.y.dtype);
  rows.x = {static_cast<const char*>(args.x.data) + x, args.x.dtype, count, args.x.cols};
  rows.y = {static_cast<char*>(args.y.data) + y, args.y.dtype, count, args.y.cols};
  return rows;
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::IntegerProducts& integers = cpu::IntegersFor(device.info().isa);
  const cpu::IntegerProduct& product = integers.int16_panels;
  const K16Weight w = cpu::AccessK16(*args.weight);
  const int64_t least = w.bits == 8 ? product.min_tokens_8bit : product.min_tokens;
  if (args.x.dtype == DType::kFp32 || args.x.rows < least) {
    return kCpuQmatmulA16.matmul(args, stream);
  }
  const int64_t most = std::min(args.x.rows, cpu::kMaxIntegerRows);
  IntegerActivations tokens(w, product, most, integers.panel_scratch_bytes, args.workspace, device);
  absl::Status status;
  for (int64_t begin = 0; begin < args.x.rows; begin += most) {
    const int64_t count = std::min(most, args.x.rows - begin);
    tokens.Convert(args.x, begin, count);
    tokens.ForNeighbours(count, [&](int64_t first, int64_t some, bool held) {
      MatmulArgs rows = RowsOf(args, begin + first, some);
      if (held) {
        cpu::IntegerTask task = tokens.Task(first, some, rows.y);
        task.bias = args.bias;
        return tokens.Run(product.product, task,
                          cpu::SplitPanels(w, some, device.info().threads, /*single=*/0));
      }
      rows.workspace = static_cast<char*>(args.workspace) + OwnBytes(w, device.info(), most);
      status.Update(kCpuQmatmulA16.matmul(rows, stream));
    });
  }
  return status;
}

}  // namespace

const KernelRow kCpuQmatmulA16Pairs = {.name = "cpu/qmatmul_a16_pairs",
                                       .op = Op::kMatmul,
                                       .claims = {.bits = 0b111110000,
                                                  .zeros = kEverything.zeros,
                                                  .scales = kFloatingMask,
                                                  .group_multiple = 128},
                                       .layout = &kK16Layout,
                                       .min_m = kMinTokens,
                                       // From 128 to 2048 tokens of 4096 x 4096 and 14336 x 4096 it
                                       // takes half of the dense path's time.
                                       .replaces_dense = true,
                                       .batch_invariant = true,
                                       .priority = 20,
                                       .refuses = Refuses,
                                       .workspace_bytes = Workspace,
                                       .matmul = Matmul};

}  // namespace awqd
