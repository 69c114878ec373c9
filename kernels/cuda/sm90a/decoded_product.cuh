// A product whose weight is decoded to shared memory for wgmma: vector codes, trellises, with more
// tokens than sm80/block_product.cuh is made for.
//
// Computes: y = x @ W + bias with FP32 sums.
// A consumer decodes a round, 64 columns x 128 of K, to shared memory as wgmma's A operand. Tokens
// are the B operand, which the copy engine brings, in steps of 64 of K.
// Work split: a tile is 128 columns, 64 for each of two consumers, by kTokens tokens. Where tiles do
// not fill the GPU they are split along K; the last block of a tile adds the splits' sums in order.
//
// A decoder has
//   Weight                        what the kernel knows of the weight
//   kBf16                         the type that it decodes to, which is that of x: BF16 or FP16
//   StageBytes(w)                 of shared memory, for what comes with the tokens of a stage
//   TableBytes()                  of shared memory, for a table of the block
//   FillTable(table)              the block synchronises afterwards
//   BringStep(w, columns, step, to, barrier)  begins to copy a step of a tile, by one thread
//   StepBytes(w, step)            what that copies
//   a constructor of (w, table, columns)  for one warp: a quarter of a consumer's columns
//   Load(round)                   begins to load what no copy brings
//   Decode(round_at, step)        decodes what was loaded; step(i) waits for step i of the round and
//                                 returns its bytes in shared memory
//   Transform(v)                  the operation on 128 columns of a token, of which lane l has
//                                 v[i] = column 4 l + i
// Device code, and the host's choices.
#pragma once

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/store.cuh"
#include "kernels/cuda/core/counters.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/tensor_map.h"
#include "kernels/cuda/sm90a/wgmma.cuh"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

constexpr int kRoundK = 128;
constexpr int kStepK = 64;  // that one copy brings
constexpr int kConsumers = 2;
constexpr int kConsumerColumns = 64;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = kConsumerThreads + 128;  // one of which starts copies
constexpr int kTileColumns = kConsumerColumns * kConsumers;

template <class Decoder>
struct DecodedParams {
  CUtensorMap x;  // [m, k], boxes of 64 of k x kTokens
  typename Decoder::Weight weight;
  const float* outer;    // [n], null: 1
  const float* x_scale;  // [m], null: 1
  const float* bias;     // [n], null: 0
  void* y;
  DType y_type;
  bool aligned;  // rows of y begin on boundaries of four elements
  int64_t m, n;
  int rounds;  // of K; past it tokens are zeros, and the decoder gives any numbers
  int column_tiles, token_tiles, splits;
  // Where splits > 1: [tiles, splits, a tile in the order of fragments], and words that are zero.
  float* partials;
  uint32_t* counters;
};

// Blocks of a multiprocessor.
constexpr int BlocksOf(int tokens) { return tokens <= 64 ? 2 : 1; }

template <class Decoder, int kTokens>
struct Shape {
  static constexpr int kBlocks = BlocksOf(kTokens);
  static constexpr int kStages = kTokens == 128 ? 6 : 4;  // two rounds at a time, at least
  static constexpr int kTokensBytes = kTokens * kStepK * 2;
  static constexpr int kSums = kTokens / 2;  // of a thread
  // Registers of a thread of consumers, and of the others, which give them.
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 104 : 232;
  static constexpr int kProducerRegisters = kBlocks == 2 ? 24 : 40;
};

// Two halves of 64 of K, of 64 rows of 128 bytes.
constexpr int kHalfBytes = kConsumerColumns * kStepK * 2;
constexpr int kRoundBytes = 2 * kHalfBytes;

// Tokens of the stages, then two rounds of each consumer, then barriers and a word that tells all
// threads what one has found, then the table, then what came with the tokens. In the end sums take
// the place of tokens and rounds.
template <class Decoder, int kTokens>
struct SharedPlaces {
  using S = Shape<Decoder, kTokens>;
  static constexpr int kRounds = S::kStages * S::kTokensBytes;
  static constexpr int kBarriers = kRounds + kConsumers * 2 * kRoundBytes;
  static constexpr int kWord = kBarriers + S::kStages * 16;
  static constexpr int kTable = kWord + 16;
  static constexpr int kSteps = kTable + Decoder::TableBytes();
  // The padding keeps the lanes that store at a time in banks of their own.
  static constexpr int kSumsStride = kTileColumns + 4;
  static_assert(kTokens * kSumsStride * 4 <= kBarriers);
};

