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
// K, N and the device: a token has the same bits in every tile and batch. Limits: 65535 tiles of
// tokens; none on K and N (the layout pads them, x is zero-filled past m and k).
#pragma once

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/attributes.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/consumer.cuh"
#include "kernels/cuda/sm80/joint.cuh"
#include "kernels/cuda/sm80/ring.cuh"

namespace awqd::cuda {
namespace {

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
