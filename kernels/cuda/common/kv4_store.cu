// KV4's store on CUDA devices (kernels/kv4.h). Rows stay in registers between their range and their
// codes. kv4.cuh says how rows are divided, and with what limits.
#include "kernels/cuda/common/kv4.cuh"

namespace awqd::cuda {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ void Widen(float v, kv4::Range* range) {
  range->min = kv4::Smaller(v, range->min);
  range->max = kv4::Larger(v, range->max);
}
__device__ __forceinline__ void WidenByFinite(float v, kv4::Range* range) {
  if (kv4::IsFinite(v)) Widen(v, range);
}

// The range of all lanes of a row.
__device__ __forceinline__ kv4::Range Together(kv4::Range range, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    range.min = kv4::Smaller(__shfl_xor_sync(kFullWarp, range.min, step), range.min);
    range.max = kv4::Larger(__shfl_xor_sync(kFullWarp, range.max, step), range.max);
  }
  return range;
}

// Scale and zero of a row: the caller's, or those of its range, which `writes` says to write.
__device__ __forceinline__ kv4::RowScale RowScaleOf(const Kv4StoreArgs& a, kv4::Range finite,
                                                    int64_t row, bool writes) {
  if (a.per != Kv4Per::kRow) {
    const int64_t at = ScaleIndex(a.shape, a.per, row);
    return {ReadScale(a.given_scale, a.scale_dtype, at),
            ReadScale(a.given_zero, a.scale_dtype, at)};
  }
  const bool fp16 = a.scale_dtype == DType::kFp16;
  const kv4::RowScale out = kv4::ScaleOf(finite, kv4::LimitsOf(fp16),
                                         [fp16](float value) { return RoundTo(fp16, value); });
  if (writes) {
    WriteScale(a.scale, a.scale_dtype, row, out.scale);
    WriteScale(a.zero, a.scale_dtype, row, out.zero);
  }
  return out;
}

// Eight codes, the first in the lowest bits. What stands above a code's four bits is taken off
// once.
__device__ __forceinline__ uint32_t CodesOf(const float (&v)[8], float inverse, float zero) {
  constexpr uint32_t kMagics = kv4::kCodeMagic * 0x11111111u;
  uint32_t word = 0;
#pragma unroll
  for (int j = 7; j >= 0; --j) word = word * 16 + kv4::CodeAndMagic(v[j], inverse, zero);
  return word - kMagics;
}

// ---- Words of 8 elements ----

// Two 16-bit elements at a time: the smaller and the larger of each half; of a NaN the other.
#if __CUDA_ARCH__ >= 800
template <DType kType>
__device__ __forceinline__ uint32_t SmallerPairs(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (kType == DType::kFp16) {
    asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
}
template <DType kType>
__device__ __forceinline__ uint32_t LargerPairs(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (kType == DType::kFp16) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
}
#else  // sm_75 compares floats alone
template <DType kType>
__device__ __forceinline__ uint32_t PairOf(float low, float high) {
  return kType == DType::kFp16 ? ToFp16x2(low, high) : ToBf16x2(low, high);
}
template <DType kType>
__device__ __forceinline__ float HalfOf(uint32_t pair, int upper) {
  const uint32_t bits = pair >> 16 * upper & 0xffff;
  return kType == DType::kFp16 ? Fp16ToFloat(bits) : kv4::FloatOf(bits << 16);
}
template <DType kType>
__device__ __forceinline__ uint32_t SmallerPairs(uint32_t a, uint32_t b) {
  return PairOf<kType>(fminf(HalfOf<kType>(a, 0), HalfOf<kType>(b, 0)),
                       fminf(HalfOf<kType>(a, 1), HalfOf<kType>(b, 1)));
}
template <DType kType>
__device__ __forceinline__ uint32_t LargerPairs(uint32_t a, uint32_t b) {
  return PairOf<kType>(fmaxf(HalfOf<kType>(a, 0), HalfOf<kType>(b, 0)),
                       fmaxf(HalfOf<kType>(a, 1), HalfOf<kType>(b, 1)));
}
#endif

// As it was loaded.
template <DType kType>
struct Word {
  uint4 pairs;

  __device__ __forceinline__ void Load(const void* x, int64_t at) {
    pairs = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
  }
  __device__ __forceinline__ void ToFloats(float (&v)[8]) const { PairsToFloats<kType>(pairs, v); }
};
template <>
struct Word<DType::kFp32> {
  float v[8];

  __device__ __forceinline__ void Load(const void* x, int64_t at) {
    const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
    const float4 low = from[0], high = from[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  }
  __device__ __forceinline__ void ToFloats(float (&out)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = v[j];
  }
};

// The range of the words that it is given.
template <DType kType>
struct WordRange {
  static constexpr uint32_t kInfinities = kType == DType::kFp16 ? 0x7c007c00u : 0x7f807f80u;
  uint32_t min = kInfinities, max = kInfinities | 0x80008000u;

  __device__ __forceinline__ void Add(const Word<kType>& word) {
    const uint32_t pairs[4] = {word.pairs.x, word.pairs.y, word.pairs.z, word.pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      min = SmallerPairs<kType>(pairs[i], min);
      max = LargerPairs<kType>(pairs[i], max);
    }
  }
  __device__ __forceinline__ kv4::Range Get() const {
    float v[8];
    PairsToFloats<kType>({min, max, min, max}, v);
    return {kv4::Smaller(v[0], v[1]), kv4::Larger(v[2], v[3])};
  }
};
template <>
struct WordRange<DType::kFp32> {
  kv4::Range range;

  __device__ __forceinline__ void Add(const Word<DType::kFp32>& word) {
#pragma unroll
    for (int j = 0; j < 8; ++j) Widen(word.v[j], &range);
  }
  __device__ __forceinline__ kv4::Range Get() const { return range; }
};

// kWords: words that a lane holds, `lanes` apart.
template <DType kType, int kWords>
__global__ __launch_bounds__(kKv4Threads) void StoreKernel(Kv4StoreArgs a, int lanes) {
  const int64_t rows = a.shape.rows(), dim = a.shape.head_dim;
  const int words = static_cast<int>(dim / 8);
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t per_block = kKv4Threads / lanes;
  // All lanes of a warp stay together, because they exchange ranges.
  const int64_t in_block = threadIdx.x / lanes, in_warp = threadIdx.x % kWarpLanes / lanes;
  for (int64_t row = blockIdx.x * per_block + in_block; row - in_warp < rows;
       row += gridDim.x * per_block) {
    const bool there = row < rows;
    Word<kType> held[kWords];
    WordRange<kType> own;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = lane + i * lanes;
      if (!there || word >= words) continue;
      held[i].Load(a.x, row * dim + word * 8);
      own.Add(held[i]);
    }
    kv4::Range range = Together(own.Get(), lanes);
    float v[8];
    // Rows with infinities are few: they go over their registers once more.
    if (__any_sync(kFullWarp, range.min == -kv4::kInfinity || range.max == kv4::kInfinity)) {
      range = {};
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (!there || lane + i * lanes >= words) continue;
        held[i].ToFloats(v);
#pragma unroll
        for (int j = 0; j < 8; ++j) WidenByFinite(v[j], &range);
      }
      range = Together(range, lanes);
    }
    if (!there) continue;
    const kv4::RowScale scale = RowScaleOf(a, range, row, lane == 0);
    const float inverse = kv4::Div(1, scale.scale);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = lane + i * lanes;
      if (word >= words) continue;
      held[i].ToFloats(v);
      reinterpret_cast<uint32_t*>(a.codes + row * (dim / 2))[word] =
          CodesOf(v, inverse, scale.zero);
    }
  }
}

