// The kernel of the fused product y = x W (+ bias) of activations of 16 bits, or of INT8 and
// integer codes, of which it also gives the sums themselves.
//
// Layout: mma16. Weights are the A operand (rows = out features) and tokens the columns of B, so
// that a block decodes each weight once whatever the number of tokens; accumulation in FP32, or of
// integers in INT32, exact. Work split: a block owns 64 * kRowTiles out features x kTokens tokens.
// Each of its kConsumers consumers of 4 warps takes a k-range of K (common/fixed_order.h) with a
// cp.async ring and a barrier of its own, so that one decodes while another waits; warp w of a
// consumer takes fragment row w of each record. K-ranges are added from the first to the last: by
// the block itself, or in a cluster by each block for some of the rows, to whose shared memory the
// others send their sums. A sum's order depends on the k-ranges alone, and they on K, N and the
// device: a token has the same bits in every tile. Limits: none on m, n and k; loads read zeros
// past m and k, and results past m and n are not stored.
#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/consumer.cuh"
#include "kernels/cuda/sm80/float8_consumer.cuh"
#include "kernels/cuda/sm80/float_consumer.cuh"
#include "kernels/cuda/sm80/integer_consumer.cuh"
#include "kernels/cuda/sm80/reduction.cuh"
#include "kernels/cuda/sm80/ring.cuh"

