// The steps between the products of experts, and in the middle of a gated MLP: rows in the order of
// the experts, gate times up, and each token's rows summed.
//
// All stream through memory once: 16 bytes a thread where the rows allow it, coalesced along
// columns.
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/gate.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/exact.h"

// Kernels before a product let it begin at once: it brings its weights in meanwhile.
namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 16;

// `units`: of T in a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void GatherKernel(GatherArgs a, int64_t units) {
  LaunchDependents();
  const int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (unit >= units) return;
  for (int64_t row = blockIdx.y; row < a.count; row += gridDim.y) {
    static_cast<T*>(a.out)[row * units + unit] =
        static_cast<const T*>(a.in)[a.rows[row] * units + unit];
    if (unit == 0 && a.factors != nullptr) a.factors[row] = kNarrowFactor;
  }
}

__global__ __launch_bounds__(kThreads) void GateKernel(GateArgs a) {
  LaunchDependents();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  auto* const gate = static_cast<float*>(a.gate);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.count; i += step) {
    gate[i] = GateFloat(a.activation, a.parameters, gate[i], static_cast<const float*>(a.up)[i]);
  }
}

__device__ __forceinline__ float FiniteMagnitude(float v) {
  return fabsf(v) <= kLargestFloat ? fabsf(v) : 0;
}

// Short rows are for a warp, eight to a block: a team that waits for itself after every few
// elements leaves memory idle. Long rows, and few rows, which are few blocks, get as many threads
// as a block can have. With 1024 threads for every row a mixture of 4096 tokens, 32768 rows of 768
// columns, took 1367 us instead of 931 (H100, 2026-11-25).
constexpr int64_t kShortRow = 2048, kLongRow = 8192, kFewRows = 512;
constexpr int TeamThreads(int team) { return team == 32 ? kThreads : team; }

// `cols` is a multiple of 4. kTeam: threads of a row. kKeeps: shared memory holds the rows, so that
// gate and up are read once.
template <DType kIn, int kTeam, bool kKeeps>
__global__ __launch_bounds__(TeamThreads(kTeam)) void GateToHalfKernel(GateArgs a) {
  LaunchDependents();
  extern __shared__ float4 kept_rows[];
  const int team = threadIdx.x / kTeam, member = threadIdx.x % kTeam;
  const int64_t row = blockIdx.x * int64_t{TeamThreads(kTeam) / kTeam} + team;
  const int64_t first = row * a.cols;
  if (first >= a.count) return;  // of a short row: a whole warp
  float4* const kept = kept_rows + team * (a.cols / 4);
  float largest = 0;
#pragma unroll 4
  for (int64_t i = member * 4; i < a.cols; i += kTeam * 4) {
    const float4 v = Gated<kIn>(a, first + i);
    if (kKeeps) kept[i / 4] = v;
    largest = fmaxf(largest, fmaxf(fmaxf(FiniteMagnitude(v.x), FiniteMagnitude(v.y)),
                                   fmaxf(FiniteMagnitude(v.z), FiniteMagnitude(v.w))));
  }
  const int exponent = HalfExponent(LargestOfTeam<kTeam>(largest));
  const float down = ldexpf(1.0f, -exponent);
#pragma unroll 4
  for (int64_t i = member * 4; i < a.cols; i += kTeam * 4) {
    const float4 v = kKeeps ? kept[i / 4] : Gated<kIn>(a, first + i);
    *reinterpret_cast<uint2*>(a.half + first + i) = {ToFp16x2(v.x * down, v.y * down),
                                                     ToFp16x2(v.z * down, v.w * down)};
  }
  if (member == 0) a.half_scale[row] = ldexpf(a.sums_factor, exponent);
}

template <DType kIn, int kTeam, bool kKeeps>
absl::Status LaunchGateToHalf(const GateArgs& args, StreamView stream) {
  constexpr int64_t kRows = TeamThreads(kTeam) / kTeam;
  const LaunchConfig config{.grid = static_cast<unsigned>(CeilDiv(args.count / args.cols, kRows)),
                            .block = TeamThreads(kTeam),
                            .shared_bytes = kKeeps ? kRows * args.cols * int64_t{sizeof(float)} : 0,
                            .stream = stream};
  return Launch<GateToHalfKernel<kIn, kTeam, kKeeps>>("common/experts", config, args);
}

template <DType kIn>
absl::Status GateToHalf(const GateArgs& args, StreamView stream) {
  constexpr int64_t kMostKept = 24 * 1024;  // columns, two blocks of a multiprocessor
  if (args.count / args.cols > kFewRows) {
    if (args.cols <= kShortRow) return LaunchGateToHalf<kIn, 32, true>(args, stream);
    if (args.cols <= kLongRow) return LaunchGateToHalf<kIn, 256, true>(args, stream);
  }
  return args.cols <= kMostKept ? LaunchGateToHalf<kIn, 1024, true>(args, stream)
                                : LaunchGateToHalf<kIn, 1024, false>(args, stream);
}

// An element of x, which is not narrow: LoadWide takes it to be so.
template <DType kIn>
__device__ __forceinline__ float TokenElement(const TokenGateArgs& a, int64_t token, int64_t i) {
  const int64_t k = a.x.cols, at = token * k + i;
  if constexpr (kIn == DType::kE4m3) {
    const auto code = static_cast<const __nv_fp8_storage_t*>(a.x.data)[at];
    const float scale = a.scales[token * ((k + a.scaled - 1) / a.scaled) + i / a.scaled];
    return Fp16ToFloat(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3).x) * scale;
  } else {
    float value[1];
    LoadWide<kIn>(a.x.data, at, value);
    return value[0] * NarrowFactor(kIn);
  }
}

