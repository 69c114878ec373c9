// Decodes tiles of layout "vectors" (kernels/layouts/vectors.cc) to integers in FP16. Device code
// only.
//
// Each element of W is an integer times one number for its column and block of 256 (Unit): point,
// or 8 (point + offset), times an odd number up to 31. That has at most 11 bits, so FP16 holds it
// exactly, and so do the tensor cores.
#pragma once

#include <cstdint>

#include "kernels/base/codebooks.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/layouts/vectors.h"

namespace awqd::cuda {

// Entries of a codebook as a kernel has them in shared memory: the bytes of four elements, or eight
// nibbles, each the number of an element's level.
template <VectorCode kCode>
constexpr auto MakeEntries() {
  constexpr auto kBook = MakeCodebook<kCode>();
  if constexpr (vectors::HasPairs(kCode)) {
    return kBook;
  } else {
    constexpr int kPoints = sizeof(kBook.points) / sizeof(kBook.points[0]);
    Codebook<uint32_t, kPoints> out;
    for (int i = 0; i < kPoints; ++i) {
      for (int j = 0; j < 8; ++j) {
        const auto byte = static_cast<uint8_t>(kBook.points[i] >> (8 * j));
        const uint8_t(&levels)[3] = vectors::HasOffsets(kCode) ? kIq1Values : kIq2Values;
        const uint32_t level = byte == levels[0] ? 0 : byte == levels[1] ? 1 : 2;
        out.points[i] |= level << (4 * j);
      }
    }
    return out;
  }
}

template <VectorCode kCode>
__device__ const auto kEntries = MakeEntries<kCode>();
template <VectorCode kCode>
constexpr int kEntriesBytes = sizeof(MakeEntries<kCode>());

// Copies the entries to shared memory; the block synchronises afterwards.
template <VectorCode kCode>
__device__ __forceinline__ void FillEntries(uint32_t* shared) {
  for (int i = threadIdx.x; i < kEntriesBytes<kCode> / 4; i += blockDim.x) {
    shared[i] = kEntries<kCode>.points[i];
  }
}

// The factor of a block's integers beside d.
template <VectorCode kCode>
constexpr float kUnit = kCode == VectorCode::kIq3S     ? 1.0f
                        : kCode == VectorCode::kIq3Xxs ? 0.25f
                                                       : 0.125f;

// A lane's two items of a round.
template <VectorCode kCode>
struct LaneWords {
  uint2 indices[vectors::IndexPlanes(kCode)];
  uint2 signs;
  uint32_t high;
  uint32_t scales;

  __device__ __forceinline__ void Load(const uint8_t* tile, int round) {
    using namespace vectors;
    const int lane = threadIdx.x % 32;
    const uint8_t* const at = tile + round * RoundBytes(kCode);
#pragma unroll
    for (int i = 0; i < IndexPlanes(kCode); ++i) {
      indices[i] = *reinterpret_cast<const uint2*>(at + 32 * kIndexBytes * i + 8 * lane);
    }
    if constexpr (SignBytes(kCode) > 0) {
      signs = *reinterpret_cast<const uint2*>(at + SignsAt(kCode) + 8 * lane);
    }
    if constexpr (HighBytes(kCode) == 2) {
      high = *reinterpret_cast<const uint16_t*>(at + HighAt(kCode) + 2 * lane);
    }
    if constexpr (HighBytes(kCode) == 4) {
      high = *reinterpret_cast<const uint32_t*>(at + HighAt(kCode) + 4 * lane);
    }
    if constexpr (ScaleBytes(kCode) == 1) scales = at[ScalesAt(kCode) + lane];
    if constexpr (ScaleBytes(kCode) == 2) {
      scales = *reinterpret_cast<const uint16_t*>(at + ScalesAt(kCode) + 2 * lane);
    }
  }
};

// d of a lane's two columns in FP16. Every lane of the warp calls it.
template <VectorCode kCode>
__device__ __forceinline__ uint32_t LoadFactors(const uint8_t* tile) {
  using namespace vectors;
  const int lane = threadIdx.x % 32;
  if constexpr (kCode != VectorCode::kIq1M) {
    return *reinterpret_cast<const uint32_t*>(tile + FactorsAt(kCode) + lane / 4 * 4);
  } else {
    // Each item has two bits of it.
    uint32_t both = 0;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const uint32_t items = *reinterpret_cast<const uint16_t*>(tile + round * RoundBytes(kCode) +
                                                                ScalesAt(kCode) + 2 * lane);
      both |= ((items >> 6 & 3) | (items >> 14) << 16) << (8 * round + lane % 4 * 2);
    }
    both |= __shfl_xor_sync(0xffffffffu, both, 1);
    both |= __shfl_xor_sync(0xffffffffu, both, 2);
    return both;
  }
}

