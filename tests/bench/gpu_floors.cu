// The floor kernels: 16-byte accesses, several loads in flight, no arithmetic to speak of.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/core/launch.h"
#include "tests/bench/gpu_floors.h"

namespace awqd::bench {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kBlocksPerSm = 4;

__device__ uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__global__ void __launch_bounds__(kThreads)
    FillKernel(uint64_t* out, int64_t count, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    // Per half: the sign and ten mantissa bits are random, the exponent is one of four.
    const uint64_t r = Mix(seed ^ (static_cast<uint64_t>(i) << 8));
    out[i] = (r & 0x8fff8fff8fff8fffull) + 0x2c002c002c002c00ull;
  }
}

__device__ uint4 LoadStreaming(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint4* __restrict__ in, int64_t count, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  uint32_t sum = 0;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) v[j] = LoadStreaming(in + i + j * stride);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += stride) {
    const uint4 v = LoadStreaming(in + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

// Eight codes become eight 16-bit values; kWide writes each twice, which is FP32's traffic.
template <bool kWide>
__global__ void __launch_bounds__(kThreads)
    ExpandKernel(const uint32_t* __restrict__ packed, int64_t words, int64_t extra,
                 uint4* __restrict__ out) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += stride) {
    uint32_t w = packed[i];
    // Scales and zeros, which a real kernel must read too.
    if (i < extra) w ^= packed[words + i];
    const uint4 v = {(w & 0x000f000fu) | 0x64006400u, (w >> 4 & 0x000f000fu) | 0x64006400u,
                     (w >> 8 & 0x000f000fu) | 0x64006400u, (w >> 12 & 0x000f000fu) | 0x64006400u};
    if constexpr (kWide) {
      out[2 * i] = v;
      out[2 * i + 1] = v;
    } else {
      out[i] = v;
    }
  }
}

dim3 GridFor(int64_t items, int sm_count) {
  return dim3(static_cast<unsigned>(
      std::clamp<int64_t>(CeilDiv(items, kThreads), 1, int64_t{sm_count} * kBlocksPerSm)));
}

}  // namespace

absl::Status FillRandom(void* data, int64_t bytes, uint64_t seed, StreamView stream) {
  return cuda::Launch<FillKernel>("fill", {dim3(1024), dim3(kThreads), 0, stream},
                                  static_cast<uint64_t*>(data), bytes / 8, seed);
}

absl::Status ReadOnce(const void* data, int64_t bytes, int sm_count, uint32_t* sink,
                      StreamView stream) {
  return cuda::Launch<ReadKernel>("read once",
                                  {GridFor(bytes / 16, sm_count), dim3(kThreads), 0, stream},
                                  static_cast<const uint4*>(data), bytes / 16, sink);
}

absl::Status Expand(const void* packed, int64_t packed_bytes, int64_t weights, DType dtype,
                    void* out, StreamView stream) {
  const int64_t words = weights / 8;
  const int64_t extra = std::clamp<int64_t>(packed_bytes / 4 - words, 0, words);
  const dim3 grid(static_cast<unsigned>(CeilDiv(words, kThreads)));
  const cuda::LaunchConfig config{grid, dim3(kThreads), 0, stream};
  if (SizeOf(dtype) == 4) {
    return cuda::Launch<ExpandKernel<true>>("expand", config, static_cast<const uint32_t*>(packed),
                                            words, extra, static_cast<uint4*>(out));
  }
  return cuda::Launch<ExpandKernel<false>>("expand", config, static_cast<const uint32_t*>(packed),
                                           words, extra, static_cast<uint4*>(out));
}

}  // namespace awqd::bench
