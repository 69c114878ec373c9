// Rows sm80/trellis_dequantize and sm80/trellis_matmul: a trellis.
//
// Computes: any block of W; y = x @ W + bias with FP32 sums.
// Weight layout: plain, tiles [K / 16, N / 16] as a file has them. A lane of a warp decodes eight
// codes of a tile, which lie together: its share of the A operand of m16n8k16.
// Work split: Dequantize has a warp for eight tiles, which are transformed in registers. For products
// see block_product.cuh; their sums stay in memory, and a second kernel adds those of segments in
// order, transforms 128 columns of a token and stores them.
// Limits: none. Each tile of tokens decodes W again, so many tokens take the dense path.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/trellis_tiles.cuh"
#include "kernels/cuda/sm80/block_product.cuh"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/layout.h"

namespace awqd::cuda {
namespace {

constexpr int kTiles = kTrellisColumns / kTrellisTile;  // that are transformed together
// Tokens from which the weight is decoded once for all of them.
constexpr int64_t kTrellisDenseFrom = 33;

// ---- dequantize ---------------------------------------------------------------------------------

constexpr int kStrips = 8;  // of a thread block, a warp for each

struct TrellisBlock {
  const uint8_t* codes;
  int bits;
  int64_t n;
  const float* outer;  // null: 1
  void* out;
  int64_t rows, cols, row_begin, col_begin;
  bool wide;  // rows of `out` and its first column that is a multiple of 128 begin on 16 bytes
};

// Butterflies of distance 1, 2, 4, ..., 64 along columns, and the scale: the operations of
// TransformBlock (exact.h). v[t][i] is code i of the lane's eight in tile t: column 16 t + 8 (i / 4)
// + lane / 4.
__device__ __forceinline__ void TransformStrip(float (&v)[kTiles][8]) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (auto& tile : v) {
#pragma unroll
      for (float& own : tile) {
        own = __fmaf_rn(own, sign, __shfl_xor_sync(0xffffffffu, own, lanes));
      }
    }
  }
  const auto butterfly = [](float& a, float& b) {
    const float sum = __fadd_rn(a, b);
    b = __fsub_rn(a, b);
    a = sum;
  };
#pragma unroll
  for (auto& tile : v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) butterfly(tile[i], tile[i + 4]);
  }
#pragma unroll
  for (int apart = 1; apart < kTiles; apart *= 2) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if ((t & apart) != 0) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) butterfly(v[t][i], v[t + apart][i]);
    }
  }
}

template <DType kType>
using BitsOf = std::conditional_t<kType == DType::kFp32, float, uint16_t>;

// Strips of 16 rows of 128 columns. Elements go through shared memory, from which the warp writes
// whole lines.
template <TrellisCode kCode, DType kType>
__global__ __launch_bounds__(32 * kStrips) void DequantizeTrellisKernel(
    const __grid_constant__ TrellisBlock p) {
  using Bits = BitsOf<kType>;
  constexpr int kOfChunk = 16 / static_cast<int>(sizeof(Bits));
  constexpr int kChunks = kTrellisColumns / kOfChunk;  // of a row
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* const strip = reinterpret_cast<uint4*>(shared) + warp * kTrellisTile * kChunks;
  // Chunks of a row are turned, so that the lanes of a quad, two rows apart, use banks of their own.
  const auto chunk_at = [&](int row, int chunk) {
    return strip + row * kChunks + (chunk ^ row / 2 % 4 * (kChunks / 16));
  };
  const int64_t first_col = (p.col_begin / kTrellisColumns + blockIdx.x) * int64_t{kTrellisColumns};
  const int64_t row_end = p.row_begin + p.rows, col_end = p.col_begin + p.cols;
  const LaneWindow window(p.bits);
  int64_t tile_row = p.row_begin / kTrellisTile + blockIdx.y * int64_t{kStrips} + warp;
  for (; tile_row * kTrellisTile < row_end; tile_row += gridDim.y * int64_t{kStrips}) {
    const auto* tile = reinterpret_cast<const uint32_t*>(p.codes) +
                       (tile_row * p.n + first_col) / kTrellisTile * 8 * p.bits;
    float v[kTiles][8];
#pragma unroll
    for (int t = 0; t < kTiles; ++t, tile += 8 * p.bits) {
      uint32_t pairs[4];
      window.Decode<kCode>(tile, pairs);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[t][i] = Fp16ToFloat(static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16)));
      }
    }
    TransformStrip(v);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = TrellisRow(i) + lane % 4 * 2;
        const int col = t * kTrellisTile + i / 4 * 8 + lane / 4;
        float value = __fmul_rn(v[t][i], kTrellisScale);
        if (p.outer != nullptr) value = __fmul_rn(value, p.outer[first_col + col]);
        auto* const to = reinterpret_cast<Bits*>(chunk_at(row, col / kOfChunk)) + col % kOfChunk;
        StoreAs(kType, to, 0, value);
      }
    }
    __syncwarp();
    for (int i = lane; i < kTrellisTile * kChunks; i += 32) {
      const int64_t row = tile_row * kTrellisTile + i / kChunks;
      const int64_t col = first_col + i % kChunks * int64_t{kOfChunk};
      if (row < p.row_begin || row >= row_end) continue;
      const uint4 chunk = *chunk_at(i / kChunks, i % kChunks);
      Bits* const out = static_cast<Bits*>(p.out) + (row - p.row_begin) * p.cols;
      if (p.wide && col >= p.col_begin && col + kOfChunk <= col_end) {
        *reinterpret_cast<uint4*>(out + (col - p.col_begin)) = chunk;
        continue;
      }
      const auto* const elements = reinterpret_cast<const Bits*>(&chunk);
#pragma unroll
      for (int e = 0; e < kOfChunk; ++e) {
        if (col + e >= p.col_begin && col + e < col_end) out[col + e - p.col_begin] = elements[e];
      }
    }
    __syncwarp();
  }
}

