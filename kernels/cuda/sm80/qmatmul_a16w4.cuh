// The kernel of the fused product y = x W (+ bias), 16-bit activations, 4-bit weights.
//
// Layout: mma16. Weights are the A operand (rows = out features) and tokens the columns of B, so
// that a block decodes each weight once whatever the number of tokens; accumulation in fp32. Work
// split: a block owns 64 * kRowTiles out features x kTokens tokens. Each of its kGroups groups of 4
// warps takes a chain of K (common/chains.h) with a cp.async ring and a barrier of its own, so that
// one decodes while another waits; warp w of a group takes fragment row w of each record. Chains
// are added from the first to the last, by a block that stands alone for the whole tile, by the
// blocks of a cluster each for a share of its rows: whoever has a sum stores it into the shared
// memory of the block that adds it. A sum's order depends on the chains alone, and they on
// K, N and the device: a token has the same bits in every tile and batch. Limits: none on shapes
// (the layout pads N and K, x is zero-filled past m and k).
#pragma once

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/attributes.h"
#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/qmatmul_a16w4.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kGroupThreads = 128;

template <int kTokens_, int kRowTiles_, int kGroups_, int kStages_, int kBlocks_, int kMetas_>
struct QMatmulConfig {
  static constexpr int kTokens = kTokens_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;
  // Per record: 1, 2, or at most 8, which a call tells.
  static constexpr int kMetas = kMetas_;
  // Groups of K shorter than 64: the scales change within a lane's 16 bytes.
  static constexpr bool kFineGroups = kMetas > 2;
  static constexpr int kRows = kRowTiles * mma16::kTileN;
  static constexpr int kRowsShift = kRowTiles == 1 ? 6 : 7;
  static_assert(kRows == 1 << kRowsShift);
  static constexpr int kTokenTiles = kTokens / 8;
  // Halves of a record at a time: both, unless their codes would not fit the registers.
  static constexpr int kHalves = kTokens * kRowTiles < 96 ? 2 : 1;
  static constexpr int kTokenBytes = mma16::kBlockK * 2;
  static_assert(kStages * (kRowTiles * mma16::kCodesBytes + kTokens * kTokenBytes) >=
                    4 * kTokens * SumStride(kRows),
                "a block that stands alone joins its sums in the rings' memory");
};

__device__ __forceinline__ int GroupThread() { return threadIdx.x % kGroupThreads; }

// Bytes of one slot of the ring: the records of all row tiles, then the tokens.
template <class Config>
struct Slot {
  int record_bytes;

  __device__ __forceinline__ explicit Slot(int metas)
      : record_bytes(mma16::kCodesBytes +
                     (Config::kFineGroups ? metas : Config::kMetas) * mma16::kMetaBytes) {}
  __device__ __forceinline__ int metas() const {
    return (record_bytes - mma16::kCodesBytes) / mma16::kMetaBytes;
  }
  __device__ __forceinline__ int tokens() const { return Config::kRowTiles * record_bytes; }
  __device__ __forceinline__ int bytes() const {
    return tokens() + Config::kTokens * Config::kTokenBytes;
  }
};

// Walks around the ring. Whoever does keeps addresses that move on by addition, because the
// compiler would otherwise compute them anew in every step, which costs more than the decode.
template <class Config>
class Walk {
 public:
  // Bytes from this slot to the next.
  __device__ __forceinline__ int Advance(const Slot<Config>& slot) {
    const bool wrap = ++at_ == Config::kStages;
    if (wrap) at_ = 0;
    return wrap ? (1 - Config::kStages) * slot.bytes() : slot.bytes();
  }

 private:
  int at_ = 0;
};

