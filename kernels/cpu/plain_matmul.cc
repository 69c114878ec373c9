// cpu/plain_matmul: the product of any weight, slowly.
//
// Computes y = x @ W + bias with FP32 accumulation, each sum one chain along K. Weight layout:
// plain. Work split: 64 columns a task, for up to 64 tokens, whose x is expanded to FP32 first.
// Limits: none. Serves what layout k16 does not hold.
#include <algorithm>

#include "kernels/cpu/device.h"
#include "kernels/cpu/k16_access.h"
#include "kernels/cpu/plain_access.h"
#include "kernels/cpu/rows.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

constexpr int64_t kTokens = 64;
constexpr int64_t kColumns = 64;

int64_t Workspace(const WeightShape& shape, const DeviceInfo&, int64_t m) {
  return std::min(m, kTokens) * shape.k * static_cast<int64_t>(sizeof(float));
}

// Tokens [first, first + count), whose x is [count, K] in FP32, by columns [col, col + cols). Sums
// of token m are multiplied by factors[m].
void Multiply(const MatmulArgs& args, const float* x, const float* factors, int64_t first,
              int64_t count, int64_t col, int64_t cols) {
  const int64_t k = args.x.cols;
  cpu::PlainColumns weight(*args.weight, col, cols);
  std::vector<float> sums(count * cols);
  for (int64_t i = 0; i < k; ++i) {
    const float* row = weight.Row(i);
    for (int64_t m = 0; m < count; ++m) {
      const float value = x[m * k + i];
      float* sum = sums.data() + m * cols;
      for (int64_t c = 0; c < cols; ++c) sum[c] += value * row[c];
    }
  }
  for (int64_t m = 0; m < count; ++m) {
    for (int64_t c = 0; c < cols; ++c) {
      const float sum = sums[m * cols + c] * factors[m];
      StoreElement(args.y.data, args.y.dtype, (first + m) * args.y.cols + col + c,
                   args.bias != nullptr ? sum + args.bias[col + c] : sum);
    }
  }
}

absl::Status Matmul(const MatmulArgs& args, StreamView) {
  ThreadPool& pool = CpuDevice::Of(args.weight->device).pool();
  const int64_t k = args.x.cols;
  float* const x = static_cast<float*>(args.workspace);
  for (int64_t first = 0; first < args.x.rows; first += kTokens) {
    const int64_t count = std::min(kTokens, args.x.rows - first);
    float factors[kTokens];
    pool.ParallelFor(count, [&](int64_t m, int) {
      for (int64_t i = 0; i < k; ++i) {
        x[m * k + i] = LoadElement(args.x.data, args.x.dtype, (first + m) * k + i);
      }
      factors[m] = cpu::ScaleDownHugeRow(x + m * k, k);
    });
    pool.ParallelFor(CeilDiv(args.y.cols, kColumns), [&](int64_t task, int) {
      const int64_t col = task * kColumns;
      Multiply(args, x, factors, first, count, col, std::min(kColumns, args.y.cols - col));
    });
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow kCpuPlainMatmul = {.name = "cpu/plain_matmul",
                                   .op = Op::kMatmul,
                                   .claims = kEverything,
                                   .layout = &kPlainLayout,
                                   .batch_invariant = true,
                                   .priority = 1,
                                   .workspace_bytes = Workspace,
                                   .matmul = Matmul};

}  // namespace awqd
