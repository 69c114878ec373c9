// Row sm90a/vectors_matmul: products of vector codes with more tokens than sm80/vectors.cu is made
// for.
//
// Computes: y = x @ W + bias with FP32 sums. W is rounded to the type of x, as Dequantize rounds it.
// Weight layout: vectors. A consumer decodes a round of a record, 64 columns x 128 of K, to shared
// memory as wgmma's A operand. Tokens are the B operand, which the copy engine brings.
// Work split: a tile is 128 columns, 64 for each of two consumers, by kTokens tokens. Where tiles do
// not fill the GPU they are split along K; the last block of a tile adds the splits' sums in order.
// Limits: none.
#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/vector_tiles.cuh"
#include "kernels/cuda/core/counters.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {
namespace {

constexpr int kRoundK = kVectorBlock / 2;
constexpr int kStepK = 64;  // of the tokens that one copy brings
constexpr int kConsumers = 2;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = kConsumerThreads + 128;  // one of which brings tokens
constexpr int kTileColumns = vectors::kRecordColumns * kConsumers;

// Fewer tokens take less time by sm80/vectors.cu, more by Dequantize and cuBLASLt. H200, 2026-12-01.
constexpr int64_t kLeastTokens = 33, kDenseFrom = 2049;

struct VectorsParams {
  CUtensorMap x;  // [m, k], boxes of 64 of k x kTokens
  const uint8_t* codes;
  const float* outer;    // [n], null: 1
  const float* x_scale;  // [m], null: 1
  const float* bias;     // [n], null: 0
  void* y;
  DType y_type;
  int64_t m, n;
  int rounds;  // of K
  int column_tiles, token_tiles, splits;
  // Where splits > 1: [tiles, splits, a tile in the order of fragments], and words that are zero.
  float* partials;
  uint32_t* counters;
};

template <int kTokens>
struct Shape {
  static constexpr int kBlocks = kTokens <= 64 ? 2 : 1;  // of a multiprocessor
  static constexpr int kStages = kTokens == 128 ? 6 : 4;
  static constexpr int kStageBytes = kTokens * kStepK * 2;
  static constexpr int kSums = kTokens / 2;  // of a thread
  // Registers of a thread of consumers, and of the others, which give them.
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 104 : 232;
  static constexpr int kProducerRegisters = kBlocks == 2 ? 24 : 40;
};

// Tokens, then two rounds of each consumer, then barriers, then the codebook.
template <int kTokens>
struct SharedPlaces {
  static constexpr int kWeights = Shape<kTokens>::kStages * Shape<kTokens>::kStageBytes;
  static constexpr int kHalfBytes = vectors::kRecordColumns * kStepK * 2;
  static constexpr int kRoundBytes = 2 * kHalfBytes;
  static constexpr int kBarriers = kWeights + kConsumers * 2 * kRoundBytes;
  static constexpr int kEntries = kBarriers + Shape<kTokens>::kStages * 16;
};

// A stage of the ring of tokens.
template <int kTokens>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == Shape<kTokens>::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t Full(uint32_t shared) const {
    return shared + SharedPlaces<kTokens>::kBarriers + stage * 16;
  }
  __device__ __forceinline__ uint32_t Empty(uint32_t shared) const { return Full(shared) + 8; }
  __device__ __forceinline__ uint32_t Tokens(uint32_t shared) const {
    return shared + stage * Shape<kTokens>::kStageBytes;
  }
};

// A block's share of the work.
struct Work {
  int tile;                    // of all
  int columns, tokens, split;  // tiles along N and M
  int first, end;              // rounds

  __device__ __forceinline__ explicit Work(const VectorsParams& p) {
    tile = blockIdx.x / p.splits;
    split = blockIdx.x % p.splits;
    // Tiles of tokens change fastest: those that are computed at the same time share weights in L2.
    columns = tile / p.token_tiles;
    tokens = tile % p.token_tiles;
    first = p.rounds * split / p.splits;
    end = p.rounds * (split + 1) / p.splits;
  }
};

