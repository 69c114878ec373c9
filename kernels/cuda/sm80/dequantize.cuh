// Shared by the kernels of Dequantize: a block of 256 threads decodes one record (128 k x 64 n) to
// 16 bits in shared memory, [k][n], and stores it row by row. Device code only.
#pragma once

#include <type_traits>

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {

struct DequantizeParams {
  const uint8_t* records;
  const float* table;  // [16] of codes that index it, or null
  const float* outer;  // [N] or null
  void* out;
  int64_t row_begin, rows;  // of K
  int64_t col_begin, cols;  // of N
  int64_t first_tile, first_block;
  int64_t k_blocks;
  int64_t n;
  int metas;
  int zero;         // of bare records
  bool zero_first;  // as QMatmulParams has it
  bool wide;        // eight elements of out may be stored at once
  bool stream;      // nobody will find out in L2: let it leave first
};

// Decodes codes that are no integers, and real zeros (dequantize_floats.cu), to `out`'s type.
absl::Status DequantizeFloats(const DequantizeParams& params, const QuantizationScheme& scheme,
                              DType out, const LaunchConfig& config);

namespace {

constexpr int kThreads = 256;
constexpr int kRowBytes = mma16::kTileN * 2;

template <DType kOut>
using Element = std::conditional_t<kOut == DType::kFp32, float, uint16_t>;

// Eight consecutive outputs of one thread.
template <DType kOut>
struct alignas(16) Eight {
  static constexpr int kVectors = kOut == DType::kFp32 ? 2 : 1;
  uint4 v[kVectors];
};

__device__ __forceinline__ float LowFloat(uint32_t pair) { return Fp16ToFloat(pair & 0xffff); }
__device__ __forceinline__ float HighFloat(uint32_t pair) { return Fp16ToFloat(pair >> 16); }

// A factor of each column, applied after its scale.
struct Outer {
  float v[8];
};

__device__ __forceinline__ Outer ReadOuter(const DequantizeParams& p, int64_t n) {
  Outer out;
#pragma unroll
  for (int i = 0; i < 8; ++i) out.v[i] = n + i < p.n ? p.outer[n + i] : 0;
  return out;
}

template <DType kOut>
__device__ __forceinline__ Eight<kOut> Round(const float (&v)[8]) {
  Eight<kOut> out;
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kOut == DType::kFp32) {
      w[2 * i] = __float_as_uint(v[2 * i]), w[2 * i + 1] = __float_as_uint(v[2 * i + 1]);
    } else {
      w[i] = kOut == DType::kFp16 ? ToFp16x2(v[2 * i], v[2 * i + 1])
                                  : ToBf16x2(v[2 * i], v[2 * i + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < Eight<kOut>::kVectors; ++i) {
    out.v[i] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
  }
  return out;
}

// Where the 16-byte chunk `chunk` of row k lies: XOR-ed with the row so that neither phase meets a
// bank twice.
__device__ __forceinline__ uint32_t ChunkAt(uint32_t tile, int k, int chunk) {
  return tile + k * kRowBytes + ((chunk ^ (k & 7)) * 16);
}

// Writes a lane's pairs of a step to where they belong: TransposeMatrix makes neighbours in n of
// neighbours in k.
__device__ __forceinline__ void StorePairs(uint32_t tile, int step, const Pairs& pairs) {
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = half * mma16::kUnitK + step * 16 + i / 2 * 8 + lane / 4;
    StoreShared4(ChunkAt(tile, k, row_tile * 2 + i % 2) + lane % 4 * 4,
                 TransposeMatrix(pairs.v[i]));
  }
}

template <DType kOut>
__device__ __forceinline__ void Store(const DequantizeParams& p, int64_t row, int64_t col,
                                      const Eight<kOut>& values) {
  if (row < 0 || row >= p.rows || col <= -8 || col >= p.cols) return;
  Element<kOut>* out = static_cast<Element<kOut>*>(p.out) + row * p.cols + col;
  if (p.wide) {
#pragma unroll
    for (int i = 0; i < Eight<kOut>::kVectors; ++i) {
      uint4* at = reinterpret_cast<uint4*>(out) + i;
      if (p.stream) {
        __stcs(at, values.v[i]);
      } else {
        *at = values.v[i];
      }
    }
    return;
  }
  const Element<kOut>* from = reinterpret_cast<const Element<kOut>*>(&values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i >= 0 && col + i < p.cols) out[i] = from[i];
  }
}

}  // namespace
}  // namespace awqd::cuda
