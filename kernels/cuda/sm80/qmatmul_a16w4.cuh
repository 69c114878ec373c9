// The kernel of the fused product y = x W (+ bias), 16-bit activations, 4-bit weights.
//
// Layout: mma16. Weights are the A operand (rows = out features) and tokens the columns of B, so
// that a block decodes each weight once whatever the number of tokens; accumulation in fp32. Work
// split: a block of 8 warps owns 64 * kRowTiles out features x kTokens tokens over one slice of K;
// warp w takes fragment row w / 2 of each record and its half w % 2 of every 128 rows of K. A
// cp.async ring brings records and activations, kStages deep. The two halves are added through
// shared memory, the slices by the blocks of a cluster through distributed shared memory, both in a
// fixed order. A sum's order depends on K and the split alone: a token has the same bits in every
// tile and batch. Limits: none on shapes (the layout pads N and K, x is zero-filled past m and k).
#pragma once

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/qmatmul_a16w4.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;

template <int kTokens_, int kRowTiles_, int kStages_, int kBlocks_, bool kFineGroups_>
struct QMatmulConfig {
  static constexpr int kTokens = kTokens_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;
  // Groups shorter than 64: the scales change within a lane's 16 bytes.
  static constexpr bool kFineGroups = kFineGroups_;
  static constexpr int kRows = kRowTiles * mma16::kTileN;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kTokenBytes = mma16::kBlockK * 2;
  // Floats between tokens of the joined sums: 4 more than a multiple of 32 keeps fragments off each
  // other's banks.
  static constexpr int kSumStride = kRows + 4;
};

// One block's view of its slice of the problem.
template <class Config>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const QMatmulParams& p, uint32_t ring, int64_t first_tile,
                                        int64_t first_token)
      : p_(p),
        ring_(ring),
        record_bytes_(mma16::kCodesBytes + p.metas * mma16::kMetaBytes),
        first_token_(first_token),
        policy_(EvictFirstPolicy()) {
    const int64_t last = (p.n + mma16::kTileN - 1) / mma16::kTileN - 1;
    for (int r = 0; r < Config::kRowTiles; ++r) {
      // A row tile past the end repeats the last one; its results are never stored.
      const int64_t tile = min(first_tile + r, last);
      tiles_[r] = p.records + tile * p.k_blocks * record_bytes_;
    }
  }

  __device__ __forceinline__ uint32_t Stage(int slot) const {
    return ring_ +
           slot * (Config::kRowTiles * record_bytes_ + Config::kTokens * Config::kTokenBytes);
  }
  __device__ __forceinline__ int record_bytes() const { return record_bytes_; }
  __device__ __forceinline__ uint32_t Tokens(int slot) const {
    return Stage(slot) + Config::kRowTiles * record_bytes_;
  }

  // Starts the copies of one 128-row block of K into a slot.
  __device__ __forceinline__ void Load(int block, int slot) const {
    const int tid = threadIdx.x;
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint8_t* from = tiles_[r] + static_cast<int64_t>(block) * record_bytes_;
      const uint32_t to = Stage(slot) + r * record_bytes_;
      CopyAsync16(to + tid * 16, from + tid * 16, policy_);
      if (tid < p_.metas * (mma16::kMetaBytes / 16)) {
        CopyAsync16(to + mma16::kCodesBytes + tid * 16, from + mma16::kCodesBytes + tid * 16,
                    policy_);
      }
    }
    LoadTokens(block, slot);
  }

  // Brings the first records into L2 without waiting for whoever writes x.
  __device__ __forceinline__ void Prefetch(int begin, int end) const {
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint8_t* from = tiles_[r] + static_cast<int64_t>(begin) * record_bytes_;
      const int bytes = (end - begin) * record_bytes_;
      for (int at = threadIdx.x * 128; at < bytes; at += kThreads * 128) PrefetchL2(from + at);
    }
  }

 private:
  // Activations as [token][128], 16-byte chunks XOR-ed with the token so that ldmatrix meets no
  // bank twice.
  __device__ __forceinline__ void LoadTokens(int block, int slot) const {
    constexpr int kChunks = mma16::kBlockK / 8;
    const uint32_t to = Tokens(slot);
#pragma unroll
    for (int c = threadIdx.x; c < Config::kTokens * kChunks; c += kThreads) {
      const int token = c / kChunks, chunk = c % kChunks;
      const int64_t row = first_token_ + token, col = block * int64_t{mma16::kBlockK} + chunk * 8;
      const bool valid = row < p_.m && col < p_.k;
      const uint16_t* x = static_cast<const uint16_t*>(p_.x);
      CopyAsync16OrZero(to + token * Config::kTokenBytes + ((chunk ^ (token & 7)) * 16),
                        valid ? x + row * p_.x_stride + col : x, valid);
    }
  }

  const QMatmulParams& p_;
  uint32_t ring_;
  int record_bytes_;
  int64_t first_token_;
  uint64_t policy_;
  const uint8_t* tiles_[Config::kRowTiles];
};