template <int kTokens>
__device__ __forceinline__ void BringTokens(const VectorsParams& p, uint32_t shared,
                                            const Work& work) {
  WaitForEarlierKernels();
  Cursor<kTokens> at;
  for (int step = work.first * 2; step < work.end * 2; ++step, at.Advance()) {
    BarrierWait(at.Empty(shared), at.parity ^ 1);
    BarrierExpect(at.Full(shared), Shape<kTokens>::kStageBytes);
    TensorCopy(at.Tokens(shared), &p.x, step * kStepK, work.tokens * kTokens, at.Full(shared));
  }
}

// Eight elements of a column, rounded. `unit`: what the integers lack, over kUnit, in FP16 twice for
// FP16; in full in FP32 for BF16.
template <VectorCode kCode, bool kBf16>
struct Rounding {
  uint32_t factor;  // d twice
  float unit;

  __device__ __forceinline__ Rounding(uint32_t d, float unit) : factor(d * 0x10001u), unit(unit) {}

  __device__ __forceinline__ uint4 operator()(const uint32_t (&pairs)[4]) const {
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBf16) {
        out[i] = ToBf16x2(Fp16ToFloat(static_cast<uint16_t>(pairs[i])) * unit,
                          Fp16ToFloat(static_cast<uint16_t>(pairs[i] >> 16)) * unit);
      } else {
        // The first product is exact: a power of two.
        constexpr uint32_t kPower = kUnit<kCode> == 1       ? 0x3c003c00u
                                    : kUnit<kCode> == 0.25f ? 0x34003400u
                                                            : 0x30003000u;
        out[i] = Mul2Fp16(kPower == 0x3c003c00u ? pairs[i] : Mul2Fp16(pairs[i], kPower), factor);
      }
    }
    return {out[0], out[1], out[2], out[3]};
  }
};

// A round of a consumer: for each 64 of K 64 rows, columns of W, of 128 bytes, whose chunks of 16
// are swizzled as the copy engine swizzles them.
__device__ __forceinline__ uint32_t ChunkAt(uint32_t round_at, int row, int chunk) {
  return round_at + chunk / 8 * SharedPlaces<64>::kHalfBytes + row * 128 +
         ((chunk % 8 ^ row % 8) << 4);
}

template <VectorCode kCode, bool kBf16, int kItem>
__device__ __forceinline__ void DecodeItem(const LaneWords<kCode>& words, const uint32_t* entries,
                                           const Rounding<kCode, kBf16>& rounding,
                                           uint32_t round_at) {
  const LaneGroup<kCode, kItem> group(words);
  const int lane = threadIdx.x % 32, chunk = lane % 4 * 4;
  const int row = threadIdx.x / 32 % 4 * vectors::kTileColumns + lane / 4 + 8 * kItem;
  // All look-ups are under way before the first store, which the compiler does not move.
  uint32_t pairs[4][4];
  group.template Decode<0>(entries, pairs[0]);
  group.template Decode<1>(entries, pairs[1]);
  group.template Decode<2>(entries, pairs[2]);
  group.template Decode<3>(entries, pairs[3]);
  uint4 rounded[4];
#pragma unroll
  for (int v = 0; v < 4; ++v) rounded[v] = rounding(pairs[v]);
#pragma unroll
  for (int v = 0; v < 4; ++v) StoreShared16(ChunkAt(round_at, row, chunk + v), rounded[v]);
}

// Shows this thread's stores to the tensor cores.
__device__ __forceinline__ void FenceForTensorCores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <VectorCode kCode, bool kBf16, int kTokens>
class VectorsConsumer {
 public:
  using Sums = float[Shape<kTokens>::kSums];

  __device__ __forceinline__ VectorsConsumer(const VectorsParams& p, uint32_t shared,
                                             const uint32_t* entries, int column_tile)
      : shared_(shared),
        entries_(entries),
        rounds_at_(shared + SharedPlaces<kTokens>::kWeights +
                   threadIdx.x / 128 * 2 * SharedPlaces<kTokens>::kRoundBytes) {
    // Past the last record of N the last one is decoded again; its sums are never stored.
    const int64_t record =
        min(int64_t{column_tile} * kConsumers + threadIdx.x / 128, vectors::Records(p.n) - 1);
    tile_ = p.codes + (record * (p.rounds / 2) * vectors::kRecordTiles + threadIdx.x / 32 % 4) *
                          vectors::TileBytes(kCode);
  }