// The units of a lane's two columns.
template <VectorCode kCode>
__device__ __forceinline__ void UnitsOf(uint32_t factors, float (&out)[2]) {
  out[0] = Fp16ToFloat(static_cast<uint16_t>(factors)) * kUnit<kCode>;
  out[1] = Fp16ToFloat(static_cast<uint16_t>(factors >> 16)) * kUnit<kCode>;
}

namespace internal {

// Bits of `word` from `from` on, moved to `to`, under a mask that counts from bit 0.
template <int kFrom, int kTo>
__device__ __forceinline__ uint32_t Moved(uint32_t word, uint32_t mask) {
  return (kFrom > kTo ? word >> (kFrom - kTo) : word << (kTo - kFrom)) & mask;
}
template <int kItem>
__device__ __forceinline__ uint32_t WordOf(const uint2& words) {
  return kItem == 0 ? words.x : words.y;
}

}  // namespace internal

// Item `kItem`, 0 or 1, of a lane: four vectors that share one scale, or have two.
template <VectorCode kCode, int kItem>
class LaneGroup {
 public:
  __device__ __forceinline__ explicit LaneGroup(const LaneWords<kCode>& words) : words_(words) {
    using namespace vectors;
    if constexpr (SignBytes(kCode) > 0) {
      signs_ = internal::WordOf<kItem>(words.signs);
      constexpr bool kSeven = kCode != VectorCode::kIq2S && kCode != VectorCode::kIq3S;
      if constexpr (kSeven) {
        // The eighth sign of a vector makes their number even.
        const uint32_t seven = signs_ & 0x0fffffffu;
        uint32_t odd = seven ^ seven >> 16;
        odd ^= odd >> 8;
        odd ^= odd >> 4;
        upper_ = signs_;
        signs_ = seven | odd << 28;
      }
    }
    if constexpr (kCode == VectorCode::kIq2Xxs || kCode == VectorCode::kIq3Xxs) {
      SetScale<0>(upper_ >> 28);
    } else if constexpr (kCode == VectorCode::kIq3S) {
      SetScale<0>(words.scales >> (4 * kItem) & 15);
    } else if constexpr (kCode == VectorCode::kIq1S) {
      SetScale<0>(words.high >> (16 * kItem + 12) & 7);
    } else if constexpr (kCode == VectorCode::kIq1M) {
      SetScale<0>(words.scales >> (8 * kItem) & 7);
      SetScale<1>(words.scales >> (8 * kItem + 3) & 7);
    } else {
      SetScale<0>(words.scales >> (8 * kItem) & 15);
      SetScale<1>(words.scales >> (8 * kItem + 4) & 15);
    }
  }

