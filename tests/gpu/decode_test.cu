// The decoders of kernels/cuda/common/dequant.cuh on the GPU give the bits of their host code,
// which dequant_test.cc tests exhaustively.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/common/dequant.cuh"

namespace awqd::cuda {
namespace {

constexpr int kOutputs = 21;

// All conversions of one word with one zero point and one scale.
AWQD_HD void DecodeAll(uint32_t word, uint32_t z, uint16_t scale, uint32_t* out) {
  const uint32_t zeros = Both(z | z << 4);
  const uint32_t low = LowZeroFp16(zeros), high = HighZeroFp16(zeros);
  const uint32_t low_bf16 = LowZeroBf16(zeros), high_bf16 = HighZeroBf16(zeros);
  const uint32_t s = Both(scale);
  const SplitScale split = SplitToBf16(scale);
  const uint32_t sh = split.high, sl = split.low;
  const Pairs fp16 = Int4MinusZeroFp16(word, {low, high, low, high});
  const Pairs bf16 = Int4MinusZeroBf16(word, {low_bf16, high_bf16, low_bf16, high_bf16});
  const Pairs results[4] = {fp16, bf16, ScaleFp16(fp16, {s, s, s, s}),
                            ScaleBf16(bf16, {sh, sh, sh, sh}, {sl, sl, sl, sl})};
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 4; ++i) out[4 * r + i] = results[r].v[i];
  }
  uint32_t bytes[2];
  Int8MinusZeroFp16(word, ByteZeroFp16(Both(z)), bytes);
  out[16] = bytes[0], out[17] = bytes[1];
  Int8MinusZeroBf16(word, ByteZeroBf16(Both(z)), bytes);
  out[18] = bytes[0], out[19] = bytes[1];
  out[20] = Prmt(word, s, z | 0x5310);
}

// Thread = (scale, z): the words of a fixed pseudo-random sequence that starts there.
AWQD_HD uint32_t WordOf(uint32_t index) { return (index ^ index >> 15) * 2246822519u ^ index << 7; }

__global__ void Decode(uint32_t* out) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  DecodeAll(WordOf(index), index % 16, index / 16, out + static_cast<int64_t>(index) * kOutputs);
}

bool IsNan(uint32_t half) { return (half & 0x7c00) == 0x7c00; }

TEST(Decode, GivesTheBitsOfTheHostBodies) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    GTEST_SKIP() << "no CUDA device answers";
  }
  constexpr int64_t kCount = 16 * 65536;
  uint32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kCount * kOutputs * 4), cudaSuccess);
  Decode<<<kCount / 256, 256>>>(device);
  std::vector<uint32_t> got(kCount * kOutputs);
  ASSERT_EQ(cudaMemcpy(got.data(), device, got.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
  ASSERT_EQ(cudaFree(device), cudaSuccess);
  for (uint32_t index = 0; index < kCount; ++index) {
    const uint16_t scale = index / 16;
    if (IsNan(scale)) continue;  // infinities and NaNs: payloads depend on the hardware
    uint32_t want[kOutputs];
    DecodeAll(WordOf(index), index % 16, scale, want);
    for (int i = 0; i < kOutputs; ++i) {
      ASSERT_EQ(got[static_cast<int64_t>(index) * kOutputs + i], want[i])
          << "output " << i << ", word " << WordOf(index) << ", zero " << index % 16 << ", scale "
          << scale;
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