// A block for each token.
template <DType kIn>
__global__ __launch_bounds__(kThreads) void TokenGateKernel(TokenGateArgs a) {
  const int64_t token = blockIdx.x, k = a.x.cols;
  const float* const gate = a.gates + a.which[token] * k;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    sum += TokenElement<kIn>(a, token, i) * gate[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  __shared__ float by_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) sum += by_warp[w];
  a.out[token] = 1 / (1 + expf(-sum));
}

// The bits of the CPU: no fused multiply-adds.
template <DType kIn, int kWide>
__device__ __forceinline__ void Combined(const CombineArgs& a, int64_t row, int64_t col,
                                         float (&sums)[kWide]) {
#pragma unroll 4
  for (int64_t j = row * a.terms; j < (row + 1) * a.terms; ++j) {
    // A row that is left out is loaded too, as row 0: else each load would wait for the one before.
    const int64_t from = a.rows[j];
    float values[kWide];
    LoadWide<kIn>(a.in, max(from, int64_t{0}) * a.cols + col, values);
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      const float term = a.weights == nullptr ? values[e] : __fmul_rn(a.weights[j], values[e]);
      const float sum = j == row * a.terms ? term : __fadd_rn(sums[e], term);  // 0 + -0 would be +0
      sums[e] = from < 0 ? sums[e] : sum;
    }
  }
  if (a.added == nullptr) return;
  float values[kWide];
  LoadWide<DType::kFp32>(a.added, row * a.cols + col, values);
#pragma unroll
  for (int e = 0; e < kWide; ++e) {
    const float weight = a.added_weights == nullptr ? 1 : a.added_weights[row];
    sums[e] = __fadd_rn(sums[e], __fmul_rn(weight, values[e]));
  }
}

template <int kWide>
__device__ __forceinline__ void StoreColumns(const CombineArgs& a, int64_t at,
                                             const float (&sums)[kWide]) {
  if (a.y_dtype == DType::kFp32) {
    float* const y = static_cast<float*>(a.y) + at;
    if constexpr (kWide == 4) {
      *reinterpret_cast<float4*>(y) = {sums[0], sums[1], sums[2], sums[3]};
    } else {
      *y = sums[0];
    }
    return;
  }
  const bool half = a.y_dtype == DType::kFp16;
  const auto pair = [&](float low, float high) {
    return half ? ToFp16x2(low, high) : ToBf16x2(low, high);
  };
  uint16_t* const y = static_cast<uint16_t*>(a.y) + at;
  if constexpr (kWide == 4) {
    *reinterpret_cast<uint2*>(y) = {pair(sums[0], sums[1]), pair(sums[2], sums[3])};
  } else {
    *y = pair(sums[0], 0) & 0xffff;
  }
}

// A thread has kWide neighbouring columns, 1 or 4. `units`: of so many in a row.
template <DType kIn, int kWide>
__global__ __launch_bounds__(kThreads) void CombineKernel(CombineArgs a, int64_t units) {
  const int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (unit >= units) return;
  for (int64_t row = blockIdx.y; row < a.count; row += gridDim.y) {
    float sums[kWide] = {};
    Combined<kIn>(a, row, unit * kWide, sums);
    StoreColumns<kWide>(a, row * a.cols + unit * kWide, sums);
  }
}

template <DType kIn, int kWide>
absl::Status LaunchCombine(const CombineArgs& args, StreamView stream) {
  const int64_t units = args.cols / kWide;
  const LaunchConfig config{
      .grid = GridOfRows(units, args.count, kThreads), .block = kThreads, .stream = stream};
  return Launch<CombineKernel<kIn, kWide>>("common/experts", config, args, units);
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
absl::Status LaunchGather(const GatherArgs& args, StreamView stream) {
  const int64_t units = args.row_bytes / static_cast<int64_t>(sizeof(T));
  const LaunchConfig config{
      .grid = GridOfRows(units, args.count, kThreads), .block = kThreads, .stream = stream};
  return Launch<GatherKernel<T>>("common/experts", config, args, units);
}

}  // namespace

absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.row_bytes % 16 == 0 && Aligned(args.in) && Aligned(args.out)) {
    return LaunchGather<uint4>(args, stream);
  }
  return args.row_bytes % 2 == 0 ? LaunchGather<uint16_t>(args, stream)
                                 : LaunchGather<uint8_t>(args, stream);
}

absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.half != nullptr) {
    return ForFloatingType(args.dtype, [&]<DType kIn>() { return GateToHalf<kIn>(args, stream); });
  }
  const auto blocks = static_cast<unsigned>(std::min(CeilDiv(args.count, kThreads), kMaxBlocks));
  return Launch<GateKernel>("common/experts", {.grid = blocks, .block = kThreads, .stream = stream},
                            args);
}

absl::Status GateTokens(const TokenGateArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{
      .grid = static_cast<unsigned>(args.x.rows), .block = kThreads, .stream = stream};
  const auto launch = [&]<DType kIn>() {
    return Launch<TokenGateKernel<kIn>>("common/experts", config, args);
  };
  if (args.x.dtype == DType::kE4m3) return launch.operator()<DType::kE4m3>();
  return ForFloatingType(args.x.dtype, launch);
}

absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  // Few elements are few threads already.
  constexpr int64_t kManyElements = int64_t{1} << 18;
  const bool wide = args.cols % 4 == 0 && Aligned(args.in) && Aligned(args.y) &&
                    Aligned(args.added) && args.count * args.cols >= kManyElements;
  return ForFloatingType(args.in_dtype, [&]<DType kIn>() {
    return wide ? LaunchCombine<kIn, 4>(args, stream) : LaunchCombine<kIn, 1>(args, stream);
  });
}

}  // namespace awqd::cuda