// Feeds the ring with consecutive 128-row blocks of K.
template <class Config>
class TileLoader {
 public:
  // `first_block` of `tile` (of 64 out features) and `first_token` are where the ring starts.
  __device__ __forceinline__ TileLoader(const QMatmulParams& p, const Slot<Config>& slot,
                                        uint32_t ring, int64_t tile, int64_t first_token,
                                        int64_t first_block)
      : slot_(slot), codes_(ring + GroupThread() * 16), x_step_(kTokensPerStep * p.x_stride) {
    const int64_t last = (p.n + mma16::kTileN - 1) / mma16::kTileN - 1;
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      // A row tile past the end repeats the last one; its results are never stored.
      const int64_t record = min(tile + r, last) * p.k_blocks + first_block;
      weights_[r] = p.records + record * slot.record_bytes + GroupThread() * 16;
    }
    const int token = GroupThread() / kChunks, chunk = GroupThread() % kChunks;
    // 16-byte chunks are XOR-ed with the token so that ldmatrix meets no bank twice.
    tokens_ = ring + slot.tokens() + token * Config::kTokenBytes + ((chunk ^ (token & 7)) * 16);
    const int64_t col = first_block * mma16::kBlockK + chunk * 8;
    k_left_ = static_cast<int>(p.k - col);
    const int64_t left = p.m - first_token - token;
    tokens_left_ = Keep(static_cast<int>(min(left, int64_t{Config::kTokens})));
    x_ = static_cast<const uint16_t*>(p.x);
    if (left > 0) x_ += (first_token + token) * p.x_stride + col;
  }

  // Starts the copies of the next block into the next slot.
  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint32_t to = codes_ + r * slot_.record_bytes;
#pragma unroll
      for (int at = 0; at < mma16::kCodesBytes; at += kGroupThreads * 16) {
        CopyAsync16(to + at, weights_[r] + at);
      }
      if (GroupThread() < slot_.metas() * (mma16::kMetaBytes / 16)) {
        CopyAsync16(to + mma16::kCodesBytes, weights_[r] + mma16::kCodesBytes);
      }
      weights_[r] += slot_.record_bytes;
    }
    LoadTokens();
    const int next = walk_.Advance(slot_);
    codes_ += next, tokens_ += next;
  }

  // Brings the first records into L2 without waiting for whoever writes x.
  __device__ __forceinline__ void Prefetch(int blocks) const {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint8_t* from = weights_[r] - GroupThread() * 16;
      for (int at = GroupThread() * 128; at < blocks * slot_.record_bytes;
           at += kGroupThreads * 128) {
        PrefetchL2(from + at);
      }
    }
  }

 private:
  static constexpr int kChunks = mma16::kBlockK / 8;
  static constexpr int kTokensPerStep = kGroupThreads / kChunks;

  // Activations as [token][128]; zeros past m and k.
  __device__ __forceinline__ void LoadTokens() {
#pragma unroll
    for (int s = 0; s < (Config::kTokens + kTokensPerStep - 1) / kTokensPerStep; ++s) {
      const int left = Config::kTokens - s * kTokensPerStep;
      if (left < kTokensPerStep && GroupThread() >= left * kChunks) break;
      const bool valid = k_left_ > 0 && tokens_left_ > s * kTokensPerStep;
      CopyAsync16OrZero(tokens_ + s * kTokensPerStep * Config::kTokenBytes, x_ + s * x_step_,
                        valid);
    }
    k_left_ -= mma16::kBlockK;
    x_ += mma16::kBlockK;
  }

  const Slot<Config> slot_;
  Walk<Config> walk_;
  uint32_t codes_;   // where this thread's share of the next records goes
  uint32_t tokens_;  // and of their tokens
  int k_left_;
  int tokens_left_;
  const uint16_t* x_;
  const int64_t x_step_;
  const uint8_t* weights_[Config::kRowTiles];
};

template <class Config>
using Sums = float[Config::kRowTiles][Config::kTokenTiles][4];

