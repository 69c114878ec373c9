// The prologue of activations that are rounded to E4M3 (PrologueArgs). Rows of E4M3 tensor cores get
// the bytes and their scales; other rows get the rounded numbers in the type that they read.
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/base/float8.h"
#include "kernels/base/math.h"
#include "kernels/cuda/common/gate.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/prologue.cuh"
#include "kernels/cuda/common/steps.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int64_t kScaledBlock = 128;  // in-features that share a scale with kFloat8PerBlock
constexpr int kBlockLanes = kScaledBlock / kIntegerRun;

// The rows that are rounded. k: their length. Load: a run of 16 elements of a row, zero from k on.
struct OwnRows {
  Reader x;
  const int32_t* gather;  // or null
  bool wide;              // 16 elements of a row of x lie together on 16 bytes

  __device__ __forceinline__ int64_t k() const { return x.k; }
  __device__ __forceinline__ void Load(int64_t row, int64_t first, float (&v)[kIntegerRun]) const {
    LoadRun(x, gather == nullptr ? row : gather[row], first, wide, v);
  }
};

template <DType kIn>
struct GatedRows {
  GateArgs gate;

  __device__ __forceinline__ int64_t k() const { return gate.cols; }
  __device__ __forceinline__ void Load(int64_t row, int64_t first, float (&v)[kIntegerRun]) const {
#pragma unroll
    for (int i = 0; i < kIntegerRun; i += 4) {
      float4 four = {};
      if (first + i < gate.cols) four = Gated<kIn>(gate, row * gate.cols + first + i);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  }
};

struct Float8Rows {
  void* out;          // [rows, stride]
  DType dtype;        // kE4m3; else the numbers themselves in this type
  bool beside_scale;  // numbers in FP16, times `scales`
  int64_t stride;
  float* scales;  // [rows], or with scale_stride > 0 [blocks of 128, scale_stride]
  int64_t scale_stride;
  const float* given;  // [rows] or null; of codes per block [rows, blocks]
  bool per_block;
  float sums_factor;  // of `scales`
  bool codes;         // x is E4M3 already
  RowMask mask;
};

// The scale of numbers whose largest magnitude has these bits; NaN where one is not finite.
__device__ __forceinline__ float ScaleOf(int largest, const float* given) {
  if (largest >= kInfinityBits) return __int_as_float(0x7fc00000);
  const float scale = given != nullptr ? *given : __int_as_float(largest) / kLargestE4m3;
  return scale == 0 ? 1 : scale;
}

// The scale that came with a block of codes, or null.
__device__ __forceinline__ const float* GivenOfBlock(const Float8Rows& to, int64_t row, int64_t k,
                                                     int64_t first) {
  if (!to.codes || first >= k) return nullptr;
  return to.given + row * ((k + kScaledBlock - 1) / kScaledBlock) + first / kScaledBlock;
}

// Two quotients as E4M3; zeros where the scale is NaN.
__device__ __forceinline__ uint32_t TwoToE4m3(float low, float high, float scale) {
  if (isnan(scale)) return 0;
  return __nv_cvt_float2_to_fp8x2(make_float2(low / scale, high / scale), __NV_SATFINITE,
                                  __NV_E4M3);
}

// A run as E4M3 in the order of the tensor cores.
__device__ __forceinline__ void StoreCodes(const float (&v)[kIntegerRun], float scale,
                                           uint8_t* out) {
  uint32_t words[kIntegerRun / 4];
#pragma unroll
  for (int w = 0; w < kIntegerRun / 4; ++w) {
    const auto at = [&](int i) { return v[IntegerSource(4 * w + i)]; };
    words[w] = TwoToE4m3(at(0), at(1), scale) | TwoToE4m3(at(2), at(3), scale) << 16;
  }
  *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
}

// Replaces a run by factor * q.
__device__ __forceinline__ void RoundRun(float scale, float factor, float (&v)[kIntegerRun]) {
#pragma unroll
  for (int i = 0; i < kIntegerRun; i += 2) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(TwoToE4m3(v[i], v[i + 1], scale));
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
    v[i] = Fp16ToFloat(pair.x) * factor, v[i + 1] = Fp16ToFloat(pair.y) * factor;
  }
}

__device__ __forceinline__ void StoreNumbers(const float (&v)[kIntegerRun], DType dtype, void* out,
                                             int64_t at, int64_t room) {
  const auto pair = [&](int i) {
    return dtype == DType::kFp16 ? ToFp16x2(v[i], v[i + 1]) : ToBf16x2(v[i], v[i + 1]);
  };
  auto* const halves = static_cast<uint16_t*>(out) + at;
  if (dtype != DType::kFp32 && room >= kIntegerRun &&
      reinterpret_cast<uintptr_t>(halves) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kIntegerRun; i += 8) {
      *reinterpret_cast<uint4*>(halves + i) = {pair(i), pair(i + 2), pair(i + 4), pair(i + 6)};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kIntegerRun; ++i) {
    if (i >= room) return;
    if (dtype == DType::kFp32) {
      static_cast<float*>(out)[at + i] = v[i];
    } else {
      halves[i] = pair(i / 2 * 2) >> i % 2 * 16 & 0xffff;
    }
  }
}