absl::Status DequantizeTrellis(const DequantizeArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const MatrixView& out = args.out;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const int64_t size = SizeOf(out.dtype);
  const auto begin = reinterpret_cast<uintptr_t>(out.data) - args.col_begin * size;
  const TrellisBlock p = {.codes = weight.codes(),
                          .bits = weight.shape.scheme.bits,
                          .n = weight.shape.n,
                          .outer = weight.outer(),
                          .out = out.data,
                          .rows = out.rows,
                          .cols = out.cols,
                          .row_begin = args.row_begin,
                          .col_begin = args.col_begin,
                          .wide = begin % 16 == 0 && out.cols * size % 16 == 0};
  const auto blocks = [](int64_t first, int64_t count, int64_t of) {
    return CeilDiv(first + count, of) - first / of;
  };
  const int64_t strips = blocks(args.row_begin, out.rows, kTrellisTile);
  const LaunchConfig config{.grid = GridOfRows(blocks(args.col_begin, out.cols, kTrellisColumns),
                                               CeilDiv(strips, int64_t{kStrips}), 1),
                            .block = 32 * kStrips,
                            .shared_bytes = kStrips * kTrellisTile * kTrellisColumns * size,
                            .stream = stream};
  return ForTrellisCode(weight.shape.scheme.trellis, [&]<TrellisCode kCode>() {
    return ForFloatingType(out.dtype, [&]<DType kType>() {
      return Launch<DequantizeTrellisKernel<kCode, kType>>("sm80/trellis_dequantize", config, p);
    });
  });
}

// ---- products -----------------------------------------------------------------------------------

template <TrellisCode kCode>
struct TrellisDecoder {
  struct Weight {
    int bits;
    int64_t row_bytes;  // of 16 rows of W
  };
  static constexpr bool kFinishes = false;
  static constexpr int kSteps = kBlockRows / kTrellisTile;

  static constexpr __host__ __device__ int TableBytes() { return 0; }
  static __host__ __device__ int TileBytes(const Weight& w) { return 32 * w.bits; }
  static __host__ __device__ int CopyBytes(const Weight& w) {
    return kSteps * kWarpTiles * TileBytes(w);
  }
  static __device__ __forceinline__ void FillTable(uint8_t*) {}
  static __device__ __forceinline__ void Copy(const Weight& w, const uint8_t* records,
                                              const CommonParams& shape, int block, int group,
                                              uint32_t to) {
    // 32 columns of each 16 rows: 64 * bits bytes.
    const int chunks = kWarpTiles * TileBytes(w) / 16;
    const int rows = static_cast<int>(min(int64_t{kSteps}, shape.k / 16 - int64_t{block} * kSteps));
    const uint8_t* const from = records + int64_t{block} * kSteps * w.row_bytes +
                                int64_t{group} * kWarpTiles * TileBytes(w);
    for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
      CopyAsync16(to + 16 * i, from + i / chunks * w.row_bytes + i % chunks * 16);
    }
  }

  // Tokens lie in the order of fragments: 16 bytes, a lane's pairs of two steps, for each lane, eight
  // tokens and two steps. The lane's place is turned with the steps, so that the threads that store
  // at a time use all banks.
  template <int kEights>
  static __device__ __forceinline__ void StoreChunk(uint4* tokens, int token, int block, uint4 v) {
    const int chunk = threadIdx.x % 32, steps = chunk / 4;
    auto* const to = reinterpret_cast<uint32_t*>(
                         tokens + ((block * 8 + steps) * kEights + token / kEight) * 32) +
                     chunk % 4;
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[4 * (token % kEight * 4 + i ^ steps)] = pairs[i];
  }

  template <int kEights, class Release>
  static __device__ __forceinline__ void Add(const Weight& w, const uint8_t*, const uint8_t* copy,
                                             const uint4* tokens, int rows, Release release,
                                             float (&sums)[kWarpTiles][kEights][4],
                                             float (&scales)[kWarpTiles][2]) {
    const int tile_words = TileBytes(w) / 4, lane = threadIdx.x % 32;
    const auto* tiles = reinterpret_cast<const uint32_t*>(copy);
    const LaneWindow window(w.bits);
#pragma unroll 1
    for (int steps = 0; steps < kSteps / 2 && 32 * steps < rows; ++steps) {
      uint32_t a[2][kWarpTiles][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i, tiles += tile_words) {
          window.template Decode<kCode>(tiles, a[s][i]);
        }
      }
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const uint4 x = tokens[(steps * kEights + e) * 32 + (lane ^ steps)];
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) {
          const uint32_t first[4] = {a[0][i][0], a[0][i][2], a[0][i][1], a[0][i][3]};
          const uint32_t second[4] = {a[1][i][0], a[1][i][2], a[1][i][1], a[1][i][3]};
          MmaFp16(sums[i][e], first, x.x, x.y);
          // 16 rows are left over: what the copy holds beyond them is not of W.
          if (32 * steps + 16 < rows) MmaFp16(sums[i][e], second, x.z, x.w);
        }
      }
    }
    // The other warps compute while the next block comes.
    release();
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) scales[i][0] = scales[i][1] = 1;
  }
};