// Multiplies what lies in the ring, slot by slot: this warp's fragment row of each record times all
// tokens.
template <class Math, class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Slot<Config>& slot, uint32_t ring) : slot_(slot) {
    const int lane = threadIdx.x % 32, row_tile = GroupThread() / 32;
    codes_ = ring + row_tile * 2 * mma16::kUnitBytes + lane * 16;
    scales_ = ScalesAddress(ring + mma16::kCodesBytes, row_tile, lane);
    zeros_ = ZerosAddress(ring + mma16::kCodesBytes, row_tile, lane);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int chunk = (pair * 4 + lane / 8) ^ (lane % 8);
      tokens_[pair] = ring + slot.tokens() + lane % 8 * Config::kTokenBytes + chunk * 16;
    }
  }

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
#pragma unroll Config::kHalves
    for (int half = 0; half < 2; ++half) AccumulateHalf(half, sums);
    const int next = walk_.Advance(slot_);
    codes_ += next, scales_ += next, zeros_ += next, tokens_[0] += next, tokens_[1] += next;
  }

 private:
  __device__ __forceinline__ typename Math::Meta Meta(int r, int which) const {
    const int offset = r * slot_.record_bytes + which * mma16::kMetaBytes;
    return Math::Expand({LoadShared4(scales_ + offset), LoadShared1(zeros_ + offset)});
  }

  // Half a record of K, 64 rows.
  __device__ __forceinline__ void AccumulateHalf(int half, Sums<Config>& sums) {
    uint4 codes[Config::kRowTiles];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      codes[r] = LoadShared16(codes_ + r * slot_.record_bytes + half * mma16::kUnitBytes);
      if (Config::kMetas == 2 || (Config::kMetas == 1 && half == 0)) meta_[r] = Meta(r, half);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Pairs a[Config::kRowTiles][2];
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        const uint32_t words[2] = {pair == 0 ? codes[r].x : codes[r].z,
                                   pair == 0 ? codes[r].y : codes[r].w};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          if (Config::kFineGroups)
            meta_[r] = Meta(r, (half * 4 + pair * 2 + s) * slot_.metas() / 8);
          a[r][s] = Math::Decode(words[s], meta_[r]);
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        uint32_t b[4];
        LoadMatrices(tokens_[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
          Math::Mma(sums[r][j], a[r][0], b[0], b[1]);
          Math::Mma(sums[r][j], a[r][1], b[2], b[3]);
        }
      }
    }
  }

  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;

  const Slot<Config> slot_;
  Walk<Config> walk_;
  uint32_t codes_;
  uint32_t scales_;
  uint32_t zeros_;
  uint32_t tokens_[2];  // of the first and the second 32 of 64 rows of K
  typename Math::Meta meta_[Config::kRowTiles];
};

// Where the chains' sums of the rows that this block stores meet in its shared memory: one slot per
// chain, [token][row]. Alone they lie in the groups' rings; in a cluster beside them, because the
// others may still be multiplying when the first sums come.
struct Joint {
  uint32_t slots;  // the first chain's
  int slot_bytes;
  int shift;   // rows() is a power of two: a division would cost more than all else here
  int blocks;  // whose chains they are
  int rank;    // of this block among them

  __device__ __forceinline__ int rows() const { return 1 << shift; }
};

template <class Config>
__device__ __forceinline__ Joint JointOf(const QMatmulParams& p, uint32_t rings, int ring_bytes) {
  const int rank = static_cast<int>(blockIdx.x) & (p.split - 1);
  Joint out{rings, ring_bytes, Config::kRowsShift, p.split, rank};
  if (p.split == 1) return out;
  out.slots += Config::kGroups * ring_bytes + kJointBarrierBytes;
  out.shift -= __ffs(p.split) - 1;
  out.slot_bytes = Config::kTokens * SumStride(out.rows()) * 4;
  return out;
}

// The barrier that counts the sums of a cluster; it lies before their slots.
__device__ __forceinline__ uint32_t JointBarrier(const Joint& joint) {
  return joint.slots - kJointBarrierBytes;
}

// Tokens of this block's tile.
template <class Config>
__device__ __forceinline__ int TokensOf(const QMatmulParams& p, int64_t first_token) {
  return static_cast<int>(min(int64_t{Config::kTokens}, p.m - first_token));
}

// Announces all sums that this block is to get.
template <class Config>
__device__ __forceinline__ void ExpectSums(const Joint& joint, int tokens) {
  if (threadIdx.x == 0) {
    BarrierInit(JointBarrier(joint), 1);
    BarrierInitFence();
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    BarrierExpect(JointBarrier(joint), joint.blocks * Config::kGroups * tokens * joint.rows() * 4);
  }
  ClusterArrive();
}

