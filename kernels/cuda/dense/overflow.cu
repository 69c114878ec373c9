// Repairs FP32 products whose partial sums passed the range of FP32.
//
// One thread per element of y. Nearly all threads read their element and end.
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/dense/gemm.h"

namespace awqd::dense {
namespace {

constexpr int kThreads = 256;

// As GemmArgs has them.
struct Product {
  const float* x;
  const float* w;
  float* y;
  int64_t ld_y;
  int64_t m, n, k;
};

__global__ __launch_bounds__(kThreads) void Repair(Product a) {
  const int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (column >= a.n) return;
  for (int64_t row = blockIdx.y; row < a.m; row += gridDim.y) {
    float& y = a.y[row * a.ld_y + column];
    if (isfinite(y)) continue;
    double sum = 0;
    for (int64_t i = 0; i < a.k; ++i) sum += double{a.x[row * a.k + i]} * a.w[i * a.n + column];
    y = static_cast<float>(sum);
  }
}

}  // namespace

absl::Status RepairOverflows(const GemmArgs& args, StreamView stream) {
  const Product product = {.x = static_cast<const float*>(args.x),
                           .w = static_cast<const float*>(args.w),
                           .y = static_cast<float*>(args.y),
                           .ld_y = args.ld_y,
                           .m = args.m,
                           .n = args.n,
                           .k = args.k};
  const cuda::LaunchConfig config{
      .grid = cuda::GridOfRows(args.n, args.m, kThreads), .block = kThreads, .stream = stream};
  return cuda::Launch<Repair>("dense/matmul_a16's repair of overflows", config, product);
}

}  // namespace awqd::dense