  // While the tensor cores work on one round, the next is decoded to the other place.
  __device__ __forceinline__ void Run(int first, int end, Sums& sums) {
    constexpr int kSteps = kStepK / 16;
    Load(first);
    for (int round = first; round < end; ++round) {
      const uint32_t round_at = rounds_at_ + round % 2 * SharedPlaces<kTokens>::kRoundBytes;
      Decode(round_at);
      if (round + 1 < end) Load(round + 1);
      FenceForTensorCores();
      // Behind the barrier the round is whole, and the place of the one before is free.
      WgmmaWait<0>();
      if (round > first) Release();
      NamedBarrier<128>(2 + threadIdx.x / 128);
#pragma unroll
      for (int half = 0; half < 2; ++half, at_.Advance()) {
        BarrierWait(at_.Full(shared_), at_.parity);
        const uint64_t tokens = WholeDescriptor(TokensDescriptor(at_.Tokens(shared_)));
        const uint64_t weights =
            WholeDescriptor(TokensDescriptor(round_at + half * SharedPlaces<kTokens>::kHalfBytes));
        WgmmaArrive();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          WgmmaShared<kTokens, kBf16>(sums, weights + s * kDescriptorStep,
                                      tokens + s * kDescriptorStep, round > first || half + s > 0);
        }
        WgmmaCommit();
      }
    }
    WgmmaWait<0>();
    // Nothing that reads the sums moves before the wait.
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
  }

 private:
  __device__ __forceinline__ void Load(int round) {
    const uint8_t* const tile =
        tile_ + int64_t{round / 2} * vectors::kRecordTiles * vectors::TileBytes(kCode);
    words_.Load(tile, round % 2);
    factors_ = LoadFactors<kCode>(tile);
  }

  __device__ __forceinline__ void Decode(uint32_t round_at) {
    float units[2];
    UnitsOf<kCode>(factors_, units);
    DecodeItem<kCode, kBf16, 0>(words_, entries_, {factors_ & 0xffff, units[0]}, round_at);
    DecodeItem<kCode, kBf16, 1>(words_, entries_, {factors_ >> 16, units[1]}, round_at);
  }

  // Gives back the two stages of the round before.
  __device__ __forceinline__ void Release() {
#pragma unroll
    for (int half = 0; half < 2; ++half, released_.Advance()) {
      if (threadIdx.x % 32 == 0) BarrierArrive(released_.Empty(shared_));
    }
  }

  const uint32_t shared_;
  const uint32_t* const entries_;
  const uint32_t rounds_at_;
  const uint8_t* tile_;  // of round 0
  LaneWords<kCode> words_;
  uint32_t factors_;
  Cursor<kTokens> at_, released_;
};

// A thread has columns `column` and 8 further of tokens `token` and the next, then 8 further.
template <DType kY, typename Sums>
__device__ __forceinline__ void StoreSums(const VectorsParams& p, int64_t token, int64_t column,
                                          const Sums& sums) {
  using Bits = std::conditional_t<kY == DType::kFp32, float, uint16_t>;
  float outer[2] = {1, 1}, bias[2] = {0, 0};
  bool stores[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t col = column + 8 * c;
    stores[c] = col < p.n;
    if (stores[c] && p.outer != nullptr) outer[c] = p.outer[col];
    if (stores[c] && p.bias != nullptr) bias[c] = p.bias[col];
  }
  Bits* row_at = static_cast<Bits*>(p.y) + token * p.n + column;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(sums) / sizeof(float)); i += 4) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int64_t row = token + i / 4 * 8 + t;
      Bits* const at = row_at + t * p.n;
      const float x_scale = p.x_scale == nullptr || row >= p.m ? 1 : p.x_scale[row];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float sum = sums[i + 2 * c + t] * outer[c] * x_scale + bias[c];
        if (row >= p.m || !stores[c]) continue;
        if constexpr (kY == DType::kFp32) {
          at[8 * c] = sum;
        } else {
          at[8 * c] =
              static_cast<uint16_t>(kY == DType::kFp16 ? ToFp16x2(sum, sum) : ToBf16x2(sum, sum));
        }
      }
    }
    row_at += 8 * p.n;
  }
}

