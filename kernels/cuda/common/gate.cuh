// The middle of a gated MLP, a function of gate and up, four elements at a time. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.cuh"
#include "kernels/exact.h"
#include "kernels/steps.h"

namespace awqd::cuda {
namespace {

// kWide elements, 1 or 4, of kIn, without NarrowFactor.
template <DType kIn, int kWide>
__device__ __forceinline__ void LoadWide(const void* from, int64_t at, float (&out)[kWide]) {
  constexpr float kWhole = 1 / NarrowFactor(kIn);
  if constexpr (kIn == DType::kFp32) {
    const float* const in = static_cast<const float*>(from) + at;
    if constexpr (kWide == 4) {
      *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(in);
    } else {
      out[0] = *in;
    }
  } else {
    const uint16_t* const in = static_cast<const uint16_t*>(from) + at;
    uint32_t words[2] = {};
    if constexpr (kWide == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(in);
      words[0] = v.x, words[1] = v.y;
    } else {
      words[0] = *in;
    }
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      const uint32_t word = words[e / 2], bits = e % 2 == 0 ? word & 0xffff : word >> 16;
      out[e] = (kIn == DType::kFp16 ? Fp16ToFloat(bits) : __uint_as_float(bits << 16)) * kWhole;
    }
  }
}
template <DType kIn>
__device__ __forceinline__ float4 LoadFour(const void* from, int64_t at) {
  float out[4];
  LoadWide<kIn>(from, at, out);
  return {out[0], out[1], out[2], out[3]};
}

// Any function. Not inline: the kernels below repeat it many times, which would double their code.
__device__ __noinline__ float4 GateFour(ActivationFunction activation, GateParameters parameters,
                                        float4 gate, float4 up) {
  const auto gated = [&](float g, float u) { return GateFloat(activation, parameters, g, u); };
  return {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
}

template <DType kIn>
__device__ __forceinline__ float4 Gated(const GateArgs& a, int64_t at) {
  const float4 gate = LoadFour<kIn>(a.gate, at), up = LoadFour<kIn>(a.up, at);
  constexpr ActivationFunction kSilu = ActivationFunction::kSilu;
  if (a.activation != kSilu || a.parameters.limit <= kLargestFloat) {
    return GateFour(a.activation, a.parameters, gate, up);
  }
  return {ActivateFloat(kSilu, gate.x) * up.x, ActivateFloat(kSilu, gate.y) * up.y,
          ActivateFloat(kSilu, gate.z) * up.z, ActivateFloat(kSilu, gate.w) * up.w};
}

}  // namespace
}  // namespace awqd::cuda
