// How far sums of E4M3 products are off that Hopper's tensor cores add up over all of K, and those
// that are promoted to FP32 after each step of 128, as float8_consumer.cuh does it. Prints both in
// one line, as relative errors (Frobenius) against sums in double.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/float8.h"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {
namespace {

constexpr int kRows = 512, kTokens = 32;
constexpr int kBlockRows = 64;  // of a warpgroup

// y[kRows, kTokens] = a b^T for E4M3 a [kRows, k] and b [kTokens, k]. Block = a warpgroup.
template <bool kPromotes>
__global__ __launch_bounds__(128) void Multiply(const uint8_t* a, const uint8_t* b, int64_t k,
                                                float* y) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStep = 128;
  __shared__ __align__(1024) uint4 tokens[kTokens * kStep / 16];
  const int thread = threadIdx.x, lane = thread % 32;
  const int row = blockIdx.x * kBlockRows + thread / 32 * 16 + lane / 4;
  float products[kTokens / 2], sums[kTokens / 2] = {};
  for (int64_t step = 0; step < k; step += kStep) {
    for (int i = thread; i < kTokens * 8; i += 128) {  // 128-byte swizzle
      const int token = i / 8, sixteen = i % 8;
      tokens[token * 8 + (sixteen ^ token % 8)] =
          *reinterpret_cast<const uint4*>(b + token * k + step + sixteen * 16);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    uint32_t operand[4][4];
    for (int s = 0; s < 4; ++s) {
      for (int i = 0; i < 4; ++i) {
        const int64_t at = (row + i % 2 * 8) * k + step + s * 32 + i / 2 * 16 + lane % 4 * 4;
        operand[s][i] = *reinterpret_cast<const uint32_t*>(a + at);
      }
    }
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tokens));
    const uint64_t descriptor = WholeDescriptor(TokensDescriptor(address));
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const bool adds = s > 0 || (!kPromotes && step > 0);
      WgmmaE4m3<kTokens>(products, operand[s], descriptor + s * kDescriptorStep, adds);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = kPromotes ? sums[i] + products[i] : products[i];
    __syncthreads();
  }
  for (int i = 0; i < kTokens / 2; ++i) {
    y[(row + i / 2 % 2 * 8) * kTokens + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
  }
#endif
}

// Rows of normal numbers, each with the scale that makes its largest number 448.
std::vector<uint8_t> RandomCodes(int64_t rows, int64_t k, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<uint8_t> out;
  std::vector<float> row(k);
  for (int64_t r = 0; r < rows; ++r) {
    float largest = 0;
    for (float& value : row) largest = std::fmax(largest, std::fabs(value = normal(*random)));
    for (float value : row) out.push_back(FloatToE4m3(value * kLargestE4m3 / largest));
  }
  return out;
}

std::vector<double> ExactSums(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                              int64_t k) {
  std::vector<double> out;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t token = 0; token < kTokens; ++token) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += double{E4m3ToFloat(a[row * k + i])} * E4m3ToFloat(b[token * k + i]);
      }
      out.push_back(sum);
    }
  }
  return out;
}

double Error(const float* got, const std::vector<double>& exact) {
  double off = 0, all = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    off += (got[i] - exact[i]) * (got[i] - exact[i]), all += exact[i] * exact[i];
  }
  return std::sqrt(off / all);
}

TEST(Float8SumsTest, PromotedOnesStayExact) {
  int devices = 0, major = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) GTEST_SKIP() << "no tensor cores of Hopper: compute capability " << major;
  std::mt19937 random(1);
  std::string line = "Relative error of E4M3 sums over all of K, and promoted after each 128:";
  for (int64_t k : {512, 2048, 8192, 16384}) {
    const std::vector<uint8_t> a = RandomCodes(kRows, k, &random),
                               b = RandomCodes(kTokens, k, &random);
    uint8_t *a_there = nullptr, *b_there = nullptr;
    float* y[2] = {};  // over all of K, promoted
    ASSERT_EQ(cudaMallocManaged(&a_there, a.size()), cudaSuccess);
    ASSERT_EQ(cudaMallocManaged(&b_there, b.size()), cudaSuccess);
    for (float*& each : y) ASSERT_EQ(cudaMallocManaged(&each, kRows * kTokens * 4), cudaSuccess);
    std::copy(a.begin(), a.end(), a_there);
    std::copy(b.begin(), b.end(), b_there);
    Multiply<false><<<kRows / kBlockRows, 128>>>(a_there, b_there, k, y[0]);
    Multiply<true><<<kRows / kBlockRows, 128>>>(a_there, b_there, k, y[1]);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<double> exact = ExactSums(a, b, k);
    const double over_all = Error(y[0], exact), promoted = Error(y[1], exact);
    char text[64];
    std::snprintf(text, sizeof(text), "%s K %d %.1e and %.1e", k == 512 ? "" : ",",
                  static_cast<int>(k), over_all, promoted);
    line += text;
    EXPECT_LE(promoted, 3e-4) << k;  // the tolerance of E4M3 products (tests/conformance)
    EXPECT_GT(over_all, promoted) << k;
    for (void* memory : {static_cast<void*>(a_there), static_cast<void*>(b_there),
                         static_cast<void*>(y[0]), static_cast<void*>(y[1])}) {
      EXPECT_EQ(cudaFree(memory), cudaSuccess);
    }
  }
  std::printf("%s\n", line.c_str());
}

}  // namespace
}  // namespace awqd::cuda
