// cpu/qmatmul_a16_pairs: the fused product of many tokens of FP16 or BF16, as integers.
//
// Computes y = x @ W + bias, x as 16-bit integers by blocks of 128 rows (bodies/int16_block.h)
// and W as codes less their zeros, whose scales multiply sums of a block in FP32, in their order
// (bodies/pairs_body.h; AMX multiplies by digits, bodies/amx_product.h). Bits are those of
// cpu/qmatmul_a16, which multiplies fewer tokens by digits. Weight layout: k16. Work split: some
// tiles of 8 columns a task, for up to 192 tokens. Limits: what suits digits, with floating scales;
// AVX2. FP32 activations and tokens that integers hold badly go to cpu/qmatmul_a16.
#include <algorithm>

#include "kernels/cpu/integer_product.h"
#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::K16Weight;
using cpu::StandIns;

// Fewer tokens repay the decoding of a panel nowhere. From how many on they do is said by the body;
// below that the product is that of cpu/qmatmul_a16.
constexpr int64_t kLeastTokens = 6;

std::string Refuses(const WeightShape& shape, const DeviceInfo& device) {
  if (cpu::PairBodiesFor(device.isa) == nullptr) return "needs AVX2";
  if (cpu::SuitDigits(cpu::DescribeK16(shape))) return "";
  return "needs codes of 4 or 8 bits, groups of a multiple of 128 rows, or one";
}

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t scratch = cpu::IntegerBodiesFor(device.isa).scaled_scratch_bytes * device.threads;
  const int64_t rows = std::min(m, cpu::kScaledRows);
  // Of the tokens that are left.
  const int64_t rest = kCpuQmatmulA16.workspace_bytes(shape, device, rows);
  return scratch + StandIns::Bytes(w, rows) + rest;
}

MatmulArgs RowsOf(const MatmulArgs& args, int64_t first, int64_t count) {
  MatmulArgs rows = args;
  const int64_t x = first * args.x.cols * SizeOf(args.x.dtype);
  const int64_t y = first * args.y.cols * SizeOf(args.y.dtype);
  rows.x = {static_cast<const char*>(args.x.data) + x, args.x.dtype, count, args.x.cols};
  rows.y = {static_cast<char*>(args.y.data) + y, args.y.dtype, count, args.y.cols};
  return rows;
}

// y of rows that were made.
void Multiply(const MatmulArgs& args, const K16Weight& w, const cpu::TokenIntegers& tokens,
              CpuDevice& device) {
  const int64_t tiles = cpu::TilesOfPanelTask(w, device.info().threads);
  const int64_t scratch_bytes = cpu::IntegerBodiesFor(device.info().isa).scaled_scratch_bytes;
  device.pool().ParallelFor(CeilDiv(w.tiles, tiles), [&](int64_t task, int thread) {
    cpu::PairBodiesFor(device.info().isa)
        ->product(w, {.values = tokens.values,
                      .steps = tokens.steps,
                      .sums = tokens.sums,
                      .rows = args.x.rows,
                      .tile_begin = task * tiles,
                      .tile_end = std::min((task + 1) * tiles, w.tiles),
                      .bias = args.bias,
                      .y = args.y.data,
                      .y_stride = args.y.cols,
                      .y_type = cpu::ElementOf(args.y.dtype),
                      .scratch = static_cast<char*>(args.workspace) + thread * scratch_bytes});
  });
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::StandInBodies& bodies = *cpu::PairBodiesFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  const int64_t least = w.bits == 8 ? bodies.least_tokens_of_bytes : bodies.least_tokens;
  if (args.x.dtype == DType::kFp32 || args.x.rows < least) {
    return kCpuQmatmulA16.matmul(args, stream);
  }
  const int64_t most = std::min(args.x.rows, cpu::kScaledRows);
  char* const memory =
      static_cast<char*>(args.workspace) +
      cpu::IntegerBodiesFor(device.info().isa).scaled_scratch_bytes * device.info().threads;
  StandIns tokens(w, most, memory);
  void* const rest = memory + StandIns::Bytes(w, most);
  absl::Status status;
  for (int64_t begin = 0; begin < args.x.rows; begin += most) {
    const int64_t count = std::min(most, args.x.rows - begin);
    tokens.Make(bodies.make, args.x, begin, count, device);
    tokens.ForNeighbours(count, [&](int64_t first, int64_t some, bool made) {
      MatmulArgs rows = RowsOf(args, begin + first, some);
      if (made) return Multiply(rows, w, tokens.Of(first), device);
      rows.workspace = rest;
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
                                       .min_m = kLeastTokens,
                                       // From 128 to 2048 tokens of 4096 x 4096 and 14336 x 4096 it
                                       // takes half of the dense path's time.
                                       .replaces_dense = true,
                                       .batch_invariant = true,
                                       .priority = 20,
                                       .refuses = Refuses,
                                       .workspace_bytes = Workspace,
                                       .matmul = Matmul};

}  // namespace awqd
