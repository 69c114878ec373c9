// The epilogue: the token's scale and the bias in fp32, one rounding, stores; or sums of integers
// as they are. Device code only.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"

namespace awqd::cuda {
namespace {

// The part of a tile that a warp stores: 16 features x kTokens tokens, and where it begins.
struct Corner {
  int64_t row;         // first feature
  int64_t token;       // first token
  int64_t end;         // past the last token to store
  const float* outer;  // of all features, or null
  const float* bias;   // likewise
  int64_t shift;       // rows of y before that of token 0
};

template <class Config>
using Floats = float[Config::kSums];

template <class Config>
__device__ __forceinline__ void ScaleTokens(const PersistentParams& p, const Corner& at,
                                            Floats<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    const int64_t token = at.token + i / 4 * 8 + threadIdx.x % 4 * 2;
    const float s0 = token < at.end ? p.x_scale[token] : 0;
    const float s1 = token + 1 < at.end ? p.x_scale[token + 1] : 0;
    sums[i] *= s0, sums[i + 1] *= s1, sums[i + 2] *= s0, sums[i + 3] *= s1;
  }
}

template <class Config>
__device__ __forceinline__ void ScaleFeatures(const PersistentParams& p, const Corner& at,
                                              Floats<Config>& sums) {
  const int64_t row = at.row + threadIdx.x % 32 / 4;
  const float s0 = row < p.n ? at.outer[row] * p.unit : 0;
  const float s1 = row + 8 < p.n ? at.outer[row + 8] * p.unit : 0;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    sums[i] *= s0, sums[i + 1] *= s0, sums[i + 2] *= s1, sums[i + 3] *= s1;
  }
}

template <class Config>
__device__ __forceinline__ void AddBias(const PersistentParams& p, const Corner& at,
                                        Floats<Config>& sums) {
  const int64_t row = at.row + threadIdx.x % 32 / 4;
  const float b0 = row < p.n ? at.bias[row] : 0;
  const float b1 = row + 8 < p.n ? at.bias[row + 8] : 0;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    sums[i] += b0, sums[i + 1] += b0, sums[i + 2] += b1, sums[i + 3] += b1;
  }
}

// No exchange between lanes: the eight lanes that hold one token write 32 bytes side by side.
template <class Config>
__device__ __forceinline__ void StoreFp32(const PersistentParams& p, const Corner& at,
                                          const Floats<Config>& sums) {
  const int64_t row = at.row + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) {
    const int64_t token = at.token + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const int64_t n = row + i % 4 / 2 * 8;
    if (token < at.end && n < p.n) static_cast<float*>(p.y)[(at.shift + token) * p.n + n] = sums[i];
  }
}

// Transposes the 16 features x 8 tokens of a warp as 16-bit pairs. Afterwards each lane has four
// consecutive features of one token: even lanes of the first eight features, odd lanes of the
// second.
template <bool kHalf>
__device__ __forceinline__ uint2 FourFeatures(const float* d) {
  const uint32_t upper = TransposeMatrix(kHalf ? ToFp16x2(d[0], d[1]) : ToBf16x2(d[0], d[1]));
  const uint32_t lower = TransposeMatrix(kHalf ? ToFp16x2(d[2], d[3]) : ToBf16x2(d[2], d[3]));
  const bool odd = threadIdx.x % 2 == 1;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 1);
  return odd ? uint2{other, lower} : uint2{upper, other};
}

// Stores the first `count` elements, at most four.
__device__ __forceinline__ void StoreSome(uint16_t* y, uint2 v, int count, bool wide) {
  if (wide && count >= 4) {
    *reinterpret_cast<uint2*>(y) = v;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < count) y[e] = (e < 2 ? v.x : v.y) >> e % 2 * 16 & 0xffff;
  }
}

// Stores eight tokens at a time, 32 bytes of each. `kWide`: all 16 features lie within the output
// and four elements may be stored at once. The other case is rare and takes much more code.
template <class Config, bool kHalf, bool kWide>
__device__ __forceinline__ void Store16(const PersistentParams& p, const Corner& at,
                                        const Floats<Config>& sums) {
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + lane % 2 * 8 + lane % 4 / 2 * 4;
  int64_t token = at.token + lane / 4;
  uint16_t* y = static_cast<uint16_t*>(p.y) + (at.shift + token) * p.n + row;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4, token += 8, y += 8 * p.n) {
    const uint2 v = FourFeatures<kHalf>(sums + i);
    if (token >= at.end) continue;
    if constexpr (kWide) {
      *reinterpret_cast<uint2*>(y) = v;
    } else {
      StoreSome(y, v, static_cast<int>(p.n - row), p.y_wide);
    }
  }
}

template <class Config>
__device__ __forceinline__ void Store(const PersistentParams& p, const Corner& at,
                                      Floats<Config>& sums) {
  if (p.x_scale != nullptr) ScaleTokens<Config>(p, at, sums);
  if (at.outer != nullptr) ScaleFeatures<Config>(p, at, sums);
  if (at.bias != nullptr) AddBias<Config>(p, at, sums);
  const bool wide = p.y_wide && at.row + mma16::kRowTile <= p.n;
  constexpr bool kIntegers = std::is_same_v<typename Config::Sum, uint32_t>;
  if (p.y_dtype == DType::kFp32 || (kIntegers && p.y_dtype == DType::kInt32)) {
    StoreFp32<Config>(p, at, sums);
  } else if (p.y_dtype == DType::kFp16) {
    wide ? Store16<Config, true, true>(p, at, sums) : Store16<Config, true, false>(p, at, sums);
  } else {
    wide ? Store16<Config, false, true>(p, at, sums) : Store16<Config, false, false>(p, at, sums);
  }
}

// Stores sums of integers: as they are where y is INT32, else times `scales`, which a thread's two
// rows have. The bits of both go the same way: two ways would keep both in registers.
template <class Config>
__device__ __forceinline__ void StoreIntegers(const PersistentParams& p, const Corner& at,
                                              const RowScales& scales, const Sums<Config>& sums) {
  const bool scaled = p.y_dtype != DType::kInt32;
  Floats<Config> floats;
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) {
    const float scale = i % 4 < 2 ? scales.low : scales.high;
    floats[i] = scaled ? __int2float_rn(static_cast<int>(sums[i])) * scale : ToFloatBits(sums[i]);
  }
  Store<Config>(p, at, floats);
}

}  // namespace
}  // namespace awqd::cuda