// Block = one row, a thread takes runs of 16. A row that has no more runs than the block has threads
// is read once.
template <class Rows>
__global__ __launch_bounds__(kMostRunThreads) void RoundRowsToFloat8(
    const __grid_constant__ Rows x, const __grid_constant__ Float8Rows to) {
  LaunchDependents();
  const int64_t row = blockIdx.x, step = int64_t{blockDim.x} * kIntegerRun;
  if (!to.mask.Has(row)) return;
  const int64_t mine = threadIdx.x * kIntegerRun;
  float v[kIntegerRun];
  float scale = 1, factor = 1;
  const bool needs_largest = !to.per_block || to.beside_scale;
  if (needs_largest) {
    int largest = 0;
    for (int64_t first = mine; first < x.k(); first += step) {
      x.Load(row, first, v);
      int of_run = LargestOfRun(v, 0);
      if (to.per_block && to.codes && of_run < kInfinityBits) {
        of_run = __float_as_int(__int_as_float(of_run) * *GivenOfBlock(to, row, x.k(), first));
      }
      largest = max(largest, of_run);
    }
    largest = LargestOfBlock(largest);
    scale = ScaleOf(largest, to.given == nullptr || to.per_block ? nullptr : to.given + row);
    float of_sums = scale;
    if (to.per_block && to.beside_scale && !isnan(scale)) {
      const int exponent = HalfExponent(__int_as_float(largest));
      factor = ldexpf(1.0f, -exponent), of_sums = ldexpf(1.0f, exponent);
    }
    if (threadIdx.x == 0 && to.scales != nullptr && to.scale_stride == 0) {
      to.scales[row] = of_sums * to.sums_factor;
    }
  }
  const float of_numbers = to.scales == nullptr ? to.sums_factor : 1;
  // All threads of a block of 128 take part: rows are padded to a multiple of it here.
  const int64_t end = to.per_block ? RoundUp(to.stride, kScaledBlock) : to.stride;
  for (int64_t first = mine; first < end; first += step) {
    if (!needs_largest || step < end || first >= x.k()) x.Load(row, first, v);
    if (to.per_block) {
      int largest = LargestOfRun(v, 0);
      const unsigned lanes = 0xffu << (threadIdx.x % 32 / kBlockLanes * kBlockLanes);
#pragma unroll
      for (int apart = kBlockLanes / 2; apart > 0; apart /= 2) {
        largest = max(largest, __shfl_xor_sync(lanes, largest, apart));
      }
      scale = ScaleOf(largest, GivenOfBlock(to, row, x.k(), first));
      if (to.scale_stride > 0 && threadIdx.x % kBlockLanes == 0) {
        to.scales[first / kScaledBlock * to.scale_stride + row] = scale * to.sums_factor;
      }
    }
    const float divisor = to.codes && !isnan(scale) ? 1 : scale;
    if (to.dtype == DType::kE4m3) {
      StoreCodes(v, divisor, static_cast<uint8_t*>(to.out) + row * to.stride + first);
      continue;
    }
    const bool by_scale = to.beside_scale && !to.per_block;
    RoundRun(divisor, by_scale ? 1 : scale * factor * of_numbers, v);
    StoreNumbers(v, to.dtype, to.out, row * to.stride + first, to.stride - first);
  }
}

int64_t ScaleStride(int64_t rows) { return RoundUp(rows, 4); }  // whole vectors

}  // namespace

int64_t Float8ScalesBytes(int64_t rows, int64_t k) {
  constexpr int64_t kMostTileTokens = 256;  // a tile copies those of its tokens past the last too
  const int64_t floats = CeilDiv(k, kScaledBlock) * ScaleStride(rows) + kMostTileTokens;
  return RoundUp(floats * 4, 256);
}

absl::Status RunPrologueFloat8(const PrologueArgs& args, int64_t stride, float* scales,
                               PrologueResult* out, StreamView stream) {
  const ConstMatrixView& x = args.x;
  const bool codes = args.form == InputForm::kTensorCoreFloat8;
  const bool numbers = args.form == InputForm::kTensorCore;
  const bool per_block = args.quantization == ActivationQuantization::kFloat8PerBlock;
  const int64_t count = args.count > 0 ? args.count : x.rows;
  const bool given_codes = x.dtype == DType::kE4m3;
  const DType as_sent = given_codes ? DType::kFp32 : x.dtype;
  out->x = {args.out, codes ? DType::kE4m3 : numbers ? DType::kFp16 : as_sent, count, x.cols};
  out->stride = stride;
  out->scale = codes || numbers ? scales : nullptr;
  out->scale_stride = codes && per_block ? ScaleStride(count) : 0;
  const Float8Rows rows = {.out = args.out,
                           .dtype = out->x.dtype,
                           .beside_scale = numbers,
                           .stride = stride,
                           .scales = out->scale == nullptr ? nullptr : scales,
                           .scale_stride = out->scale_stride,
                           .given = args.scales,
                           .per_block = per_block,
                           .sums_factor = args.sums_factor,
                           .codes = given_codes,
                           .mask = args.mask};
  const int64_t threads = RoundUp(CeilDiv(RoundUp(stride, kScaledBlock), int64_t{kIntegerRun}), 32);
  const LaunchConfig config{
      .grid = static_cast<unsigned>(count),
      .block = static_cast<unsigned>(std::min<int64_t>(threads, kMostRunThreads)),
      .stream = stream};
  constexpr const char* kName = "common/prologue_float8";
  if (args.gate != nullptr) {
    return ForFloatingType(args.gate->dtype, [&]<DType kIn>() {
      return Launch<RoundRowsToFloat8<GatedRows<kIn>>>(kName, config, GatedRows<kIn>{*args.gate},
                                                       rows);
    });
  }
  const OwnRows own = {{x.data, x.dtype, args.order, args.factor, x.cols},
                       args.gather,
                       args.order == nullptr && args.factor == nullptr && RowsOnSixteenBytes(x)};
  return Launch<RoundRowsToFloat8<OwnRows>>(kName, config, own, rows);
}

}  // namespace awqd::cuda