// Calls store(row of the tile, token of the tile, sum) for what this thread accumulated.
template <class Config, class Store>
__device__ __forceinline__ void ForEachSum(const Sums<Config>& sums, Store store) {
  const int lane = threadIdx.x % 32, row_tile = GroupThread() / 32;
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

// Leaves the group's sums in its slot of this block, which stands alone.
template <class Config>
__device__ __forceinline__ void StoreSums(const Joint& joint, int group, const Sums<Config>& sums) {
  constexpr int kStride = SumStride(Config::kRows);
  ForEachSum<Config>(sums, [&](int row, int token, float sum) {
    StoreShared4(joint.slots + group * joint.slot_bytes + (token * kStride + row) * 4,
                 __float_as_uint(sum));
  });
}

// Sends the sums of `chain` to the blocks of the cluster that store their rows.
template <class Config>
__device__ __forceinline__ void PushSums(const Joint& joint, int chain, int tokens,
                                         const Sums<Config>& sums) {
  const int stride = SumStride(joint.rows());
  const uint32_t slot = joint.slots + chain * joint.slot_bytes;
  ForEachSum<Config>(sums, [&](int row, int token, float sum) {
    const int block = row >> joint.shift;
    const uint32_t to = AddressInBlock(slot + (row - (block << joint.shift)) * 4, block);
    if (token < tokens) {
      PushFloat(to + token * stride * 4, sum, AddressInBlock(JointBarrier(joint), block));
    }
  });
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

// Adds the chains in the order of K and stores this block's rows of the tile.
template <class Config>
__device__ __forceinline__ void Finish(const QMatmulParams& p, const Joint& joint,
                                       int64_t first_row, int64_t first_token) {
  const int tokens = TokensOf<Config>(p, first_token);
  const int quads = joint.rows() / 4;
  const int64_t first = first_row + (joint.rank << joint.shift);
  for (int i = threadIdx.x; i < tokens * quads; i += Config::kThreads) {
    const int token = i >> (joint.shift - 2), row = (i & (quads - 1)) * 4;
    const int64_t n = first + row;
    if (n >= p.n) continue;
    uint32_t at = joint.slots + (token * SumStride(joint.rows()) + row) * 4;
    float4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int block = 0; block < joint.blocks; ++block) {
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group, at += joint.slot_bytes) {
        const uint4 part = LoadShared16(at);
        v.x += __uint_as_float(part.x), v.y += __uint_as_float(part.y);
        v.z += __uint_as_float(part.z), v.w += __uint_as_float(part.w);
      }
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
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void QMatmulA16W4(
    const __grid_constant__ QMatmulParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  const int64_t tile = blockIdx.x / p.split;
  // The same for a whole warp, and known to be.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  const int chain = blockIdx.x % p.split * Config::kGroups + group;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * Config::kTokens;
  const int begin = min(chain * p.chain_blocks, p.k_blocks);
  const int end = min(begin + p.chain_blocks, p.k_blocks);
  const Slot<Config> slot(p.metas);
  const int ring_bytes = Config::kStages * slot.bytes();
  const uint32_t ring = SharedAddress(shared) + group * ring_bytes;
  const Joint joint = JointOf<Config>(p, SharedAddress(shared), ring_bytes);
  const int tokens = TokensOf<Config>(p, first_token);
  if (p.split > 1) ExpectSums<Config>(joint, tokens);
  TileLoader<Config> loader(p, slot, ring, tile * Config::kRowTiles, first_token, begin);
  loader.Prefetch(min(end - begin, min(Config::kStages, p.prefetch)));
  WaitForEarlierKernels();

#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    if (begin + s < end) loader.Load();
    CommitGroup();
  }
  Sums<Config> sums = {};
  Consumer<Math, Config> consumer(slot, ring);
  for (int block = begin; block < end; ++block) {
    WaitGroup<Config::kStages - 2>();
    NamedBarrier<kGroupThreads>(1 + group);
    if (block + Config::kStages - 1 < end) loader.Load();
    CommitGroup();
    consumer.Accumulate(sums);
  }
  if (p.split > 1) {
    ClusterWait();
    PushSums<Config>(joint, chain, tokens, sums);
    BarrierWait(JointBarrier(joint), 0);
  } else {
    // Other warps of the group may still read the ring.
    WaitGroup<0>();
    NamedBarrier<kGroupThreads>(1 + group);
    StoreSums<Config>(joint, group, sums);
    __syncthreads();
  }
  Finish<Config>(p, joint, tile * Config::kRows, first_token);
}

template <class Math, class Config>
absl::Status LaunchConfigured(const QMatmulParams& p, const MatmulVariant& variant,
                              const DeviceInfo& device, StreamView stream) {
  const Attributes attributes = OverlappedLaunch(device, p.split);
  const int64_t columns = CeilDiv(p.n, Config::kRows) * p.split;
  const int64_t rows = CeilDiv(p.m, int64_t{Config::kTokens});
  LaunchConfig config{
      .grid = {static_cast<unsigned>(columns), static_cast<unsigned>(rows)},
      .block = Config::kThreads,
      .shared_bytes = MatmulLaunchBytes(variant, p.metas, columns * rows, p.split, device),
      .stream = stream,
      .attributes = attributes.list,
      .attribute_count = attributes.count,
  };
  return Launch<QMatmulA16W4<Math, Config>>("sm80/qmatmul_a16w4", config, p);
}

template <class Math, int... kTile>
absl::Status LaunchMetas(const QMatmulParams& p, const MatmulVariant& variant,
                         const DeviceInfo& device, StreamView stream) {
  if (p.metas == 1) {
    return LaunchConfigured<Math, QMatmulConfig<kTile..., 1>>(p, variant, device, stream);
  }
  if (p.metas == 2) {
    return LaunchConfigured<Math, QMatmulConfig<kTile..., 2>>(p, variant, device, stream);
  }
  return LaunchConfigured<Math, QMatmulConfig<kTile..., 8>>(p, variant, device, stream);
}

// The compiled tiles, one line per row of MatmulVariants().
template <class Math>
absl::Status LaunchTile(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                        StreamView stream) {
  for (const MatmulVariant& v : MatmulVariants()) {
    if (v.tokens != tile.tokens || v.row_tiles != tile.row_tiles ||
        v.groups != tile.chains.groups) {
      continue;
    }
#define AWQD_TILE(...) \
  if (MatmulVariant{__VA_ARGS__} == v) return LaunchMetas<Math, __VA_ARGS__>(p, v, device, stream);
    AWQD_TILE(8, 1, 2, 4, 2)
    AWQD_TILE(8, 2, 2, 3, 3)
    AWQD_TILE(8, 1, 4, 4, 1)
    AWQD_TILE(16, 1, 2, 3, 4)
    AWQD_TILE(16, 2, 2, 3, 2)
    AWQD_TILE(16, 1, 4, 3, 1)
    AWQD_TILE(24, 1, 2, 3, 3)
    AWQD_TILE(24, 2, 2, 3, 2)
    AWQD_TILE(24, 1, 4, 3, 1)
    AWQD_TILE(32, 1, 2, 3, 3)
    AWQD_TILE(32, 2, 2, 3, 2)
    AWQD_TILE(32, 1, 4, 3, 1)
    AWQD_TILE(48, 1, 2, 3, 2)
    AWQD_TILE(48, 2, 2, 2, 2)
    AWQD_TILE(48, 1, 4, 3, 1)
    AWQD_TILE(64, 1, 2, 2, 2)
    AWQD_TILE(64, 2, 2, 2, 2)
    AWQD_TILE(64, 1, 4, 2, 1)
    AWQD_TILE(96, 1, 2, 2, 1)
    AWQD_TILE(96, 2, 2, 2, 1)
    AWQD_TILE(128, 1, 2, 2, 1)
    AWQD_TILE(128, 2, 2, 2, 1)
#undef AWQD_TILE
  }
  return absl::InternalError(absl::StrCat("sm80/qmatmul_a16w4: no tile of ", tile.tokens,
                                          " tokens x ", tile.row_tiles, " row tiles x ",
                                          tile.chains.groups, " groups was compiled"));
}

}  // namespace
}  // namespace awqd::cuda