// Stores this split's sums. True: those of all splits are there, and `sums` are their sum.
template <typename Sums>
__device__ __forceinline__ bool AddSplits(const VectorsParams& p, int tile, int split, Sums& sums) {
  constexpr int kFours = sizeof(sums) / sizeof(float4);
  auto* const all = reinterpret_cast<float4*>(p.partials) +
                    (int64_t{tile} * p.splits * kFours) * kConsumerThreads + threadIdx.x;
  auto* const mine = all + int64_t{split} * kFours * kConsumerThreads;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    mine[i * kConsumerThreads] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  }
  __shared__ bool last;
  NamedBarrier<kConsumerThreads>(1);
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(p.counters + tile, 1) + 1 == static_cast<uint32_t>(p.splits);
    if (last) p.counters[tile] = 0;
    __threadfence();
  }
  NamedBarrier<kConsumerThreads>(1);
  if (!last) return false;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    float4 sum = {};
    for (int s = 0; s < p.splits; ++s) {
      const float4 more = __ldcg(all + (int64_t{s} * kFours + i) * kConsumerThreads);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    sums[4 * i] = sum.x, sums[4 * i + 1] = sum.y;
    sums[4 * i + 2] = sum.z, sums[4 * i + 3] = sum.w;
  }
  return true;
}

