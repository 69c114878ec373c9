// Rows sm80/vectors_matmul and sm80/vectors_grouped: products of vector codes.
//
// Computes: y = x @ W + bias with FP32 sums; the same for a stack of experts.
// Weight layout: vectors. Blocks are decoded to integers in FP16, which are exact, and their sums
// multiplied by d of the column. Work split: block_product.cuh.
// Limits: none. Each tile of tokens decodes W again, so many tokens take the dense path.
#include "kernels/cuda/common/vector_tiles.cuh"
#include "kernels/cuda/sm80/block_product.cuh"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

constexpr int64_t kMostFusedTokens = 64;    // on GPUs that sm90a/vectors.cu does not serve
constexpr int64_t kMostGroupedTokens = 64;  // of an expert, on average

// Tokens lie in the order of fragments: 16 bytes, eight elements along K, for each lane, eight
// tokens and step; a step is vector t of groups 4 r .. 4 r + 3 of a block. The lane's place is
// turned with t, so that the threads that store at a time use all banks.
__device__ __forceinline__ int LanePlace(int lane, int t) { return lane ^ t << 1; }

// Adds a round of the warp's tiles. `tokens`: the fragments of its first step.
template <VectorCode kCode, int kEights>
__device__ __forceinline__ void AddRound(const LaneWords<kCode> (&words)[kWarpTiles],
                                         const uint32_t* entries, const uint4* tokens,
                                         float (&sums)[kWarpTiles][kEights][4]) {
  const int lane = threadIdx.x % 32;
  const auto step = [&]<int kVector>() {
    uint32_t w[kWarpTiles][2][4];
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const LaneGroup<kCode, 0> first(words[i]);
      const LaneGroup<kCode, 1> second(words[i]);
      first.template Decode<kVector>(entries, w[i][0]);
      second.template Decode<kVector>(entries, w[i][1]);
    }
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const uint4 x = tokens[(kVector * kEights + e) * 32 + LanePlace(lane, kVector)];
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const uint32_t first[4] = {w[i][0][0], w[i][1][0], w[i][0][1], w[i][1][1]};
        const uint32_t second[4] = {w[i][0][2], w[i][1][2], w[i][0][3], w[i][1][3]};
        MmaFp16(sums[i][e], first, x.x, x.y);
        MmaFp16(sums[i][e], second, x.z, x.w);
      }
    }
  };
  step.template operator()<0>();
  step.template operator()<1>();
  step.template operator()<2>();
  step.template operator()<3>();
}

template <VectorCode kCode>
struct VectorDecoder {
  struct Weight {};
  static constexpr bool kFinishes = true;
  static constexpr int kTileBytes = vectors::TileBytes(kCode);
  static constexpr int kOfRecord = vectors::kRecordTiles / kWarpTiles;

  static constexpr __host__ __device__ int TableBytes() { return kEntriesBytes<kCode>; }
  static constexpr __host__ __device__ int CopyBytes(const Weight&) {
    return kWarpTiles * kTileBytes;
  }
  static __device__ __forceinline__ void FillTable(uint8_t* table) {
    FillEntries<kCode>(reinterpret_cast<uint32_t*>(table));
  }
  static __device__ __forceinline__ void Copy(const Weight&, const uint8_t* records,
                                              const CommonParams& shape, int block, int group,
                                              uint32_t to) {
    const int64_t record = group / kOfRecord * int64_t{shape.blocks()} + block;
    const int64_t first = record * vectors::kRecordTiles + group % kOfRecord * kWarpTiles;
    const uint8_t* const from = records + first * kTileBytes;
#pragma unroll
    for (int i = 0; i < kWarpTiles * kTileBytes; i += 512) {
      const int at = i + static_cast<int>(threadIdx.x) % 32 * 16;
      if (at < kWarpTiles * kTileBytes) CopyAsync16(to + at, from + at);
    }
  }

  template <int kEights>
  static __device__ __forceinline__ void StoreChunk(uint4* tokens, int token, int block, uint4 v) {
    const int lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int step = 8 * block + group / 4 * 4 + t;
    const int place = LanePlace(token % kEight * 4 + group % 4, t);
    tokens[(step * kEights + token / kEight) * 32 + place] = v;
  }

