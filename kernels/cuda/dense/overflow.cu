// Repairs FP32 products whose partial sums passed the range of FP32 (overflow.h).
//
// One thread per element of y. Nearly all threads read their element and end.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/dense/overflow.h"

namespace awqd::dense {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostGridY = 65535;

__global__ __launch_bounds__(kThreads) void Repair(OverflowArgs a) {
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

absl::Status RepairOverflows(const OverflowArgs& args, StreamView stream) {
  const cuda::LaunchConfig config{
      .grid = {static_cast<unsigned>(CeilDiv(args.n, int64_t{kThreads})),
               static_cast<unsigned>(std::min(args.m, kMostGridY))},
      .block = kThreads,
      .stream = stream};
  return cuda::Launch<Repair>("dense/matmul_a16's repair of overflows", config, args);
}

}  // namespace awqd::dense