template <VectorCode kCode, bool kBf16, int kTokens>
__global__ __launch_bounds__(kThreads, Shape<kTokens>::kBlocks) void VectorsKernel(
    const __grid_constant__ VectorsParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = SharedAddress(memory);
  auto* const entries = reinterpret_cast<uint32_t*>(memory + SharedPlaces<kTokens>::kEntries);
  LaunchDependents();
  FillEntries<kCode>(entries);
  if (threadIdx.x == 0) {
    PrefetchMap(&p.x);
    Cursor<kTokens> at;
    for (; at.parity == 0; at.Advance()) {
      BarrierInit(at.Full(shared), 1);
      BarrierInit(at.Empty(shared), kConsumerThreads / 32);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const Work work(p);
  // Through a shuffle, so that the compiler knows that the whole warp has the same value.
  if (__shfl_sync(0xffffffffu, threadIdx.x / kConsumerThreads, 0) != 0) {
    ShrinkRegisters<Shape<kTokens>::kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) BringTokens<kTokens>(p, shared, work);
    return;
  }
  GrowRegisters<Shape<kTokens>::kConsumerRegisters>();
  VectorsConsumer<kCode, kBf16, kTokens> consumer(p, shared, entries, work.columns);
  typename VectorsConsumer<kCode, kBf16, kTokens>::Sums sums;
  consumer.Run(work.first, work.end, sums);
  WaitForEarlierKernels();
  if (p.splits > 1 && !AddSplits(p, work.tile, work.split, sums)) return;
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t{work.tokens} * kTokens + lane % 4 * 2;
  const int64_t column =
      int64_t{work.columns} * kTileColumns + threadIdx.x / 32 * vectors::kTileColumns + lane / 4;
  if (p.y_type == DType::kFp16) {
    StoreSums<DType::kFp16>(p, token, column, sums);
  } else if (p.y_type == DType::kBf16) {
    StoreSums<DType::kBf16>(p, token, column, sums);
  } else {
    StoreSums<DType::kFp32>(p, token, column, sums);
  }
}

// ---- the host's choices -------------------------------------------------------------------------

struct VectorsPlan {
  int tokens = 0, splits = 1;
};

constexpr int kMostSplits = 8;

// Microseconds of a round of a block: alone on a multiprocessor, and beside another. H200,
// 2026-12-01.
constexpr struct {
  int tokens;
  double alone, beside;
} kTileCosts[] = {{64, 1.2, 1.86}, {128, 1.25, 1.25}, {256, 1.72, 1.72}};

// Blocks that run at a time.
int64_t SlotsOf(const DeviceInfo& device, int tokens) {
  return int64_t{device.sm_count} * (tokens <= 64 ? Shape<64>::kBlocks : Shape<256>::kBlocks);
}
bool IsWorthwhile(int tokens, int64_t m) {
  return tokens == kTileCosts[0].tokens || tokens < 2 * m;
}

VectorsPlan PlanOf(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const auto rounds = static_cast<int>(shape.k / kRoundK);
  const int64_t column_tiles = CeilDiv(shape.n, int64_t{kTileColumns});
  VectorsPlan best;
  double least = 0;
  for (const auto& [tokens, alone, beside] : kTileCosts) {
    if (!IsWorthwhile(tokens, m)) continue;
    const int64_t tiles = column_tiles * CeilDiv(m, int64_t{tokens});
    const int64_t slots = SlotsOf(device, tokens);
    for (int splits = 1; splits <= std::min(kMostSplits, rounds); ++splits) {
      if (splits > 1 && (tiles * splits > 2 * slots || tiles > kStreamCounters)) break;
      const double round = std::min(slots, tiles * splits) > device.sm_count ? beside : alone;
      // A start takes about three microseconds, sums in memory more.
      const double us = static_cast<double>(CeilDiv(tiles * splits, slots)) *
                            static_cast<double>(CeilDiv(rounds, splits)) * round +
                        (splits > 1 ? 5 + 0.005 * splits * tokens : 3);
      if (best.tokens == 0 || us < least) best = {tokens, splits}, least = us;
    }
  }
  return best;
}

// Room for the splits of every plan of up to m tokens.
int64_t Workspace(const WeightShape&, const DeviceInfo& device, int64_t m) {
  int64_t bytes = 0;
  for (const auto& round : kTileCosts) {
    if (!IsWorthwhile(round.tokens, m)) continue;
    bytes = std::max(bytes, 2 * SlotsOf(device, round.tokens) * kTileColumns * round.tokens *
                                int64_t{sizeof(float)});
  }
  return bytes;
}

template <int kTokens>
absl::Status LaunchTokens(const VectorsParams& p, const DeviceWeight& weight, DType x,
                          StreamView stream) {
  return ForVectorCode(weight.shape.scheme.vector, [&]<VectorCode kCode>() {
    const LaunchConfig config{
        .grid = static_cast<unsigned>(int64_t{p.column_tiles} * p.token_tiles * p.splits),
        .block = kThreads,
        .shared_bytes = SharedPlaces<kTokens>::kEntries + kEntriesBytes<kCode>,
        .stream = stream,
        .attributes = OverlappedLaunch(weight.device->info())};
    constexpr absl::string_view kName = "sm90a/vectors_matmul";
    return x == DType::kBf16 ? Launch<VectorsKernel<kCode, true, kTokens>>(kName, config, p)
                             : Launch<VectorsKernel<kCode, false, kTokens>>(kName, config, p);
  });
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const DeviceInfo& device = weight.device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, "sm90a/vectors_matmul"));
  const int64_t m = args.x.rows;
  const VectorsPlan plan = PlanOf(weight.shape, device, m);
  VectorsParams p = {
      .codes = weight.codes(),
      .outer = weight.outer(),
      .x_scale = args.x_scale,
      .bias = args.bias,
      .y = args.y.data,
      .y_type = args.y.dtype,
      .m = m,
      .n = weight.shape.n,
      .rounds = static_cast<int>(weight.shape.k / kRoundK),
      .column_tiles = static_cast<int>(CeilDiv(weight.shape.n, int64_t{kTileColumns})),
      .token_tiles = static_cast<int>(CeilDiv(m, int64_t{plan.tokens})),
      .splits = plan.splits,
      .partials = static_cast<float*>(args.workspace),
      .counters = stream.counters};
  AWQD_RETURN_IF_ERROR(MapTokens(args.x, args.x_stride, plan.tokens, &p.x));
  switch (plan.tokens) {
    case 64:
      return LaunchTokens<64>(p, weight, args.x.dtype, stream);
    case 128:
      return LaunchTokens<128>(p, weight, args.x.dtype, stream);
    default:
      return LaunchTokens<256>(p, weight, args.x.dtype, stream);
  }
}

}  // namespace

const KernelRow& VectorsA16Row() {
  static const KernelRow row = {
      .name = "sm90a/vectors_matmul",
      .op = Op::kMatmul,
      .device = DeviceKind::kCuda,
      .claims = kVectorCodes,
      .input_form = InputForm::kTensorCore,
      .layout = &kVectorsLayout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kDenseFrom; },
      .priority = 20,
      .tile =
          [](const WeightShape& shape, const DeviceInfo& device, int64_t m) {
            const VectorsPlan plan = PlanOf(shape, device, m);
            return absl::StrCat(plan.tokens, "x", kTileColumns, " in ", plan.splits, " splits");
          },
      .workspace_bytes = Workspace,
      .matmul = Matmul};
  return row;
}

}  // namespace awqd::cuda