  template <int kEights, class Release>
  static __device__ __forceinline__ void Add(const Weight&, const uint8_t* table,
                                             const uint8_t* copy, const uint4* tokens, int,
                                             Release release, float (&sums)[kWarpTiles][kEights][4],
                                             float (&scales)[kWarpTiles][2]) {
    const auto* const entries = reinterpret_cast<const uint32_t*>(table);
    LaneWords<kCode> words[kWarpTiles];
    const auto load = [&](int round) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) words[i].Load(copy + i * kTileBytes, round);
    };
    load(0);
    AddRound<kCode, kEights>(words, entries, tokens, sums);
    load(1);
    uint32_t factors[kWarpTiles];
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) factors[i] = LoadFactors<kCode>(copy + i * kTileBytes);
    release();
    AddRound<kCode, kEights>(words, entries, tokens + 4 * kEights * 32, sums);
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) UnitsOf<kCode>(factors[i], scales[i]);
  }
};

BlockPlan PlanOf(const DeviceWeight& weight, int64_t rows, int segments) {
  BlockPlan plan;
  (void)ForVectorCode(weight.shape.scheme.vector, [&]<VectorCode kCode>() {
    using Decoder = VectorDecoder<kCode>;
    plan = PlanBlocks(weight.shape, weight.device->info(), rows, segments, Decoder::TableBytes(),
                      Decoder::CopyBytes({}));
    return absl::OkStatus();
  });
  return plan;
}

absl::Status LaunchVectors(const CommonParams& shape, const BlockPlan& plan,
                           const DeviceWeight& weight, absl::string_view name, StreamView stream) {
  return ForVectorCode(weight.shape.scheme.vector, [&]<VectorCode kCode>() {
    return LaunchBlocks<VectorDecoder<kCode>>({shape, {}}, plan, weight.device->info(), name,
                                              stream);
  });
}

int64_t Workspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  const int segments = SegmentsOf(shape, device);
  return segments == 1 ? 0 : PartialsBytes(shape, segments, m);
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  constexpr absl::string_view kName = "sm80/vectors_matmul";
  const DeviceWeight& weight = *args.weight;
  const DeviceInfo& device = weight.device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, kName));
  for (int64_t first = 0; first < args.x.rows; first += kTokensOfLaunch) {
    const int64_t rows = std::min(kTokensOfLaunch, args.x.rows - first);
    const BlockPlan plan = PlanOf(weight, rows, SegmentsOf(weight.shape, device));
    CommonParams p = ParamsOfRows(args, weight.shape, plan, first);
    p.whole = {.records = weight.codes(),
               .outer = weight.outer(),
               .bias = args.bias,
               .end_token = static_cast<int32_t>(rows)};
    p.count = static_cast<int>(CeilDiv(rows, int64_t{plan.Tokens()}));
    p.partials = static_cast<float*>(args.workspace);
    p.counters = stream.counters;
    AWQD_RETURN_IF_ERROR(LaunchVectors(p, plan, weight, kName, stream));
  }
  return absl::OkStatus();
}

BlockPlan PlanOf(const GroupedArgs& args) {
  const int64_t rows = args.mean();
  return PlanOf(*args.experts.front(), rows, /*segments=*/1);
}

int64_t TokensOfTile(const GroupedArgs& args) { return PlanOf(args).Tokens(); }

std::string Table(const GroupedArgs& args) { return GroupedTiles(args, TokensOfTile(args)); }

absl::Status Grouped(const GroupedArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.experts.front();
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const BlockPlan plan = PlanOf(args);
  CommonParams p = ParamsOfRows(args, weight.shape, plan, 0);
  p.tiles = static_cast<const GroupedTile*>(args.table);
  p.count = static_cast<int>(GroupedTileCount(args, plan.Tokens()));
  return LaunchVectors(p, plan, weight, "sm80/vectors_grouped", stream);
}

}  // namespace

const KernelRow& VectorsMatmulRow() {
  static const KernelRow row = {
      .name = "sm80/vectors_matmul",
      .op = Op::kMatmul,
      .device = DeviceKind::kCuda,
      .claims = kVectorCodes,
      .input_form = InputForm::kTensorCore,
      .layout = &kVectorsLayout,
      .min_arch = 80,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kMostFusedTokens + 1; },
      .batch_invariant = true,
      .priority = 10,
      .workspace_bytes = Workspace,
      .matmul = Matmul};
  return row;
}

const KernelRow& VectorsGroupedRow() {
  static const KernelRow row = {.name = "sm80/vectors_grouped",
                                .op = Op::kGroupedMatmul,
                                .device = DeviceKind::kCuda,
                                .claims = kVectorCodes,
                                .input_form = InputForm::kTensorCore,
                                .layout = &kVectorsLayout,
                                .min_arch = 80,
                                .max_m = kMostGroupedTokens,
                                .batch_invariant = true,
                                .priority = 10,
                                .grouped_table = Table,
                                .grouped_tile = TokensOfTile,
                                .grouped = Grouped};
  return row;
}

}  // namespace awqd::cuda