template <class Config>
using Sums = float[Config::kRowTiles][Config::kTokenTiles][4];

// Adds one block of K that lies in shared memory: this warp's fragment row of each record times all
// tokens.
template <class Math, class Config>
__device__ __forceinline__ void Accumulate(uint32_t stage, int record_bytes, uint32_t tokens,
                                           int metas, Sums<Config>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2, row_tile = warp / 2;
  uint4 codes[Config::kRowTiles];
  typename Math::Meta meta[Config::kRowTiles];
#pragma unroll
  for (int r = 0; r < Config::kRowTiles; ++r) {
    const uint32_t record = stage + r * record_bytes;
    codes[r] = LoadShared16(record + threadIdx.x * 16);
    const int which = metas == 1 ? 0 : half;
    if (!Config::kFineGroups) {
      meta[r] = Math::Expand(
          ReadMeta(record + mma16::kCodesBytes + which * mma16::kMetaBytes, row_tile, lane));
    }
  }
  const uint32_t token_row = tokens + (lane % 8) * Config::kTokenBytes;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    Pairs a[Config::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint32_t words[2] = {pair == 0 ? codes[r].x : codes[r].z,
                                 pair == 0 ? codes[r].y : codes[r].w};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (Config::kFineGroups) {
          const int which = (half * 4 + pair * 2 + s) * metas / 8;
          const uint32_t at =
              stage + r * record_bytes + mma16::kCodesBytes + which * mma16::kMetaBytes;
          meta[r] = Math::Expand(ReadMeta(at, row_tile, lane));
        }
        a[r][s] = Math::Decode(words[s], meta[r]);
      }
    }
    const uint32_t chunk = (half * 8 + pair * 4 + lane / 8) ^ (lane % 8);
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      uint32_t b[4];
      LoadMatrices(token_row + chunk * 16 + j * 8 * Config::kTokenBytes, b);
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        Math::Mma(sums[r][j], a[r][0], b[0], b[1]);
        Math::Mma(sums[r][j], a[r][1], b[2], b[3]);
      }
    }
  }
}

// Joins the two halves of K: leaves their sum in `out`, [token][row] with stride kSumStride.
template <class Config>
__device__ __forceinline__ void JoinHalves(const Sums<Config>& sums, float* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int turn = 1; turn >= 0; --turn) {
    if (warp % 2 == turn) {
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
        for (int j = 0; j < Config::kTokenTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = r * mma16::kTileN + warp / 2 * 16 + lane / 4 + e / 2 * 8;
            float* at = out + (j * 8 + lane % 4 * 2 + e % 2) * Config::kSumStride + row;
            *at = turn == 1 ? sums[r][j][e] : sums[r][j][e] + *at;
          }
        }
      }
    }
    if (turn == 1) __syncthreads();
  }
}

__device__ __forceinline__ void StoreFour(const QMatmulParams& p, int64_t token, int64_t n,
                                          float4 v) {
  const int64_t at = token * p.n + n;
  if (p.y_dtype == DType::kFp32) {
    float* y = static_cast<float*>(p.y) + at;
    if (p.y_wide) {
      *reinterpret_cast<float4*>(y) = v;
    } else {
      y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
    }
    return;
  }
  const bool half = p.y_dtype == DType::kFp16;
  const uint2 bits = {half ? ToFp16x2(v.x, v.y) : ToBf16x2(v.x, v.y),
                      half ? ToFp16x2(v.z, v.w) : ToBf16x2(v.z, v.w)};
  uint16_t* y = static_cast<uint16_t*>(p.y) + at;
  if (p.y_wide) {
    *reinterpret_cast<uint2*>(y) = bits;
  } else {
    y[0] = bits.x & 0xffff, y[1] = bits.x >> 16, y[2] = bits.y & 0xffff, y[3] = bits.y >> 16;
  }
}

// Adds the slices of the cluster in rank order and stores this block's share of the tile.
template <class Config>
__device__ __forceinline__ void Finish(const QMatmulParams& p, uint32_t sums, int64_t first_row,
                                       int64_t first_token) {
  constexpr int kQuads = Config::kRows / 4;
  const int rank = blockIdx.x % p.split;
  const int tokens = static_cast<int>(min(int64_t{Config::kTokens}, p.m - first_token));
  for (int i = rank * kThreads + threadIdx.x; i < tokens * kQuads; i += p.split * kThreads) {
    const int token = i / kQuads, quad = i % kQuads;
    const int64_t n = first_row + quad * 4;
    if (n >= p.n) continue;
    const uint32_t at = sums + (token * Config::kSumStride + quad * 4) * 4;
    float4 v = LoadCluster16(at, 0);
    for (int slice = 1; slice < p.split; ++slice) {
      const float4 part = LoadCluster16(at, slice);
      v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
    }
    if (p.x_scale != nullptr) {
      const float s = p.x_scale[first_token + token];
      v.x *= s, v.y *= s, v.z *= s, v.w *= s;
    }
    if (p.bias != nullptr) {
      v.x += p.bias[n], v.y += p.bias[n + 1], v.z += p.bias[n + 2], v.w += p.bias[n + 3];
    }
    StoreFour(p, first_token + token, n, v);
  }
}

