// cpu/trellis_dequantize and cpu/trellis_matmul: a trellis, any block of W as FP16, BF16 or FP32,
// and the fused product.
//
// The product is y = x @ W + bias in FP32: the entries of 16 rows by 128 columns are multiplied by
// all tokens of a pass, each sum one chain along K, and the transform follows on the sums of 128
// columns. A row's bits depend on the row and the weight only. Weight layout: plain. Work split: 16
// rows by 128 columns, of a product 128 columns a task. Limits: none.
#include <algorithm>

#include "kernels/cpu/rows.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

constexpr int64_t kTileRows = kTrellisTile, kTileColumns = kTrellisColumns;
// Tokens of a pass, whose sums stay in the cache.
constexpr int64_t kTokens = 64;

// The first tile of a block of rows and columns.
const uint8_t* TilesAt(const DeviceWeight& weight, int64_t row, int64_t col) {
  const WeightShape& shape = weight.shape;
  return weight.codes() + row / kTileRows * shape.row_bytes() + col * CodeBits(shape.scheme) / 8;
}

// --- Dequantize ---

// Rows [begin, end) of one row of tiles, and columns [col, col_end) of one block.
void DequantizeBlock(const DequantizeArgs& args, const cpu::Bodies& bodies, int64_t begin,
                     int64_t end, int64_t col, int64_t col_end) {
  const DeviceWeight& weight = *args.weight;
  const MatrixView& out = args.out;
  const int64_t first = col / kTileColumns * kTileColumns;
  float block[kTileColumns * kTileRows], row_values[kTileColumns];
  DecodeTrellis(weight.shape.scheme, TilesAt(weight, begin, first), block);
  const float* const outer = weight.outer();
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t c = col; c < col_end; ++c) {
      const float value = block[(c - first) * kTileRows + row % kTileRows];
      row_values[c - col] = outer != nullptr ? value * outer[c] : value;
    }
    const int64_t at = (row - args.row_begin) * out.cols + col - args.col_begin;
    bodies.from_float(row_values, nullptr, col_end - col, cpu::ElementOf(out.dtype),
                      static_cast<char*>(out.data) + at * SizeOf(out.dtype));
  }
}

absl::Status Dequantize(const DequantizeArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t row_end = args.row_begin + args.out.rows, col_end = args.col_begin + args.out.cols;
  const int64_t row_block = args.row_begin / kTileRows, col_block = args.col_begin / kTileColumns;
  const int64_t columns = CeilDiv(col_end, kTileColumns) - col_block;
  const int64_t blocks = (CeilDiv(row_end, kTileRows) - row_block) * columns;
  device.pool().ParallelFor(blocks, [&](int64_t task, int) {
    const int64_t row = (row_block + task / columns) * kTileRows;
    const int64_t col = (col_block + task % columns) * kTileColumns;
    DequantizeBlock(args, bodies, std::max(row, args.row_begin), std::min(row + kTileRows, row_end),
                    std::max(col, args.col_begin), std::min(col + kTileColumns, col_end));
  });
  return absl::OkStatus();
}

// --- Product ---

int64_t Workspace(const WeightShape& shape, const DeviceInfo&, int64_t m) {
  return std::min(m, kTokens) * shape.k * static_cast<int64_t>(sizeof(float));
}

// Tokens [first, first + count), whose x is [count, K] in FP32, by 128 columns from `col` on. Sums
// of token m are multiplied by factors[m].
void Multiply(const MatmulArgs& args, const cpu::Bodies& bodies, const float* x,
              const float* factors, int64_t first, int64_t count, int64_t col) {
  const DeviceWeight& weight = *args.weight;
  const QuantizationScheme& d = weight.shape.scheme;
  const int64_t k = args.x.cols, tile_bytes = kTileRows * CodeBits(d) / 8;
  alignas(64) float sums[kTokens][kTileColumns] = {};
  alignas(64) float entries[kTileRows][kTileColumns];
  for (int64_t row = 0; row < k; row += kTileRows) {
    const uint8_t* const tiles = TilesAt(weight, row, col);
    for (int64_t c = 0; c < kTileColumns; c += kTileRows) {
      DecodeTile(d.trellis, d.bits, tiles + c / kTileRows * tile_bytes, kTileColumns, 1,
                 entries[0] + c);
    }
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t r = 0; r < kTileRows; ++r) {
        const float value = x[m * k + row + r];
        for (int64_t c = 0; c < kTileColumns; ++c) sums[m][c] += value * entries[r][c];
      }
    }
  }
  const float* const outer = weight.outer();
  for (int64_t m = 0; m < count; ++m) {
    TransformBlock(kTrellisTransform, sums[m]);
    for (int64_t c = 0; c < kTileColumns; ++c) {
      sums[m][c] *= factors[m] * (outer != nullptr ? outer[col + c] : 1);
    }
    bodies.from_float(
        sums[m], args.bias != nullptr ? args.bias + col : nullptr, kTileColumns,
        cpu::ElementOf(args.y.dtype),
        static_cast<char*>(args.y.data) + ((first + m) * args.y.cols + col) * SizeOf(args.y.dtype));
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const int64_t k = args.x.cols;
  float* const x = static_cast<float*>(args.workspace);
  for (int64_t first = 0; first < args.x.rows; first += kTokens) {
    const int64_t count = std::min(kTokens, args.x.rows - first);
    float factors[kTokens];
    cpu::ExpandRows(args.x, first, count, {}, /*padded=*/false, k, x, factors, device);
    device.pool().ParallelFor(args.y.cols / kTileColumns, [&](int64_t task, int) {
      Multiply(args, bodies, x, factors, first, count, task * kTileColumns);
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuTrellisDequantize = {.name = "cpu/trellis_dequantize",
                                         .op = Op::kDequantize,
                                         .claims = kTrellis,
                                         .layout = &kPlainLayout,
                                         .priority = 10,
                                         .dequantize = Dequantize};

const KernelRow kCpuTrellisMatmul = {.name = "cpu/trellis_matmul",
                                     .op = Op::kMatmul,
                                     .claims = kTrellis,
                                     .layout = &kPlainLayout,
                                     .batch_invariant = true,
                                     .priority = 10,
                                     .workspace_bytes = Workspace,
                                     .matmul = Matmul};

}  // namespace awqd