namespace awqd::cuda {
namespace {

// In messages.
constexpr absl::string_view kName = "the fused product of sm80";

// y from a row on.
__device__ __forceinline__ void* ShiftRows(const QMatmulParams& p, int64_t rows) {
  const int64_t elements = rows * p.n;
  return static_cast<char*>(p.y) + elements * (p.y_dtype == DType::kFp32 ? 4 : 2);
}

// The part of a product that this block computes. `first_token`: the first of its tile.
template <class Config, bool kGrouped>
__device__ __forceinline__ QMatmulParams ParamsOfBlock(const QMatmulParams& all,
                                                       int64_t* first_token) {
  QMatmulParams p = all;
  if constexpr (kGrouped) {
    const GroupedTile tile = all.tiles[blockIdx.y];
    p.records = tile.records, p.outer = tile.outer, p.bias = tile.bias;
    p.m = tile.end_token;
    p.y = ShiftRows(all, tile.y_shift);
    *first_token = tile.first_token;
  } else {
    *first_token = static_cast<int64_t>(blockIdx.y) * Config::kTokens;
  }
  return p;
}

template <class Math, class Config, bool kGrouped = false>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void FusedProduct(
    const __grid_constant__ QMatmulParams params) {
  if constexpr (!Config::kFits) return;
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  int64_t first_token;
  const QMatmulParams p = ParamsOfBlock<Config, kGrouped>(params, &first_token);
  if constexpr (kGrouped) {
    if (first_token >= p.m) {
      WaitForEarlierKernels();  // a later kernel waits for this one alone
      return;
    }
  }
  const int64_t tile = blockIdx.x / p.splits;
  // The number of this thread's consumer. Through a shuffle, so that the compiler knows that a
  // whole warp has the same.
  const int index = __shfl_sync(0xffffffffu, threadIdx.x / kConsumerThreads, 0);
  const int k_range = blockIdx.x % p.splits * Config::kConsumers + index;
  const int begin = min(k_range * p.k_range_blocks, p.k_blocks);
  const int end = min(begin + p.k_range_blocks, p.k_blocks);
  const Slot<Config> slot(p.metas);
  const int ring_bytes = slot.ring_bytes();
  const uint32_t rings = SharedAddress(shared) + PairTableBytes(Config::Record::kCode);
  const uint32_t ring = rings + index * ring_bytes;
  const Reduction reduction = MakeReduction<Config>(p, rings, ring_bytes);
  const int tokens = TokensOf<Config>(p, first_token);
  if (p.splits > 1) ExpectSums<Config>(reduction, tokens);
  TileLoader<Config> loader(p, slot, ring, tile * Config::kRowTiles, first_token, begin);
  loader.Prefetch(min(end - begin, min(Config::kStages, p.prefetch)));
  if constexpr (Config::Record::kCode == CodeKind::kTable) FillPairTable<Math::kBf16>(p.table);
  WaitForEarlierKernels();

#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    if (begin + s < end) loader.Load();
    loader.Land();
    CommitGroup();
  }
  Sums<Config> sums = {};
  Consumer<Math, Config> consumer(p, slot, ring);
  for (int block = begin; block < end; ++block) {
    WaitGroup<Config::kStages - 2>();
    NamedBarrier<kConsumerThreads>(1 + index);
    if (block + Config::kStages - 1 < end) loader.Load();
    CommitGroup();
    consumer.Accumulate(sums);
    loader.Land();
  }
  if (p.splits > 1) {
    ClusterWait();
    PushSums<Config>(reduction, k_range, tokens, sums);
    BarrierWait(ReductionBarrier(reduction), 0);
  } else {
    // Other warps of the consumer may still read the ring.
    WaitGroup<0>();
    NamedBarrier<kConsumerThreads>(1 + index);
    StoreSums<Config>(reduction, index, sums);
    __syncthreads();
  }
  ReduceAndStore<Config>(p, reduction, tile * Config::kRows, first_token);
}

template <class Math, class Config, bool kGrouped>
absl::Status LaunchConfigured(const QMatmulParams& p, const MatmulVariant& variant,
                              const DeviceInfo& device, StreamView stream) {
  const int64_t columns = CeilDiv(p.n, Config::kRows) * p.splits;
  const int64_t rows = kGrouped ? p.tile_count : CeilDiv(p.m, int64_t{Config::kTokens});
  using Record = typename Config::Record;
  const int record_bytes = mma16::RecordBytes(Record::kBits, p.metas, Record::kMetaKind);
  LaunchConfig config{
      .grid = {static_cast<unsigned>(columns), static_cast<unsigned>(rows)},
      .block = Config::kThreads,
      .shared_bytes =
          MatmulLaunchBytes(variant,
                            {record_bytes, sizeof(typename Config::X),
                             Config::kScalesBytes / Config::kTokens, PairTableBytes(Record::kCode)},
                            columns * rows, p.splits, device),
      .stream = stream,
      .attributes = OverlappedLaunch(device, p.splits),
  };
  return Launch<FusedProduct<Math, Config, kGrouped>>(kName, config, p);
}

using Launcher = absl::Status (*)(const QMatmulParams&, const MatmulVariant&, const DeviceInfo&,
                                  StreamView);

// Tiles of more tokens than kMostTokens are not compiled.
template <class Math, class Record, class Sum, bool kGrouped, int kMostTokens, size_t... kIndex>
absl::Status LaunchTile(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                        StreamView stream, std::index_sequence<kIndex...>) {
  using X = typename Math::X;
  constexpr auto& tiles = TilesOf<Record, sizeof(X) == 1, kGrouped>();
  const auto is_tile = [&](const MatmulVariant& v) {
    return v.tokens == tile.tokens && v.row_tiles == tile.row_tiles &&
           v.k_ranges == tile.k_ranges.per_block;
  };
  Launcher launch = nullptr;
  const MatmulVariant* variant = nullptr;
  const auto consider = [&]<size_t kAt>(std::integral_constant<size_t, kAt>) {
    if constexpr (tiles[kAt].tokens <= kMostTokens) {
      if (!is_tile(tiles[kAt])) return;
      launch = LaunchConfigured<Math, QMatmulConfig<Record, tiles[kAt], X, Sum>, kGrouped>;
      variant = &tiles[kAt];
    }
  };
  (consider(std::integral_constant<size_t, kIndex>()), ...);
  if (launch != nullptr) return launch(p, *variant, device, stream);
  return absl::InternalError(absl::StrCat(kName, ": no tile of ", tile.tokens, " tokens x ",
                                          tile.row_tiles, " row tiles x ", tile.k_ranges.per_block,
                                          " k-ranges in a block was compiled"));
}

// The arithmetic of activations of 16 bits. The scales of 4-bit codes multiply the weights, as in
// sm90a/qmatmul_a16_chained, which must give the same bits. No other row keeps the order of sums of
// other widths, so their scales multiply the sums of a group where a record lies in one.
template <DType kX, class Record>
using HalfMathOf =
    std::conditional_t<Record::kBits != 4 && Record::kMetas == 1,
                       ScaledSumsMath<Record, kX == DType::kBf16>,
                       std::conditional_t<kX == DType::kBf16, Bf16Math<Record>, Fp16Math<Record>>>;
template <DType kX, class Record, class Sum>
using IntegerMathOf =
    std::conditional_t<kX == DType::kInt8, Int8Math<Record, Sum>, HalfMathOf<kX, Record>>;
template <DType kX, class Record>
using FloatMathOf =
    std::conditional_t<kX == DType::kE4m3, Float8Math<Record>, FloatMath<kX, Record>>;
template <DType kX, class Record, class Sum>
using MathOf = std::conditional_t<kX == DType::kInt8 ||
                                      (Record::kCode == CodeKind::kUnsigned && !Record::kReal),
                                  IntegerMathOf<kX, Record, Sum>, FloatMathOf<kX, Record>>;

constexpr int kAnyTokens = 1 << 30;
template <DType kX, class Record, class Sum, bool kGrouped = false,
          class Math = MathOf<kX, Record, Sum>, int kMostTokens = kAnyTokens>
absl::Status LaunchRecords(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                           StreamView stream) {
  constexpr size_t kCount = std::size(TilesOf<Record, SizeOf(kX) == 1, kGrouped>());
  return LaunchTile<Math, Record, Sum, kGrouped, kMostTokens>(p, tile, device, stream,
                                                              std::make_index_sequence<kCount>());
}

// Where a kernel for these records is compiled, which CompiledMetas says.
template <DType kX, CodeKind kCode, int kBits, DType kSum, bool kReal, bool kGrouped, int kMetas>
absl::Status LaunchMetas(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                         StreamView stream) {
  // E4M3 activations need one scale for 128 of K, or scales that E4M3 holds.
  constexpr bool kServes =
      kX != DType::kE4m3 || (kCode == CodeKind::kE2m1 ? kMetas == 4 : kMetas <= 1);
  if constexpr (kServes &&
                CompiledMetas(kCode, kReal, kBits, kMetas, kSum == DType::kInt32) == kMetas) {
    using Sum = std::conditional_t<kSum == DType::kInt32, int, float>;
    return LaunchRecords<kX, Record<kBits, kMetas, kCode, kReal>, Sum, kGrouped>(p, tile, device,
                                                                                 stream);
  }
  return absl::InternalError(absl::StrCat(kName, ": no kernel for records of ", kBits, " bits and ",
                                          kMetas, " metas was compiled"));
}

}  // namespace

