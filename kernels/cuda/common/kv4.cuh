// Shared by KV4's store and load on CUDA devices: how rows are divided among lanes, how elements
// are read and written, and where scales are.
//
// A few lanes of a warp, a power of two, take a row: what one head has of one token. A lane takes
// words of 8 elements, 16 bytes of FP16 and 4 bytes of codes, so that neighbours read and write
// neighbouring memory in every instruction. (A lane with 16 bytes of codes would write 64 bytes
// beside its neighbour's: every instruction would fill half of twice as many sectors.) Limits of
// this way: head_dim a multiple of 8 up to 1024, elements on 16 bytes, codes on 4. Anything else
// goes element by element, a warp a row.
#pragma once

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/kv4.h"
#include "kernels/kv4_math.h"

namespace awqd::cuda {

absl::Status StoreKv4(const Kv4StoreArgs& args, Device& device, StreamView stream);
absl::Status LoadKv4(const Kv4LoadArgs& args, Device& device, StreamView stream);

namespace {

constexpr int kKv4Threads = 256;
constexpr int kWarpLanes = 32;
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

// ---- Elements and scales ----

__device__ __forceinline__ float HighHalf(uint32_t pair) { return Fp16ToFloat(pair >> 16); }

template <DType kType>
__device__ __forceinline__ float LoadOne(const void* x, int64_t at) {
  if constexpr (kType == DType::kFp32) return static_cast<const float*>(x)[at];
  const uint16_t bits = static_cast<const uint16_t*>(x)[at];
  return kType == DType::kFp16 ? Fp16ToFloat(bits) : kv4::FloatOf(uint32_t{bits} << 16);
}

template <DType kType>
__device__ __forceinline__ void StoreOne(void* out, int64_t at, float value) {
  if constexpr (kType == DType::kFp32) {
    static_cast<float*>(out)[at] = value;
  } else {
    static_cast<uint16_t*>(out)[at] =
        (kType == DType::kFp16 ? ToFp16x2(value, 0) : ToBf16x2(value, 0)) & 0xffff;
  }
}

// 8 elements of 16 bits.
template <DType kType>
__device__ __forceinline__ void PairsToFloats(const uint4& from, float (&v)[8]) {
  const uint32_t pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == DType::kFp16) {
      v[2 * i] = Fp16ToFloat(pairs[i] & 0xffff);
      v[2 * i + 1] = HighHalf(pairs[i]);
    } else {
      v[2 * i] = kv4::FloatOf(pairs[i] << 16);
      v[2 * i + 1] = kv4::FloatOf(pairs[i] & 0xffff0000u);
    }
  }
}

// 8 elements on 16 bytes.
template <DType kType>
__device__ __forceinline__ void StoreWord(void* out, int64_t at, const float (&v)[8]) {
  if constexpr (kType == DType::kFp32) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
    to[0] = {v[0], v[1], v[2], v[3]};
    to[1] = {v[4], v[5], v[6], v[7]};
  } else {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = kType == DType::kFp16 ? ToFp16x2(v[2 * i], v[2 * i + 1])
                                       : ToBf16x2(v[2 * i], v[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + at) = {pairs[0], pairs[1], pairs[2],
                                                                   pairs[3]};
  }
}

__device__ __forceinline__ float RoundTo(bool fp16, float value) {
  return fp16 ? Fp16ToFloat(ToFp16x2(value, 0) & 0xffff) : value;
}

__device__ __forceinline__ float ReadScale(const void* scales, DType dtype, int64_t at) {
  return dtype == DType::kFp16 ? LoadOne<DType::kFp16>(scales, at)
                               : LoadOne<DType::kFp32>(scales, at);
}

__device__ __forceinline__ void WriteScale(void* scales, DType dtype, int64_t at, float value) {
  dtype == DType::kFp16 ? StoreOne<DType::kFp16>(scales, at, value)
                        : StoreOne<DType::kFp32>(scales, at, value);
}

// Where a row's scale is. Almost always both numbers have 32 bits, whose division is much shorter.
__device__ __forceinline__ int64_t ScaleIndex(const Kv4Shape& shape, Kv4Per per, int64_t row) {
  if (per != Kv4Per::kHead) return per == Kv4Per::kRow ? row : 0;
  if (((row | shape.heads) >> 32) != 0) return row % shape.heads;
  return static_cast<uint32_t>(row) % static_cast<uint32_t>(shape.heads);
}

// How rows of whole words are divided: so many words a lane that what it does once for a row counts
// less. Four where 32 lanes would not do with two.
struct Kv4Division {
  int lanes = 0;  // 0: element by element
  int words = 2;
};

// `words`: 2 or 4, that a lane had best take.
Kv4Division DivideKv4(int64_t head_dim, const void* elements, const void* codes, int words) {
  const auto on = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  if (head_dim % 8 != 0 || head_dim > 1024 || !on(elements, 16) || !on(codes, 4)) return {};
  Kv4Division out = {.lanes = 1, .words = words};
  while (out.lanes < kWarpLanes && out.lanes * words * 8 < head_dim) out.lanes *= 2;
  if (out.lanes * words * 8 < head_dim) out.words = 4;
  return out;
}

LaunchConfig Kv4Config(int64_t rows, int lanes, StreamView stream) {
  const int64_t blocks = CeilDiv(rows, kKv4Threads / lanes);
  return {.grid = dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks))),
          .block = kKv4Threads,
          .stream = stream};
}

}  // namespace
}  // namespace awqd::cuda
