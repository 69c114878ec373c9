// The reduction over the k-ranges of a tile, and the epilogue. Device code only.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm80/consumer.cuh"

namespace awqd::cuda {
namespace {

// The buffer in shared memory for the sums of the rows that this block stores: one slot for each
// k-range, [token][row]. Without a cluster it lies in the consumers' rings; in a cluster beside
// them, because other blocks may still be multiplying when the first sums come.
struct Reduction {
  uint32_t slots;  // the first k-range's
  int slot_bytes;
  int shift;   // rows() is a power of two: a division would cost more than all else here
  int blocks;  // whose k-ranges they are
  int rank;    // of this block among them

  __device__ __forceinline__ int rows() const { return 1 << shift; }
};

template <class Config>
__device__ __forceinline__ Reduction MakeReduction(const QMatmulParams& p, uint32_t rings,
                                                   int ring_bytes) {
  const int rank = static_cast<int>(blockIdx.x) & (p.splits - 1);
  Reduction out{rings, ring_bytes, Config::kRowsShift, p.splits, rank};
  if (p.splits == 1) return out;
  out.slots += Config::kConsumers * ring_bytes + kReductionBarrierBytes;
  out.shift -= __ffs(p.splits) - 1;
  out.slot_bytes = Config::kTokens * SumStride(out.rows()) * 4;
  return out;
}

// The barrier that counts the sums of a cluster; it lies before their slots.
__device__ __forceinline__ uint32_t ReductionBarrier(const Reduction& reduction) {
  return reduction.slots - kReductionBarrierBytes;
}

// Tokens of this block's tile.
template <class Config>
__device__ __forceinline__ int TokensOf(const QMatmulParams& p, int64_t first_token) {
  return static_cast<int>(min(int64_t{Config::kTokens}, p.m - first_token));
}

// Announces all sums that this block is to get.
template <class Config>
__device__ __forceinline__ void ExpectSums(const Reduction& reduction, int tokens) {
  if (threadIdx.x == 0) {
    BarrierInit(ReductionBarrier(reduction), 1);
    BarrierInitFence();
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    BarrierExpect(ReductionBarrier(reduction),
                  reduction.blocks * Config::kConsumers * tokens * reduction.rows() * 4);
  }
  ClusterArrive();
}

// Calls store(row of the tile, token of the tile, sum) for what this thread accumulated.
template <class Config, class Store>
__device__ __forceinline__ void ForEachSum(const Sums<Config>& sums, Store store) {
  const int lane = threadIdx.x % 32, row_tile = ConsumerThread() / 32;
#pragma unroll
  for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = r * mma16::kTileN + row_tile * mma16::kRowTile + lane / 4 + e / 2 * 8;
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        store(row, j * 8 + lane % 4 * 2 + e % 2, sums[r][j][e]);
      }
    }
  }
}

__device__ __forceinline__ uint32_t WordOf(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ uint32_t WordOf(int sum) { return static_cast<uint32_t>(sum); }

// Stores a consumer's sums in its slot, of a block without a cluster.
template <class Config>
__device__ __forceinline__ void StoreSums(const Reduction& reduction, int index,
                                          const Sums<Config>& sums) {
  constexpr int kStride = SumStride(Config::kRows);
  ForEachSum<Config>(sums, [&](int row, int token, auto sum) {
    StoreShared4(reduction.slots + index * reduction.slot_bytes + (token * kStride + row) * 4,
                 WordOf(sum));
  });
}

// Sends the sums of `k_range` to the blocks of the cluster that store their rows.
template <class Config>
__device__ __forceinline__ void PushSums(const Reduction& reduction, int k_range, int tokens,
                                         const Sums<Config>& sums) {
  const int stride = SumStride(reduction.rows());
  const uint32_t slot = reduction.slots + k_range * reduction.slot_bytes;
  ForEachSum<Config>(sums, [&](int row, int token, auto sum) {
    const int block = row >> reduction.shift;
    const uint32_t to = AddressInBlock(slot + (row - (block << reduction.shift)) * 4, block);
    if (token < tokens) {
      PushWord(to + token * stride * 4, WordOf(sum),
               AddressInBlock(ReductionBarrier(reduction), block));
    }
  });
}

// The first `count` of four values of columns, at most; 0 past them.
__device__ __forceinline__ float4 LoadFour(const float* at, int count) {
  return {at[0], count > 1 ? at[1] : 0, count > 2 ? at[2] : 0, count > 3 ? at[3] : 0};
}

// Elements of 32 bits. y_wide promises that N is a multiple of 4.
__device__ __forceinline__ void StoreWords(const QMatmulParams& p, int64_t token, int64_t n,
                                           int count, uint4 words) {
  uint32_t* y = static_cast<uint32_t*>(p.y) + token * p.n + n;
  if (p.y_wide) {
    *reinterpret_cast<uint4*>(y) = words;
  } else {
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) y[i] = each[i];
    }
  }
}