template <class Math, class Config>
__global__ __launch_bounds__(kThreads, Config::kBlocks) void QMatmulA16W4(
    const __grid_constant__ QMatmulParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  const int64_t group = blockIdx.x / p.split;
  const int rank = blockIdx.x % p.split;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * Config::kTokens;
  const int begin = static_cast<int>(static_cast<int64_t>(p.k_blocks) * rank / p.split);
  const int end = static_cast<int>(static_cast<int64_t>(p.k_blocks) * (rank + 1) / p.split);
  const TileLoader<Config> loader(p, SharedAddress(shared), group * Config::kRowTiles, first_token);
  loader.Prefetch(begin, min(end, begin + Config::kStages));
  WaitForEarlierKernels();

#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    if (begin + s < end) loader.Load(begin + s, s);
    CommitGroup();
  }
  Sums<Config> sums = {};
  int slot = 0;
  for (int block = begin; block < end; ++block) {
    WaitGroup<Config::kStages - 2>();
    __syncthreads();
    const int next = block + Config::kStages - 1;
    const int free_slot = slot == 0 ? Config::kStages - 1 : slot - 1;
    if (next < end) loader.Load(next, free_slot);
    CommitGroup();
    Accumulate<Math, Config>(loader.Stage(slot), loader.record_bytes(), loader.Tokens(slot),
                             p.metas, sums);
    slot = slot + 1 == Config::kStages ? 0 : slot + 1;
  }
  WaitGroup<0>();
  __syncthreads();
  JoinHalves<Config>(sums, reinterpret_cast<float*>(shared));
  ClusterBarrier();
  Finish<Config>(p, SharedAddress(shared), group * Config::kRows, first_token);
  // No block may leave while another still reads its sums.
  if (p.split > 1) ClusterBarrier();
}

// Launch attributes: a cluster per output tile, and a start that overlaps the end of the kernel
// before.
struct Attributes {
  cudaLaunchAttribute list[2];
  int count = 0;
};

inline Attributes MakeAttributes(int split, const DeviceInfo& device) {
  Attributes out;
  if (device.arch < 90) return out;
  if (split > 1) {
    out.list[out.count].id = cudaLaunchAttributeClusterDimension;
    out.list[out.count++].val.clusterDim = {static_cast<unsigned>(split), 1, 1};
  }
  out.list[out.count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  out.list[out.count++].val.programmaticStreamSerializationAllowed = 1;
  return out;
}

template <class Math, class Config>
absl::Status LaunchConfigured(const QMatmulParams& p, const MatmulVariant& variant,
                              const DeviceInfo& device, StreamView stream) {
  const Attributes attributes = MakeAttributes(p.split, device);
  const int64_t groups = CeilDiv(p.n, Config::kRows);
  LaunchConfig config{
      .grid = {static_cast<unsigned>(groups * p.split),
               static_cast<unsigned>(CeilDiv(p.m, int64_t{Config::kTokens}))},
      .block = kThreads,
      .shared_bytes = MatmulSharedBytes(variant, p.metas),
      .stream = stream,
      .attributes = attributes.count == 0 ? nullptr : attributes.list,
      .attribute_count = attributes.count,
  };
  return Launch<QMatmulA16W4<Math, Config>>("sm80/qmatmul_a16w4", config, p);
}

// The compiled tiles, one line per row of MatmulVariants().
template <class Math>
absl::Status LaunchTile(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                        StreamView stream) {
  const bool fine = p.metas > 2;
  for (const MatmulVariant& v : MatmulVariants()) {
    if (v.tokens != tile.tokens || v.row_tiles != tile.row_tiles) continue;
#define AWQD_TILE(tokens_, rows_, stages_, blocks_)                                               \
  if (v.tokens == tokens_ && v.row_tiles == rows_ && v.stages == stages_) {                       \
    return fine ? LaunchConfigured<Math, QMatmulConfig<tokens_, rows_, stages_, blocks_, true>>(  \
                      p, v, device, stream)                                                       \
                : LaunchConfigured<Math, QMatmulConfig<tokens_, rows_, stages_, blocks_, false>>( \
                      p, v, device, stream);                                                      \
  }
    AWQD_TILE(8, 1, 8, 4)
    AWQD_TILE(16, 1, 6, 4)
    AWQD_TILE(32, 2, 4, 3)
    AWQD_TILE(64, 2, 4, 2)
    AWQD_TILE(128, 2, 3, 1)
#undef AWQD_TILE
  }
  return absl::InternalError(absl::StrCat("sm80/qmatmul_a16w4: no tile of ", tile.tokens,
                                          " tokens x ", tile.row_tiles, " row tiles was compiled"));
}

}  // namespace
}  // namespace awqd::cuda