// A stage of the ring.
template <class Decoder, int kTokens>
struct Cursor {
  using S = Shape<Decoder, kTokens>;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t Full(uint32_t shared) const {
    return shared + SharedPlaces<Decoder, kTokens>::kBarriers + stage * 16;
  }
  __device__ __forceinline__ uint32_t Empty(uint32_t shared) const { return Full(shared) + 8; }
  __device__ __forceinline__ uint32_t Tokens(uint32_t shared) const {
    return shared + stage * S::kTokensBytes;
  }
  __device__ __forceinline__ int Step(const typename Decoder::Weight& w) const {
    return SharedPlaces<Decoder, kTokens>::kSteps + stage * Decoder::StageBytes(w);
  }
};

// A block's share of the work.
struct Work {
  int tile;                    // of all
  int columns, tokens, split;  // tiles along N and M
  int first, end;              // rounds

  template <class Decoder>
  __device__ __forceinline__ explicit Work(const DecodedParams<Decoder>& p) {
    tile = blockIdx.x / p.splits;
    split = blockIdx.x % p.splits;
    // Tiles of tokens change fastest: those that are computed at the same time share weights in L2.
    columns = tile / p.token_tiles;
    tokens = tile % p.token_tiles;
    first = p.rounds * split / p.splits;
    end = p.rounds * (split + 1) / p.splits;
  }
};

template <class Decoder, int kTokens>
__device__ __forceinline__ void BringSteps(const DecodedParams<Decoder>& p, uint32_t shared,
                                           const Work& work) {
  using S = Shape<Decoder, kTokens>;
  WaitForEarlierKernels();
  Cursor<Decoder, kTokens> at;
  for (int step = work.first * 2; step < work.end * 2; ++step, at.Advance()) {
    BarrierWait(at.Empty(shared), at.parity ^ 1);
    BarrierExpect(at.Full(shared), S::kTokensBytes + Decoder::StepBytes(p.weight, step));
    TensorCopy(at.Tokens(shared), &p.x, step * kStepK, work.tokens * kTokens, at.Full(shared));
    Decoder::BringStep(p.weight, work.columns, step, shared + at.Step(p.weight), at.Full(shared));
  }
}

