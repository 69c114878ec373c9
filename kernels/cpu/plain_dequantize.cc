// cpu/plain_dequantize: any block of any weight as FP16, BF16 or FP32, slowly.
//
// Weight layout: plain. Work split: blocks of rows by 256 columns. Limits: none. Serves what layout
// k16 does not hold.
#include <algorithm>

#include "kernels/cpu/device.h"
#include "kernels/cpu/plain_access.h"
#include "kernels/cpu/rows.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 256;

absl::Status Run(const DequantizeArgs& args, StreamView) {
  const MatrixView& out = args.out;
  const int64_t chunks = CeilDiv(out.cols, kColumns);
  CpuDevice::Of(args.weight->device)
      .pool()
      .ParallelFor(CeilDiv(out.rows, kRows) * chunks, [&](int64_t task, int) {
        const int64_t begin = task / chunks * kRows, col = task % chunks * kColumns;
        const int64_t cols = std::min(kColumns, out.cols - col);
        cpu::PlainColumns weight(*args.weight, args.col_begin + col, cols);
        for (int64_t r = begin; r < std::min(out.rows, begin + kRows); ++r) {
          const float* values = weight.Row(args.row_begin + r);
          for (int64_t c = 0; c < cols; ++c) {
            StoreElement(out.data, out.dtype, r * out.cols + col + c, values[c]);
          }
        }
      });
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuPlainDequantize = {.name = "cpu/plain_dequantize",
                                       .op = Op::kDequantize,
                                       .claims = kEverything,
                                       .layout = &kPlainLayout,
                                       .priority = 1,
                                       .dequantize = Run};

}  // namespace awqd
