// Row sm80/qmatmul_a8: y = x @ (code - zero) of INT8 activations, exact in INT32.
//
// Layout: mma16. A fragment of codes is bytes as it lies: a mask, and a shift for the upper rows,
// make of a lane's word of two steps the A operand of m16n8k32, unsigned; activations are the
// signed B operand, staged in the order of K that this gives (common/integers.h). Zeros are a
// second A operand of the same product, whose sums are taken off at the end: so any zero of any
// group is exact, and nothing is subtracted from a code. Work split: a block has 64 out features
// and 8 to 32 tokens. Each of its 8 warps reads one unit, 16 out features x 64 in features, of
// every record; records are cut among blocks where there are too few, whose sums meet in y by
// integer atomics, which no order changes. Limits: those of the layout, and of INT32
// (WhyNoIntegers).
#include <algorithm>

#include "kernels/base/status.h"
#include "kernels/cuda/common/integers.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // records whose codes a warp has on the way
// Blocks for each multiprocessor, where K has records enough.
constexpr int64_t kBlocksPerSm = 4;
constexpr int64_t kLeastRecords = 4;  // of a block

struct IntegerParams {
  const uint8_t* records;
  const int8_t* x;  // [m, stride], staged
  int32_t* y;       // [m, n]
  int64_t stride;
  int64_t m, n;
  int64_t k_blocks;
  int metas;
  int zero;  // of bare records
  bool add;  // to y, which other blocks add to
};

template <int kTiles>
struct Sums {
  int codes[kTiles][4] = {};
  int zeros[kTiles][4] = {};
};

// One unit, 64 in features, of a warp by all tokens of the block.
template <class Record, int kTiles>
__device__ __forceinline__ void MultiplyUnit(const IntegerParams& p, int64_t block_k,
                                             const LaneCodes<Record::kBits>& codes, int64_t token,
                                             Sums<kTiles>* sums) {
  constexpr int kBits = Record::kBits;
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  const int record_bytes = Record::kCodesBytes + p.metas * Record::kMetaBytes;
  const uint8_t* record = p.records + (int64_t{blockIdx.x} * p.k_blocks + block_k) * record_bytes;
  const auto zero_of = [&](int step) {
    if constexpr (Record::kBare) return ZeroBytes<kBits>(BareMeta(p.zero).zeros);
    constexpr int kBytes = mma16::ZeroBits(kBits) / 4;  // of a lane
    const uint8_t* at = record + Record::kCodesBytes + mma16::kMetaScalesBytes +
                        (half * 4 + step) * p.metas / 8 * Record::kMetaBytes +
                        (row_tile * 8 + lane / 4) * kBytes;
    return ZeroBytes<kBits>(kBytes == 1 ? __ldg(at) : __ldg(reinterpret_cast<const uint16_t*>(at)));
  };
  uint32_t x[kTiles][4];  // by steps
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int64_t row = token + t * 8 + lane / 4;
    const int8_t* at =
        p.x + row * p.stride + block_k * mma16::kBlockK + half * mma16::kUnitK + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      x[t][step] =
          row < p.m ? __ldg(reinterpret_cast<const uint32_t*>(at + step * kIntegerRun)) : 0;
    }
  }
  StepBytes zero = zero_of(0);
#pragma unroll
  for (int step = 0; step < 4; step += 2) {
    const StepBytes a = BytesOf<kBits>(codes, step), b = BytesOf<kBits>(codes, step + 1);
    if (Record::kFine && step > 0) zero = zero_of(step);
    const StepBytes next = Record::kFine ? zero_of(step + 1) : zero;
    const uint32_t of_codes[4] = {a.low, a.high, b.low, b.high};
    const uint32_t of_zeros[4] = {zero.low, zero.high, next.low, next.high};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      MmaU8S8(sums->codes[t], of_codes, x[t][step], x[t][step + 1]);
      MmaU8S8(sums->zeros[t], of_zeros, x[t][step], x[t][step + 1]);
    }
  }
}

// The sums of both halves of K, from the warps of one row tile: in those of the first half.
template <int kTiles>
__device__ __forceinline__ bool MeetInBlock(int (&sums)[kTiles][4]) {
  __shared__ int shared[4][kTiles * 4][32];
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64;
  const bool first = threadIdx.x / 32 % 2 == 0;
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    if (!first) shared[row_tile][i][lane] = sums[i / 4][i % 4];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    if (first) sums[i / 4][i % 4] += shared[row_tile][i][lane];
  }
  return first;
}

