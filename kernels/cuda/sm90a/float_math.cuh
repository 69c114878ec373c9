// The arithmetic of codes that are no integers, as Fp16Math and Bf16Math are that of integers
// (common/mma16.cuh): how a lane's fragments are decoded to the type of the activations. Exactly,
// so that the tensor cores multiply by the weights themselves. Device code only.
#pragma once

#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.cuh"

namespace awqd::cuda {
namespace {

template <CodeKind kCode, bool kBf16, class Record>
struct FloatCodeMath;

// A magnitude has two significant bits. A scale, of E4M3 or E8M0, has at most four: records hold it
// as FP16 (layouts/mma16.cc), it fits BF16, and so do all products of the two.
template <bool kBf16_, class Record>
struct FloatCodeMath<CodeKind::kE2m1, kBf16_, Record> {
  static constexpr bool kBf16 = kBf16_;
  static_assert(!Record::kBare);

  struct Meta {
    uint32_t scales[2];  // of a lane's two rows, twice each
  };

  static __device__ __forceinline__ Meta Expand(LaneMetaBits bits) {
    if constexpr (kBf16) {
      const float low = Fp16ToFloat(bits.scales & 0xffff), high = Fp16ToFloat(bits.scales >> 16);
      return {{ToBf16x2(low, low), ToBf16x2(high, high)}};
    } else {
      return {{Prmt(bits.scales, 0, 0x1010), Prmt(bits.scales, 0, 0x3232)}};
    }
  }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<4>& codes, int step,
                                                 const Meta& meta) {
    Pairs out = kBf16 ? E2m1ToBf16(codes.Word(step)) : E2m1ToFp16(codes.Word(step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t scale = meta.scales[i % 2];
      out.v[i] = kBf16 ? Mul2Bf16(out.v[i], scale) : Mul2Fp16(out.v[i], scale);
    }
    return out;
  }
};

// In FP16 sums are short of kE4m3UnitFp16.
template <bool kBf16_, class Record>
struct FloatCodeMath<CodeKind::kE4m3, kBf16_, Record> {
  static constexpr bool kBf16 = kBf16_;
  static_assert(Record::kBare);

  struct Meta {};

  static __device__ __forceinline__ Meta Expand(LaneMetaBits) { return {}; }
  static __device__ __forceinline__ Pairs Decode(const LaneCodes<8>& codes, int step, Meta) {
    return E4m3ToPairs<kBf16>(codes.Word(step, 0), codes.Word(step, 1));
  }
};

}  // namespace
}  // namespace awqd::cuda