struct TrellisResult {
  const float* sums;  // [segments, tokens, n]
  int segments;
  int64_t tokens, n;
  const float* outer;    // null: 1
  const float* x_scale;  // null: 1
  const float* bias;     // null: 0
  void* y;
  DType type;
  bool aligned;  // y lies on a boundary of 16 bytes
};

// A warp has 128 columns of a token.
__global__ __launch_bounds__(32) void TrellisResultKernel(TrellisResult p) {
  const int64_t token = blockIdx.y;
  const int64_t first = blockIdx.x * int64_t{kTrellisColumns} + 4 * threadIdx.x;
  WaitForEarlierKernels();
  LaunchDependents();
  float v[4] = {};
  for (int segment = 0; segment < p.segments; ++segment) {
    const float4 more =
        *reinterpret_cast<const float4*>(p.sums + (segment * p.tokens + token) * p.n + first);
    v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
  }
  TransformWarp(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (p.outer != nullptr) v[i] *= p.outer[first + i];
    if (p.x_scale != nullptr) v[i] *= p.x_scale[token];
    if (p.bias != nullptr) v[i] += p.bias[first + i];
  }
  StoreFourAs(p.type, p.y, token * p.n + first, v, 4, p.aligned);
}

int64_t TrellisWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return PartialsBytes(shape, SegmentsOf(shape, device), m);
}

absl::Status TrellisMatmul(const MatmulArgs& args, StreamView stream) {
  constexpr absl::string_view kName = "sm80/trellis_matmul";
  const DeviceWeight& weight = *args.weight;
  const DeviceInfo& device = weight.device->info();
  const WeightShape& shape = weight.shape;
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const int bits = shape.scheme.bits, tile_bytes = 32 * bits;
  const int segments = SegmentsOf(shape, device);
  for (int64_t first = 0; first < args.x.rows; first += kTokensOfLaunch) {
    const int64_t rows = std::min(kTokensOfLaunch, args.x.rows - first);
    const BlockPlan plan = PlanBlocks(shape, device, rows, segments, 0,
                                      TrellisDecoder<TrellisCode::k3Inst>::CopyBytes({bits, 0}));
    CommonParams p = ParamsOfRows(args, shape, plan, first);
    p.whole = {.records = weight.codes(), .end_token = static_cast<int32_t>(rows)};
    p.count = static_cast<int>(CeilDiv(rows, int64_t{plan.Tokens()}));
    p.partials = static_cast<float*>(args.workspace);
    AWQD_RETURN_IF_ERROR(ForTrellisCode(shape.scheme.trellis, [&]<TrellisCode kCode>() {
      return LaunchBlocks<TrellisDecoder<kCode>>({p, {bits, shape.n / kTrellisTile * tile_bytes}},
                                                 plan, device, kName, stream);
    }));
    const bool aligned = reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
    const TrellisResult result = {p.partials, segments,  rows, shape.n,  weight.outer(),
                                  p.x_scale,  args.bias, p.y,  p.y_type, aligned};
    const LaunchConfig last{
        .grid = dim3(static_cast<unsigned>(shape.n / kTrellisColumns), static_cast<unsigned>(rows)),
        .block = 32,
        .stream = stream,
        .attributes = OverlappedLaunch(device)};
    AWQD_RETURN_IF_ERROR(Launch<TrellisResultKernel>(kName, last, result));
  }
  return absl::OkStatus();
}

}  // namespace

const KernelRow& TrellisDequantizeRow() {
  static const KernelRow row = {.name = "sm80/trellis_dequantize",
                                .op = Op::kDequantize,
                                .device = DeviceKind::kCuda,
                                .claims = kTrellis,
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .priority = 10,
                                .dequantize = DequantizeTrellis};
  return row;
}

const KernelRow& TrellisMatmulRow() {
  static const KernelRow row = {
      .name = "sm80/trellis_matmul",
      .op = Op::kMatmul,
      .device = DeviceKind::kCuda,
      .claims = kTrellis,
      .input_form = InputForm::kTensorCore,
      .layout = &kPlainLayout,
      .min_arch = 80,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kTrellisDenseFrom; },
      .batch_invariant = true,
      .priority = 10,
      .workspace_bytes = TrellisWorkspace,
      .matmul = TrellisMatmul};
  return row;
}

}  // namespace awqd::cuda
