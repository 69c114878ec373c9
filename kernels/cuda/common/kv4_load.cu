// KV4's load on CUDA devices (kernels/kv4.h). kv4.cuh says how rows are divided, and with what
// limits.
#include "kernels/cuda/common/dequant.cuh"
#include "kernels/cuda/common/kv4.cuh"

namespace awqd::cuda {
namespace {

// The scale and the zero that decode a row's codes.
struct Decode {
  float scale, zero;        // exact
  uint32_t factor, addend;  // fused: twice the same FP16 number
};

__device__ __forceinline__ Decode DecodeOf(const Kv4LoadArgs& a, int64_t row) {
  const int64_t at = ScaleIndex(a.shape, a.per, row);
  Decode out;
  out.scale = ReadScale(a.scale, a.scale_dtype, at);
  out.zero = ReadScale(a.zero, a.scale_dtype, at);
  const float offset = kv4::OffsetOf(out.scale, out.zero);
  out.factor = ToFp16x2(out.scale, out.scale);
  out.addend = ToFp16x2(offset, offset);
  return out;
}

template <DType kType, bool kFused>
__device__ __forceinline__ void LoadOneWord(const Kv4LoadArgs& a, uint32_t word, const Decode& d,
                                            int64_t at) {
  if constexpr (kFused) {
    const Pairs v = FusedKv4Word(word, d.factor, d.addend);
    uint16_t* const out = static_cast<uint16_t*>(a.out) + at;
    *reinterpret_cast<uint4*>(out) = {v.v[0], v.v[1], v.v[2], v.v[3]};
  } else {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = kv4::Exact(Kv4CodeToFloat(word >> (4 * j) & 15), d.scale, d.zero);
    }
    StoreWord<kType>(a.out, at, v);
  }
}

template <DType kType, bool kFused, int kWords>
__global__ __launch_bounds__(kKv4Threads) void LoadKernel(Kv4LoadArgs a, int lanes) {
  const int64_t rows = a.shape.rows(), dim = a.shape.head_dim;
  const int words = static_cast<int>(dim / 8);
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t per_block = kKv4Threads / lanes;
  for (int64_t row = blockIdx.x * per_block + threadIdx.x / lanes; row < rows;
       row += gridDim.x * per_block) {
    const uint32_t* const codes = reinterpret_cast<const uint32_t*>(a.codes + row * (dim / 2));
    uint32_t word[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (lane + i * lanes < words) word[i] = codes[lane + i * lanes];
    }
    const Decode decode = DecodeOf(a, row);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = lane + i * lanes;
      if (at < words) LoadOneWord<kType, kFused>(a, word[i], decode, row * dim + at * 8);
    }
  }
}

template <DType kType, bool kFused>
__global__ __launch_bounds__(kKv4Threads) void LoadAnyKernel(Kv4LoadArgs a) {
  const int64_t rows = a.shape.rows(), dim = a.shape.head_dim, bytes = a.shape.row_bytes();
  const int lane = threadIdx.x % kWarpLanes;
  constexpr int64_t kPerBlock = kKv4Threads / kWarpLanes;
  for (int64_t row = blockIdx.x * kPerBlock + threadIdx.x / kWarpLanes; row < rows;
       row += gridDim.x * kPerBlock) {
    const Decode d = DecodeOf(a, row);
    for (int64_t i = lane; i < dim; i += kWarpLanes) {
      const uint32_t code = a.codes[row * bytes + i / 2] >> (i % 2 * 4) & 15;
      const float u = Kv4CodeToFloat(code);
      if constexpr (kFused) {
        static_cast<uint16_t*>(a.out)[row * dim + i] =
            Fma2Fp16(ToFp16x2(u, u), d.factor, d.addend) & 0xffff;
      } else {
        StoreOne<kType>(a.out, row * dim + i, kv4::Exact(u, d.scale, d.zero));
      }
    }
  }
}

template <DType kType, bool kFused>
absl::Status LoadAs(const Kv4LoadArgs& args, StreamView stream) {
  const int64_t rows = args.shape.rows();
  const Kv4Division by = DivideKv4(args.shape.head_dim, args.out, args.codes, 2);
  if (by.lanes == 0) {
    return Launch<LoadAnyKernel<kType, kFused>>("common/kv4", Kv4Config(rows, kWarpLanes, stream),
                                                args);
  }
  const LaunchConfig config = Kv4Config(rows, by.lanes, stream);
  return by.words == 2 ? Launch<LoadKernel<kType, kFused, 2>>("common/kv4", config, args, by.lanes)
                       : Launch<LoadKernel<kType, kFused, 4>>("common/kv4", config, args, by.lanes);
}

}  // namespace

absl::Status LoadKv4(const Kv4LoadArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.form == Kv4Form::kFused) return LoadAs<DType::kFp16, true>(args, stream);
  if (args.out_dtype == DType::kFp16) return LoadAs<DType::kFp16, false>(args, stream);
  if (args.out_dtype == DType::kBf16) return LoadAs<DType::kBf16, false>(args, stream);
  return LoadAs<DType::kFp32, false>(args, stream);
}

}  // namespace awqd::cuda