template <DType kType>
__global__ __launch_bounds__(kKv4Threads) void StoreAnyKernel(Kv4StoreArgs a) {
  const int64_t rows = a.shape.rows(), dim = a.shape.head_dim, bytes = a.shape.row_bytes();
  const int lane = threadIdx.x % kWarpLanes;
  constexpr int64_t kPerBlock = kKv4Threads / kWarpLanes;
  for (int64_t row = blockIdx.x * kPerBlock + threadIdx.x / kWarpLanes; row < rows;
       row += gridDim.x * kPerBlock) {
    kv4::Range range;
    for (int64_t i = lane; i < dim; i += kWarpLanes) {
      WidenByFinite(LoadOne<kType>(a.x, row * dim + i), &range);
    }
    const kv4::RowScale scale = RowScaleOf(a, Together(range, kWarpLanes), row, lane == 0);
    const float inverse = kv4::Div(1, scale.scale);
    for (int64_t i = lane; i < bytes; i += kWarpLanes) {
      const int64_t at = row * dim + 2 * i;
      uint32_t pair = kv4::CodeOf(LoadOne<kType>(a.x, at), inverse, scale.zero);
      if (2 * i + 1 < dim) {
        pair |= kv4::CodeOf(LoadOne<kType>(a.x, at + 1), inverse, scale.zero) << 4;
      }
      a.codes[row * bytes + i] = static_cast<uint8_t>(pair);
    }
  }
}

// Four words a lane: a row's three divisions are done by each of its lanes.
template <DType kType>
absl::Status StoreAs(const Kv4StoreArgs& args, StreamView stream) {
  const int64_t rows = args.shape.rows();
  const Kv4Division by = DivideKv4(args.shape.head_dim, args.x, args.codes, 4);
  if (by.lanes == 0) {
    return Launch<StoreAnyKernel<kType>>("common/kv4", Kv4Config(rows, kWarpLanes, stream), args);
  }
  const LaunchConfig config = Kv4Config(rows, by.lanes, stream);
  return by.words == 2 ? Launch<StoreKernel<kType, 2>>("common/kv4", config, args, by.lanes)
                       : Launch<StoreKernel<kType, 4>>("common/kv4", config, args, by.lanes);
}

}  // namespace

absl::Status StoreKv4(const Kv4StoreArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.x_dtype == DType::kFp16) return StoreAs<DType::kFp16>(args, stream);
  if (args.x_dtype == DType::kBf16) return StoreAs<DType::kBf16>(args, stream);
  return StoreAs<DType::kFp32>(args, stream);
}

}  // namespace awqd::cuda

namespace awqd {

const Kv4Ops& CudaKv4() {
  static const Kv4Ops ops = {"common/kv4", cuda::StoreKv4, cuda::LoadKv4};
  return ops;
}

}  // namespace awqd
