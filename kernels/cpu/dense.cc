// cpu/dense: decode first, then a dense product by OpenBLAS.
//
// Weight layout: k16, decoded slab by slab of columns into FP32 [columns, K], as OpenBLAS takes a
// transposed operand. Work split: a thread decodes a slab and multiplies it by itself, with
// OpenBLAS on one thread, so that its threads and the pool's never compete and a slab is read from
// the cache that it was written to. Limits: those of the layout.
#include <cblas.h>

#include <algorithm>

#include "kernels/cpu/rows.h"

namespace awqd {
namespace {

using cpu::K16Weight;

// Rows of x expanded at a time: bounds the workspace; a slab is decoded again for each.
constexpr int64_t kMaxRows = 1024;
// 1024 columns against 256: 97 against 93 GFLOP/s on a core at 256 rows (Zen 4, 2026-11-21), since
// OpenBLAS packs x anew for each slab.
constexpr int64_t kMaxColumns = 1024;
constexpr int64_t kMinColumns = 32;
// The decoded weights of a thread.
constexpr int64_t kSlabBytes = int64_t{16} << 20;

// Columns are padded by the 16 floats that decoding may write behind them.
int64_t Stride(const K16Weight& w) { return RoundUp(w.k, 16) + 16; }

int64_t SlabColumns(const K16Weight& w, int64_t threads) {
  const int64_t fitting = kSlabBytes / (w.k * static_cast<int64_t>(sizeof(float)));
  const int64_t share = CeilDiv(w.n, threads);
  const int64_t columns =
      std::min(std::clamp(fitting, kMinColumns, kMaxColumns), std::max(share, kMinColumns));
  return std::min(RoundUp(columns, 8), RoundUp(w.n, 8));
}

int64_t ThreadFloats(const K16Weight& w, int64_t columns, int64_t rows) {
  return RoundUp(columns * Stride(w) + rows * columns, 16);
}

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const K16Weight w = cpu::DescribeK16(shape);
  const int64_t rows = std::min(m, kMaxRows);
  const int64_t columns = SlabColumns(w, device.threads);
  return (rows * Stride(w) + device.threads * ThreadFloats(w, columns, rows)) *
         static_cast<int64_t>(sizeof(float));
}

// One pass over the weight for some rows of x.
struct Pass {
  const float* x;
  int64_t rows;
  char* y;
  cpu::Element y_type;
  const float* bias;
  const float* row_factors;  // [rows], or null: all are 1
};

void RunSlab(const K16Weight& w, const cpu::Bodies& bodies, const Pass& pass, int64_t first,
             int64_t columns, float* scratch) {
  const int64_t stride = Stride(w);
  float* product = scratch + columns * stride;
  for (int64_t c = 0; c < columns; c += 8) {
    bodies.columns(w, (first + c) / 8, scratch + c * stride, stride);
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(pass.rows),
              static_cast<int>(columns), static_cast<int>(w.k), 1.0f, pass.x,
              static_cast<int>(stride), scratch, static_cast<int>(stride), 0.0f, product,
              static_cast<int>(columns));
  const int64_t size = pass.y_type == cpu::Element::kFp32 ? 4 : 2;
  for (int64_t m = 0; m < pass.rows; ++m) {
    for (int64_t c = 0; pass.row_factors != nullptr && c < columns; ++c) {
      product[m * columns + c] *= pass.row_factors[m];
    }
    bodies.from_float(product + m * columns, pass.bias != nullptr ? pass.bias + first : nullptr,
                      columns, pass.y_type, pass.y + (m * w.n + first) * size);
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  // A process-wide setting of the library; the pool brings the threads.
  static const bool once = (openblas_set_num_threads(1), true);
  (void)once;
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  const K16Weight w = cpu::AccessK16(*args.weight);
  const int64_t chunk = std::min(args.x.rows, kMaxRows);
  const int64_t columns = SlabColumns(w, device.info().threads);
  const int64_t scratch = ThreadFloats(w, columns, chunk);
  float* x = static_cast<float*>(args.workspace);
  float* slabs = x + chunk * Stride(w);
  for (int64_t m = 0; m < args.x.rows; m += chunk) {
    Pass pass = {x,
                 std::min(chunk, args.x.rows - m),
                 static_cast<char*>(args.y.data) + m * args.y.cols * SizeOf(args.y.dtype),
                 cpu::ElementOf(args.y.dtype),
                 args.bias,
                 nullptr};
    float factors[kMaxRows];
    if (cpu::ExpandRows(args.x, m, pass.rows, w, /*padded=*/false, Stride(w), x, factors, device)) {
      pass.row_factors = factors;
    }
    device.pool().ParallelFor(CeilDiv(w.n, columns), [&](int64_t slab, int thread) {
      const int64_t first = slab * columns;
      RunSlab(w, bodies, pass, first, std::min(columns, w.n - first), slabs + thread * scratch);
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuDense = {.name = "cpu/dense",
                             .op = Op::kMatmul,
                             .path = Path::kDequantize,
                             .claims = kElementCodes,
                             .layout = &kK16Layout,
                             .priority = 10,
                             .workspace_bytes = Workspace,
                             .matmul = Matmul};

}  // namespace awqd