  // Elements 2 i and 2 i + 1 of vector `kVector`, over the unit, to out[i].
  template <int kVector>
  __device__ __forceinline__ void Decode(const uint32_t* entries, uint32_t (&out)[4]) const {
    using namespace vectors;
    const uint32_t scale = scales_[kTwoScales ? kVector / 2 : 0];
    const uint32_t bias = biases_[kTwoScales ? kVector / 2 : 0];
    uint32_t bytes[2];
    if constexpr (HasPairs(kCode)) {
      bytes[0] = Entry<kVector, 0>(entries);
      bytes[1] = Entry<kVector, 1>(entries);
    } else {
      // Each nibble selects a byte, its level with one sign or offset or the other, plus 128.
      constexpr uint32_t kPlus = HasOffsets(kCode) ? 0x00898179u : 0x00ab9988u;
      constexpr uint32_t kMinus = HasOffsets(kCode) ? 0x00877f77u : 0x00556778u;
      const uint32_t levels = Entry<kVector, 0>(entries) ^ Minus<kVector>();
      bytes[0] = Prmt(kPlus, kMinus, levels);
      bytes[1] = Prmt(kPlus, kMinus, levels >> 16);
    }
    // 0x64 before a byte makes an FP16 number of 1024 + byte.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = Fma2Fp16(Prmt(bytes[i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342), scale, bias);
    }
    if constexpr (HasPairs(kCode)) {
      out[0] ^= internal::Moved<kVector, 15>(signs_, 0x80008000u);
      out[1] ^= internal::Moved<kVector + 4, 15>(signs_, 0x80008000u);
      out[2] ^= internal::Moved<kVector + 8, 15>(signs_, 0x80008000u);
      out[3] ^= internal::Moved<kVector + 12, 15>(signs_, 0x80008000u);
    }
  }

 private:
  static constexpr bool kTwoScales =
      kCode == VectorCode::kIq2Xs || kCode == VectorCode::kIq2S || kCode == VectorCode::kIq1M;

  // 2 s + 1 in FP16, and what takes off the bytes' 1024 and 128 with it.
  template <int kWhich>
  __device__ __forceinline__ void SetScale(uint32_t s) {
    scales_[kWhich] = Sub2Fp16(s * 0x00020002u + 0x64016401u, 0x64006400u);
    constexpr uint32_t kBias = vectors::HasPairs(kCode) ? 0xe400e400u : 0xe480e480u;
    biases_[kWhich] = Mul2Fp16(scales_[kWhich], kBias);
  }

  // The nibbles' bits 2 of vector `kVector`, which say minus.
  template <int kVector>
  __device__ __forceinline__ uint32_t Minus() const {
    if constexpr (kCode == VectorCode::kIq1S) {
      return (words_.high >> (16 * kItem + 15) & 1) * 0x44444444u;
    } else if constexpr (kCode == VectorCode::kIq1M) {
      return (words_.high >> (16 * kItem + 4 * kVector + 3) & 1) * 0x44444444u;
    } else {
      return internal::Moved<kVector, 2>(signs_, 0x44444444u);
    }
  }

  template <int kVector, int kHalf>
  __device__ __forceinline__ uint32_t Entry(const uint32_t* entries) const {
    uint32_t index = Prmt(internal::WordOf<kItem>(words_.indices[kHalf]), 0, 0x4440 | kVector);
    if constexpr (kCode == VectorCode::kIq2Xs) {
      index |= internal::Moved<28 + kVector, 8>(upper_, 0x100);
    } else if constexpr (kCode == VectorCode::kIq2S) {
      index |= internal::Moved<8 * kItem + 2 * kVector, 8>(words_.high, 0x300);
    } else if constexpr (kCode == VectorCode::kIq3S) {
      index |= internal::Moved<8 * kItem + 2 * kVector + kHalf, 8>(words_.high, 0x100);
    } else if constexpr (kCode == VectorCode::kIq1S) {
      index |= internal::Moved<16 * kItem + 3 * kVector, 8>(words_.high, 0x700);
    } else if constexpr (kCode == VectorCode::kIq1M) {
      index |= internal::Moved<16 * kItem + 4 * kVector, 8>(words_.high, 0x700);
    }
    return entries[index];
  }

  const LaneWords<kCode>& words_;
  uint32_t signs_ = 0, upper_ = 0;
  uint32_t scales_[2], biases_[2];
};

// Calls fn.operator()<kCode>() for the code.
template <class Fn>
absl::Status ForVectorCode(VectorCode code, Fn fn) {
  switch (code) {
    case VectorCode::kIq2Xxs:
      return fn.template operator()<VectorCode::kIq2Xxs>();
    case VectorCode::kIq2Xs:
      return fn.template operator()<VectorCode::kIq2Xs>();
    case VectorCode::kIq2S:
      return fn.template operator()<VectorCode::kIq2S>();
    case VectorCode::kIq3Xxs:
      return fn.template operator()<VectorCode::kIq3Xxs>();
    case VectorCode::kIq3S:
      return fn.template operator()<VectorCode::kIq3S>();
    case VectorCode::kIq1S:
      return fn.template operator()<VectorCode::kIq1S>();
    default:
      return fn.template operator()<VectorCode::kIq1M>();
  }
}

}  // namespace awqd::cuda