template <class Record, int kTiles>
__global__ __launch_bounds__(kThreads) void IntegerKernel(const __grid_constant__ IntegerParams p) {
  using Codes = LaneCodes<Record::kBits>;
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64;
  const int64_t begin = p.k_blocks * blockIdx.z / gridDim.z;
  const int64_t end = p.k_blocks * (blockIdx.z + 1) / gridDim.z;
  const int64_t token = int64_t{blockIdx.y} * kTiles * 8;
  const int record_bytes = Record::kCodesBytes + p.metas * Record::kMetaBytes;
  const uint8_t* at = p.records + (int64_t{blockIdx.x} * p.k_blocks + begin) * record_bytes +
                      threadIdx.x / 32 * Record::kUnitBytes + Codes::LaneOffset(lane);
  Sums<kTiles> sums;
  for (int64_t block = begin; block < end; block += kAhead) {
    Codes codes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i, at += record_bytes) {
      if (block + i < end) codes[i].LoadGlobal(at);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (block + i < end) MultiplyUnit<Record, kTiles>(p, block + i, codes[i], token, &sums);
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    // Each may have wrapped; what is left is the sum that fits.
    sums.codes[i / 4][i % 4] = static_cast<int>(static_cast<uint32_t>(sums.codes[i / 4][i % 4]) -
                                                static_cast<uint32_t>(sums.zeros[i / 4][i % 4]));
  }
  if (!MeetInBlock<kTiles>(sums.codes)) return;
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    const int64_t row = token + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int64_t n =
        int64_t{blockIdx.x} * mma16::kTileN + row_tile * mma16::kRowTile + lane / 4 + i % 4 / 2 * 8;
    if (row >= p.m || n >= p.n) continue;
    if (p.add) {
      atomicAdd(p.y + row * p.n + n, sums.codes[i / 4][i % 4]);
    } else {
      p.y[row * p.n + n] = sums.codes[i / 4][i % 4];
    }
  }
}

template <class Record>
absl::Status LaunchTiles(const IntegerParams& p, int tiles, const LaunchConfig& config) {
  return tiles == 1 ? Launch<IntegerKernel<Record, 1>>("sm80/qmatmul_a8", config, p)
                    : Launch<IntegerKernel<Record, 4>>("sm80/qmatmul_a8", config, p);
}

template <int kBits>
absl::Status LaunchBits(const IntegerParams& p, int tiles, const LaunchConfig& config) {
  if constexpr (kBits == 8) {
    if (p.metas == 0) return LaunchTiles<Record<8, 0>>(p, tiles, config);
  }
  return p.metas > 2 ? LaunchTiles<Record<kBits, 8>>(p, tiles, config)
                     : LaunchTiles<Record<kBits, 2>>(p, tiles, config);
}

absl::Status LaunchFor(int bits, const IntegerParams& p, int tiles, const LaunchConfig& config) {
  switch (bits) {
    case 1:
      return LaunchBits<1>(p, tiles, config);
    case 2:
      return LaunchBits<2>(p, tiles, config);
    case 3:
      return LaunchBits<3>(p, tiles, config);
    case 4:
      return LaunchBits<4>(p, tiles, config);
    default:
      return LaunchBits<8>(p, tiles, config);
  }
}

absl::Status Run(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const WeightShape& shape = args.weight->shape;
  IntegerParams p{};
  p.records = args.weight->codes();
  p.x = static_cast<const int8_t*>(args.x.data);
  p.y = static_cast<int32_t*>(args.y.data);
  p.stride = args.x_stride;
  p.m = args.x.rows, p.n = shape.n;
  p.k_blocks = mma16::BlocksK(shape.k);
  p.metas = mma16::MetasPerRecord(shape);
  p.zero = shape.description.zero;
  const int tiles = p.m <= 8 ? 1 : 4;
  const int64_t across = mma16::TilesN(p.n), down = CeilDiv(p.m, int64_t{8} * tiles);
  const int64_t wanted = CeilDiv(kBlocksPerSm * device.sm_count, across * down);
  const int64_t split = std::clamp<int64_t>(p.k_blocks / kLeastRecords, 1, wanted);
  p.add = split > 1;
  if (p.add) {
    AWQD_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(p.y, 0, p.m * p.n * 4, Native(stream)));
  }
  const LaunchConfig config{.grid = {static_cast<unsigned>(across), static_cast<unsigned>(down),
                                     static_cast<unsigned>(split)},
                            .block = kThreads,
                            .stream = stream};
  return LaunchFor(shape.description.bits, p, tiles, config);
}

}  // namespace

const KernelRow& QMatmulA8() {
  static const KernelRow row = [] {
    KernelRow out;
    out.name = "sm80/qmatmul_a8";
    out.op = Op::kIntegerMatmul;
    out.device = DeviceKind::kCuda;
    out.claims = Mma16Claims();
    out.claims.scales = 0;
    out.staged = Staged::kTensorCoreIntegers;
    out.inputs = MaskOf(DType::kInt8);
    out.outputs = MaskOf(DType::kInt32);
    out.layout = &kMma16Layout;
    out.min_arch = 80;
    out.batch_invariant = true;
    out.priority = 10;
    out.matmul = Run;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