__device__ __forceinline__ void StoreFour(const QMatmulParams& p, int64_t token, int64_t n,
                                          int count, float4 v) {
  const int64_t at = token * p.n + n;
  if (p.y_dtype == DType::kFp32) {
    const uint4 words = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                         __float_as_uint(v.w)};
    return StoreWords(p, token, n, count, words);
  }
  const bool half = p.y_dtype == DType::kFp16;
  const uint2 bits = {half ? ToFp16x2(v.x, v.y) : ToBf16x2(v.x, v.y),
                      half ? ToFp16x2(v.z, v.w) : ToBf16x2(v.z, v.w)};
  uint16_t* y = static_cast<uint16_t*>(p.y) + at;
  if (p.y_wide) {
    *reinterpret_cast<uint2*>(y) = bits;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) y[i] = (i < 2 ? bits.x : bits.y) >> i % 2 * 16 & 0xffff;
    }
  }
}

// Four sums of neighbouring columns.
template <class Sum>
struct Four {
  Sum x, y, z, w;
};

__device__ __forceinline__ void AddWords(uint4 words, Four<float>* sums) {
  sums->x += __uint_as_float(words.x), sums->y += __uint_as_float(words.y);
  sums->z += __uint_as_float(words.z), sums->w += __uint_as_float(words.w);
}
// Modulo 2^32: partial sums may wrap where the whole sum fits.
__device__ __forceinline__ void AddWords(uint4 words, Four<uint32_t>* sums) {
  sums->x += words.x, sums->y += words.y, sums->z += words.z, sums->w += words.w;
}

// The sums of all k-ranges, added in the order of K. `at`: the address of the first.
template <class Config, class Sum>
__device__ __forceinline__ Four<Sum> AddKRanges(const Reduction& reduction, uint32_t at) {
  Four<Sum> out = {0, 0, 0, 0};
#pragma unroll 1
  for (int block = 0; block < reduction.blocks; ++block) {
#pragma unroll
    for (int i = 0; i < Config::kConsumers; ++i, at += reduction.slot_bytes) {
      AddWords(LoadShared16(at), &out);
    }
  }
  return out;
}

// FP32 sums to y: times the scales of token and columns, and the bias.
__device__ __forceinline__ void EpilogueFour(const QMatmulParams& p, int64_t token, int64_t n,
                                             int count, Four<float> v) {
  if (p.x_scale != nullptr) {
    const float s = p.x_scale[token];
    v.x *= s, v.y *= s, v.z *= s, v.w *= s;
  }
  if (p.outer != nullptr) {
    const float4 s = LoadFour(p.outer + n, count);
    v.x *= s.x * p.unit, v.y *= s.y * p.unit, v.z *= s.z * p.unit, v.w *= s.w * p.unit;
  }
  if (p.bias != nullptr) {
    const float4 b = LoadFour(p.bias + n, count);
    v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
  }
  StoreFour(p, token, n, count, {v.x, v.y, v.z, v.w});
}

// INT32 sums to y as they are, in the place of FP32.
__device__ __forceinline__ void EpilogueFour(const QMatmulParams& p, int64_t token, int64_t n,
                                             int count, Four<uint32_t> v) {
  StoreWords(p, token, n, count, {v.x, v.y, v.z, v.w});
}

// Adds the k-ranges in the order of K and stores this block's rows of the tile.
template <class Config>
__device__ __forceinline__ void ReduceAndStore(const QMatmulParams& p, const Reduction& reduction,
                                               int64_t first_row, int64_t first_token) {
  const int tokens = TokensOf<Config>(p, first_token);
  const int quads = reduction.rows() / 4;
  const int64_t first = first_row + (reduction.rank << reduction.shift);
  for (int i = threadIdx.x; i < tokens * quads; i += Config::kThreads) {
    const int token = i >> (reduction.shift - 2), row = (i & (quads - 1)) * 4;
    const int64_t n = first + row;
    if (n >= p.n) continue;
    const uint32_t at = reduction.slots + (token * SumStride(reduction.rows()) + row) * 4;
    using Sum = std::conditional_t<std::is_same_v<typename Config::Sum, int>, uint32_t, float>;
    EpilogueFour(p, first_token + token, n, static_cast<int>(min(p.n - n, int64_t{4})),
                 AddKRanges<Config, Sum>(reduction, at));
  }
}

}  // namespace
}  // namespace awqd::cuda