template <DType kX, CodeKind kCode, int kBits, DType kSum, bool kReal, bool kGrouped>
absl::Status LaunchQMatmul(const QMatmulParams& p, const MatmulTile& tile, const DeviceInfo& device,
                           StreamView stream) {
  switch (CompiledMetas(kCode, kReal, kBits, p.metas, kSum == DType::kInt32)) {
    case 0:
      return LaunchMetas<kX, kCode, kBits, kSum, kReal, kGrouped, 0>(p, tile, device, stream);
    case 1:
      return LaunchMetas<kX, kCode, kBits, kSum, kReal, kGrouped, 1>(p, tile, device, stream);
    case 2:
      return LaunchMetas<kX, kCode, kBits, kSum, kReal, kGrouped, 2>(p, tile, device, stream);
    case 4:
      return LaunchMetas<kX, kCode, kBits, kSum, kReal, kGrouped, 4>(p, tile, device, stream);
    default:
      return LaunchMetas<kX, kCode, kBits, kSum, kReal, kGrouped, 8>(p, tile, device, stream);
  }
}

template <DType kX, class Record>
absl::Status LaunchFewTokens(const QMatmulParams& p, const MatmulTile& tile,
                             const DeviceInfo& device, StreamView stream) {
  return LaunchRecords<kX, Record, float, false, ScaledSumsMath<Record, kX == DType::kBf16>,
                       kMostTokensOfScaledSums>(p, tile, device, stream);
}

template <DType kX, int kBits>
absl::Status LaunchScaledSums(const QMatmulParams& p, const MatmulTile& tile,
                              const DeviceInfo& device, StreamView stream) {
  return p.metas == 1 ? LaunchFewTokens<kX, Record<kBits, 1>>(p, tile, device, stream)
                      : LaunchFewTokens<kX, Record<kBits, 2>>(p, tile, device, stream);
}

}  // namespace awqd::cuda