// Where the chunk of 16 bytes of a row, a column of W, lies in a round: swizzled as the copy engine
// swizzles.
__device__ __forceinline__ uint32_t ChunkAt(uint32_t round_at, int row, int chunk) {
  return round_at + chunk / 8 * kHalfBytes + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// Shows this thread's stores to the tensor cores.
__device__ __forceinline__ void FenceForTensorCores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <class Decoder, int kTokens>
class Consumer {
 public:
  using S = Shape<Decoder, kTokens>;
  using Sums = float[S::kSums];

  __device__ __forceinline__ Consumer(const DecodedParams<Decoder>& p, uint8_t* memory, int columns)
      : weight_(p.weight),
        memory_(memory),
        shared_(SharedAddress(memory)),
        rounds_at_(shared_ + SharedPlaces<Decoder, kTokens>::kRounds +
                   threadIdx.x / 128 * 2 * kRoundBytes),
        decoder_(p.weight, memory + SharedPlaces<Decoder, kTokens>::kTable, columns) {}

  // While the tensor cores work on one round, the next is decoded to the other place.
  __device__ __forceinline__ void Run(int first, int end, Sums& sums) {
    constexpr int kSteps = kStepK / 16;
    decoder_.Load(first);
    for (int round = first; round < end; ++round) {
      const uint32_t round_at = rounds_at_ + round % 2 * kRoundBytes;
      Cursor<Decoder, kTokens> decoded = at_;
      decoder_.Decode(round_at, [&](int step) {
        if (step > 0) decoded.Advance();
        BarrierWait(decoded.Full(shared_), decoded.parity);
        return memory_ + decoded.Step(weight_);
      });
      if (round + 1 < end) decoder_.Load(round + 1);
      FenceForTensorCores();
      // Behind the barrier the round is whole, and the place of the one before is free.
      WgmmaWait<0>();
      if (round > first) Release();
      NamedBarrier<128>(2 + threadIdx.x / 128);
#pragma unroll
      for (int half = 0; half < 2; ++half, at_.Advance()) {
        BarrierWait(at_.Full(shared_), at_.parity);
        const uint64_t tokens = WholeDescriptor(TokensDescriptor(at_.Tokens(shared_)));
        const uint64_t weights = WholeDescriptor(TokensDescriptor(round_at + half * kHalfBytes));
        WgmmaArrive();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          WgmmaShared<kTokens, Decoder::kBf16>(sums, weights + s * kDescriptorStep,
                                               tokens + s * kDescriptorStep,
                                               round > first || half + s > 0);
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
  // Gives back the two stages of the round before.
  __device__ __forceinline__ void Release() {
#pragma unroll
    for (int half = 0; half < 2; ++half, released_.Advance()) {
      if (threadIdx.x % 32 == 0) BarrierArrive(released_.Empty(shared_));
    }
  }

  const typename Decoder::Weight& weight_;
  uint8_t* const memory_;
  const uint32_t shared_;
  const uint32_t rounds_at_;
  Decoder decoder_;
  Cursor<Decoder, kTokens> at_, released_;
};

// Stores this split's sums. True: those of all splits are there, and `sums` are their sum. `word`
// lies in shared memory.
template <class Decoder, typename Sums>
__device__ __forceinline__ bool AddSplits(const DecodedParams<Decoder>& p, int tile, int split,
                                          int* word, Sums& sums) {
  constexpr int kFours = sizeof(sums) / sizeof(float4);
  auto* const all = reinterpret_cast<float4*>(p.partials) +
                    (int64_t{tile} * p.splits * kFours) * kConsumerThreads + threadIdx.x;
  auto* const mine = all + int64_t{split} * kFours * kConsumerThreads;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    mine[i * kConsumerThreads] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  }
  NamedBarrier<kConsumerThreads>(1);
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(p.counters + tile, 1) + 1 == static_cast<uint32_t>(p.splits);
    if (last) p.counters[tile] = 0;
    *word = last;
    __threadfence();
  }
  NamedBarrier<kConsumerThreads>(1);
  if (*word == 0) return false;
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

// Stores a tile. A thread's sums are columns lane / 4 and 8 further of a warp's 16, tokens
// 2 (lane % 4) and the next of each eight. They go through shared memory, so that a warp has 128
// columns of a token.
template <class Decoder, int kTokens, typename Sums>
__device__ __forceinline__ void StoreTile(const DecodedParams<Decoder>& p, const Work& work,
                                          float* shared, const Sums& sums) {
  constexpr int kStride = SharedPlaces<Decoder, kTokens>::kSumsStride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  NamedBarrier<kConsumerThreads>(1);  // nothing there is read any more
  float* const to = shared + lane % 4 * 2 * kStride + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    to[(i / 4 * 8 + i % 2) * kStride + i / 2 % 2 * 8] = sums[i];
  }
  NamedBarrier<kConsumerThreads>(1);
  const int64_t first = int64_t{work.columns} * kTileColumns + 4 * lane;
  float outer[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is = first + i < p.n;
    outer[i] = is && p.outer != nullptr ? p.outer[first + i] : 1;
    bias[i] = is && p.bias != nullptr ? p.bias[first + i] : 0;
  }
  const int64_t begin = int64_t{work.tokens} * kTokens;
  const auto tokens = static_cast<int>(min(int64_t{kTokens}, p.m - begin));
#pragma unroll 4
  for (int token = warp; token < tokens; token += kConsumerThreads / 32) {
    const float4 four = *reinterpret_cast<const float4*>(shared + token * kStride + 4 * lane);
    float v[4] = {four.x, four.y, four.z, four.w};
    Decoder::Transform(v);
    const float x_scale = p.x_scale == nullptr ? 1 : p.x_scale[begin + token];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = v[i] * outer[i] * x_scale + bias[i];
    StoreFourAs(p.y_type, p.y, (begin + token) * p.n + first, v, p.n - first, p.aligned);
  }
}

template <class Decoder, int kTokens>
__global__ __launch_bounds__(kThreads, BlocksOf(kTokens)) void DecodedKernel(
    const __grid_constant__ DecodedParams<Decoder> p) {
  using S = Shape<Decoder, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = SharedAddress(memory);
  LaunchDependents();
  Decoder::FillTable(memory + SharedPlaces<Decoder, kTokens>::kTable);
  if (threadIdx.x == 0) {
    PrefetchMap(&p.x);
    Cursor<Decoder, kTokens> at;
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
    ShrinkRegisters<S::kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) BringSteps<Decoder, kTokens>(p, shared, work);
    return;
  }
  GrowRegisters<S::kConsumerRegisters>();
  Consumer<Decoder, kTokens> consumer(p, memory, work.columns);
  typename Consumer<Decoder, kTokens>::Sums sums;
  consumer.Run(work.first, work.end, sums);
  WaitForEarlierKernels();
  int* const word = reinterpret_cast<int*>(memory + SharedPlaces<Decoder, kTokens>::kWord);
  if (p.splits > 1 && !AddSplits(p, work.tile, work.split, word, sums)) return;
  StoreTile<Decoder, kTokens>(p, work, reinterpret_cast<float*>(memory), sums);
}

// ---- the host's choices -------------------------------------------------------------------------

struct DecodedPlan {
  int tokens = 0, splits = 1;
};

constexpr int kMostSplits = 8;

// Microseconds of a round of a block: alone on a multiprocessor, and beside another. Vector codes,
// H200, 2026-12-01.
constexpr struct {
  int tokens;
  double alone, beside;
} kTileCosts[] = {{64, 1.2, 1.86}, {128, 1.25, 1.25}, {256, 1.72, 1.72}};
// More tokens take less time by Dequantize and cuBLASLt. H200, 2026-12-01.
constexpr int64_t kDecodedDenseFrom = 2049;

// Blocks that run at a time.
inline int64_t SlotsOf(const DeviceInfo& device, int tokens) {
  return int64_t{device.sm_count} * BlocksOf(tokens);
}
inline bool IsWorthwhile(int tokens, int64_t m) { return tokens == 64 || tokens < 2 * m; }

inline DecodedPlan PlanOf(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const auto rounds = static_cast<int>(CeilDiv(shape.k, int64_t{kRoundK}));
  const int64_t column_tiles = CeilDiv(shape.n, int64_t{kTileColumns});
  DecodedPlan best;
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
inline int64_t DecodedWorkspace(const WeightShape&, const DeviceInfo& device, int64_t m) {
  int64_t bytes = 0;
  for (const int tokens : {64, 128, 256}) {
    if (!IsWorthwhile(tokens, m)) continue;
    bytes = std::max(bytes,
                     2 * SlotsOf(device, tokens) * kTileColumns * tokens * int64_t{sizeof(float)});
  }
  return bytes;
}

// The product with the rows and the tile of `plan`. Decoder::Weight is `w`.
template <class Decoder>
absl::Status LaunchDecoded(const MatmulArgs& args, const typename Decoder::Weight& w,
                           const DecodedPlan& plan, absl::string_view name, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const int64_t m = args.x.rows;
  DecodedParams<Decoder> p = {
      .weight = w,
      .outer = weight.outer(),
      .x_scale = args.x_scale,
      .bias = args.bias,
      .y = args.y.data,
      .y_type = args.y.dtype,
      .aligned = reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0 && weight.shape.n % 4 == 0,
      .m = m,
      .n = weight.shape.n,
      .rounds = static_cast<int>(CeilDiv(weight.shape.k, int64_t{kRoundK})),
      .column_tiles = static_cast<int>(CeilDiv(weight.shape.n, int64_t{kTileColumns})),
      .token_tiles = static_cast<int>(CeilDiv(m, int64_t{plan.tokens})),
      .splits = plan.splits,
      .partials = static_cast<float*>(args.workspace),
      .counters = stream.counters};
  AWQD_RETURN_IF_ERROR(MapTokens(args.x, args.x_stride, plan.tokens, &p.x));
  const auto launch = [&]<int kTokens>() {
    const LaunchConfig config{
        .grid = static_cast<unsigned>(int64_t{p.column_tiles} * p.token_tiles * p.splits),
        .block = kThreads,
        .shared_bytes = SharedPlaces<Decoder, kTokens>::kSteps +
                        Shape<Decoder, kTokens>::kStages * Decoder::StageBytes(w),
        .stream = stream,
        .attributes = OverlappedLaunch(weight.device->info())};
    return Launch<DecodedKernel<Decoder, kTokens>>(name, config, p);
  };
  switch (plan.tokens) {
    case 64:
      return launch.template operator()<64>();
    case 128:
      return launch.template operator()<128>();
    default:
      return launch.template operator()<256>();
  }
}

// KernelRow::matmul, with a decoder for each type of x.
template <class Fp16Decoder, class Bf16Decoder>
absl::Status RunDecoded(const MatmulArgs& args, const typename Fp16Decoder::Weight& w,
                        absl::string_view name, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, name));
  const DecodedPlan plan = PlanOf(args.weight->shape, device, args.x.rows);
  return args.x.dtype == DType::kBf16 ? LaunchDecoded<Bf16Decoder>(args, w, plan, name, stream)
                                      : LaunchDecoded<Fp16Decoder>(args, w, plan, name, stream);
}

// A row for `min_m` tokens and more; fewer take less time by rows of sm80.
inline KernelRow DecodedRow(absl::string_view name, const Claims& claims, const Layout& layout,
                            int64_t min_m, absl::Status (*matmul)(const MatmulArgs&, StreamView)) {
  return {.name = name,
          .op = Op::kMatmul,
          .device = DeviceKind::kCuda,
          .claims = claims,
          .input_form = InputForm::kTensorCore,
          .layout = &layout,
          .min_arch = 90,
          .max_arch = 90,
          .min_m = min_m,
          .dense_from = [](const WeightShape&, const DeviceInfo&) { return kDecodedDenseFrom; },
          .priority = 20,
          .tile =
              [](const WeightShape& shape, const DeviceInfo& device, int64_t m) {
                const DecodedPlan plan = PlanOf(shape, device, m);
                return absl::StrCat(plan.tokens, "x", kTileColumns, " in ", plan.splits, " splits");
              },
          .workspace_bytes = DecodedWorkspace,
          .matmul = matmul};
}

}  // namespace
}  // namespace awqd::cuda
