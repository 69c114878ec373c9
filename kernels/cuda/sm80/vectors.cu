// Rows sm80/vectors_dequantize, sm80/vectors_matmul and sm80/vectors_grouped: vector codes.
//
// Computes: any block of W; y = x @ W + bias with FP32 sums; the same for a stack of experts.
// Weight layout: plain, blocks [K / 256, N] as a file has them. A lane of a warp decodes eight
// elements of a block, so a warp reads a block in one piece and the x that belongs to it.
// Work split of products: a warp has one column and a part of K, blocks b, b + split ...; thread
// blocks have kWarps / split columns by up to kTokens tokens. Parts are added in order. The split
// depends on the shape alone, so a token's bits do not depend on the others.
// Limits: none. More tokens than kTokens decode W again, so many tokens take the dense path.
#include <algorithm>

#include "kernels/base/codebooks.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/layout.h"

namespace awqd::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kProductThreads = 32 * kWarps;
// Warps for which parts of K are made smaller.
constexpr int kWarpsPerMultiprocessor = 32;
// Each kTokens tokens decode W once more. Not measured.
constexpr int64_t kMostFusedTokens = 16;

// ---- codes --------------------------------------------------------------------------------------

template <VectorCode kCode>
__device__ const auto kBook = MakeCodebook<kCode>();

// Byte i as a signed integer: 2^23 + 128 + byte is a float whose lowest bits are the byte.
__device__ __forceinline__ float SignedByte(uint32_t flipped, int i) {
  return __uint_as_float(Prmt(flipped, 0x4b000000u, 0x7440u | i)) - 8388736.0f;
}

struct EightFloats {
  float v[8];
};
__device__ __forceinline__ EightFloats ToFloats(const EightElements& eight) {
  EightFloats out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.v[i] = SignedByte(eight.low ^ 0x80808080u, i);
    out.v[i + 4] = SignedByte(eight.high ^ 0x80808080u, i);
  }
  return out;
}

template <VectorCode kCode>
__device__ __forceinline__ float Scale(const uint8_t* block, int v) {
  return ScaleOfSixteen<kCode>(block, Fp16ToFloat(BlockScale<kCode>(block)), v / 2);
}

// Calls fn.operator()<kCode>() for the code.
template <class Fn>
absl::Status ForVectorCode(VectorCode code, Fn fn) {
  switch (code) {
    case VectorCode::kIq2Xxs:
      return fn.template operator()<VectorCode::kIq2Xxs>();
    case VectorCode::kIq2Xs:
      return fn.template operator()<VectorCode::kIq2Xs>();
    case VectorCode::kIq2S:
      return fn.template operator()<VectorCode::kIq2S>();
    case VectorCode::kIq3Xxs:
      return fn.template operator()<VectorCode::kIq3Xxs>();
    case VectorCode::kIq3S:
      return fn.template operator()<VectorCode::kIq3S>();
    case VectorCode::kIq1S:
      return fn.template operator()<VectorCode::kIq1S>();
    default:
      return fn.template operator()<VectorCode::kIq1M>();
  }
}

template <DType kType>
__device__ __forceinline__ void Store(void* data, int64_t at, float value) {
  if constexpr (kType == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(
        kType == DType::kFp16 ? ToFp16x2(value, value) : ToBf16x2(value, value));
  }
}

__device__ __forceinline__ void StoreAs(DType type, void* data, int64_t at, float value) {
  if (type == DType::kFp32) {
    Store<DType::kFp32>(data, at, value);
  } else if (type == DType::kFp16) {
    Store<DType::kFp16>(data, at, value);
  } else {
    Store<DType::kBf16>(data, at, value);
  }
}

// ---- dequantize ---------------------------------------------------------------------------------

constexpr int kVectorsOfBlock = 8;  // of a thread block, with 32 columns

struct DequantizeParams {
  const uint8_t* codes;
  const float* outer;
  void* out;
  int64_t n, rows, cols, row_begin, col_begin;
};

template <VectorCode kCode, DType kType>
__global__ __launch_bounds__(32 * kVectorsOfBlock) void DequantizeKernel(DequantizeParams p) {
  constexpr int64_t kBytes = VectorBlockBytes(kCode);
  const int64_t col = blockIdx.x * int64_t{32} + threadIdx.x;
  if (col >= p.cols) return;
  const int64_t column = p.col_begin + col, row_end = p.row_begin + p.rows;
  const float outer = p.outer == nullptr ? 1 : p.outer[column];
  int64_t vector = p.row_begin / 8 + blockIdx.y * int64_t{kVectorsOfBlock} + threadIdx.y;
  for (; 8 * vector < row_end; vector += gridDim.y * int64_t{kVectorsOfBlock}) {
    const uint8_t* const block = p.codes + (vector / 32 * p.n + column) * kBytes;
    const int v = static_cast<int>(vector % 32);
    const EightFloats eight = ToFloats(DecodeEight<kCode>(kBook<kCode>, block, v));
    const float scale = Scale<kCode>(block, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t row = 8 * vector + i;
      if (row < p.row_begin || row >= row_end) continue;
      // Two roundings, as in exact.h; the first is none.
      Store<kType>(p.out, (row - p.row_begin) * p.cols + col,
                   __fmul_rn(__fmul_rn(eight.v[i], scale), outer));
    }
  }
}

absl::Status Dequantize(const DequantizeArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const MatrixView& out = args.out;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const DequantizeParams p = {weight.codes(), weight.outer(), out.data,       weight.shape.n,
                              out.rows,       out.cols,       args.row_begin, args.col_begin};
  const int64_t vectors = CeilDiv(args.row_begin + out.rows, int64_t{8}) - args.row_begin / 8;
  LaunchConfig config{.grid = GridOfRows(out.cols, CeilDiv(vectors, int64_t{kVectorsOfBlock}), 32),
                      .block = dim3(32, kVectorsOfBlock),
                      .stream = stream};
  return ForVectorCode(weight.shape.scheme.vector, [&]<VectorCode kCode>() {
    return ForFloatingType(out.dtype, [&]<DType kType>() {
      return Launch<DequantizeKernel<kCode, kType>>("sm80/vectors_dequantize", config, p);
    });
  });
}

// ---- products -----------------------------------------------------------------------------------

struct ProductParams {
  // [count], or null: one for every kTokens rows of `whole`.
  const GroupedTile* tiles;
  GroupedTile whole;
  int count;
  const void* x;
  int64_t x_stride;
  const float* x_scale;  // null: 1
  void* y;
  DType y_type;
  int64_t n;
  int blocks;  // of a column
  int split;   // warps that share a column: 1, 2, 4 or 8
};

// Eight 16-bit elements of x times eight of W.
template <DType kX>
__device__ __forceinline__ float Dot(const uint4& x, const EightFloats& w) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = kX == DType::kBf16 ? __uint_as_float(words[i] << 16)
                                         : Fp16ToFloat(static_cast<uint16_t>(words[i]));
    const float high = kX == DType::kBf16 ? __uint_as_float(words[i] & 0xffff0000u)
                                          : Fp16ToFloat(static_cast<uint16_t>(words[i] >> 16));
    sum = __fmaf_rn(low, w.v[2 * i], sum);
    sum = __fmaf_rn(high, w.v[2 * i + 1], sum);
  }
  return sum;
}

// Adds to each token's sum the blocks part, part + split ... of the column, a lane its elements.
// Rows beyond the last are the last one.
template <VectorCode kCode, DType kX, int kTokens>
__device__ __forceinline__ void AddBlocks(const ProductParams& p, const GroupedTile& tile,
                                          int64_t col, int part, float (&sums)[kTokens]) {
  constexpr int64_t kBytes = VectorBlockBytes(kCode);
  const int lane = threadIdx.x % 32;
  const uint16_t* rows[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int64_t row = min(tile.first_token + t, tile.end_token - 1);
    rows[t] = static_cast<const uint16_t*>(p.x) + row * p.x_stride + 8 * lane;
  }
#pragma unroll 2
  for (int b = part; b < p.blocks; b += p.split) {
    const uint8_t* const block = tile.records + (b * p.n + col) * kBytes;
    const EightFloats eight = ToFloats(DecodeEight<kCode>(kBook<kCode>, block, lane));
    const float scale = Scale<kCode>(block, lane);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const uint4 x = *reinterpret_cast<const uint4*>(rows[t] + int64_t{b} * kVectorBlock);
      sums[t] = __fmaf_rn(scale, Dot<kX>(x, eight), sums[t]);
    }
  }
}

template <VectorCode kCode, DType kX, int kTokens>
__global__ __launch_bounds__(kProductThreads) void ProductKernel(ProductParams p) {
  __shared__ float partials[kWarps][kTokens];
  const int warp = threadIdx.x / 32, columns = kWarps / p.split;
  const int64_t first = blockIdx.x * int64_t{columns}, col = first + warp / p.split;
  for (int i = blockIdx.y; i < p.count; i += gridDim.y) {
    GroupedTile tile = p.whole;
    if (p.tiles != nullptr) {
      tile = p.tiles[i];
      if (tile.first_token >= tile.end_token) continue;
    } else {
      tile.first_token = i * kTokens;
    }
    float sums[kTokens] = {};
    if (col < p.n) AddBlocks<kCode, kX, kTokens>(p, tile, col, warp % p.split, sums);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        sums[t] += __shfl_xor_sync(0xffffffffu, sums[t], lanes);
      }
      if (threadIdx.x % 32 == 0) partials[warp][t] = sums[t];
    }
    __syncthreads();
    const int c = threadIdx.x / kTokens, t = threadIdx.x % kTokens;
    const int64_t row = tile.first_token + t;
    if (c < columns && first + c < p.n && row < tile.end_token) {
      float sum = 0;
      for (int s = 0; s < p.split; ++s) sum += partials[c * p.split + s][t];
      if (tile.outer != nullptr) sum *= tile.outer[first + c];
      if (p.x_scale != nullptr) sum *= p.x_scale[row];
      if (tile.bias != nullptr) sum += tile.bias[first + c];
      StoreAs(p.y_type, p.y, (tile.y_shift + row) * p.n + first + c, sum);
    }
    __syncthreads();
  }
}

// How many warps share a column: more where columns alone do not fill the GPU.
int SplitOf(const WeightShape& shape, const DeviceInfo& device) {
  const int64_t blocks = shape.k / kVectorBlock;
  const int64_t warps = int64_t{kWarpsPerMultiprocessor} * device.sm_count;
  int split = 1;
  while (split < kWarps && 2 * split <= blocks && shape.n * split < warps) split *= 2;
  return split;
}

// Rows of a tile: 1, 4 or 8.
int TokensOf(int64_t rows) { return rows <= 1 ? 1 : rows <= 4 ? 4 : 8; }

absl::Status LaunchProduct(const ProductParams& p, const WeightShape& shape, DType x, int tokens,
                           absl::string_view name, StreamView stream) {
  const LaunchConfig config{
      .grid = GridOfRows(shape.n * p.split, p.count, kWarps),  // a row of warps for each tile
      .block = kProductThreads,
      .stream = stream};
  return ForVectorCode(shape.scheme.vector, [&]<VectorCode kCode>() {
    const auto run = [&]<DType kX>() {
      if (tokens == 1) return Launch<ProductKernel<kCode, kX, 1>>(name, config, p);
      if (tokens == 4) return Launch<ProductKernel<kCode, kX, 4>>(name, config, p);
      return Launch<ProductKernel<kCode, kX, 8>>(name, config, p);
    };
    return x == DType::kBf16 ? run.template operator()<DType::kBf16>()
                             : run.template operator()<DType::kFp16>();
  });
}

ProductParams ParamsOf(const DeviceWeight& weight, const ConstMatrixView& x, int64_t x_stride,
                       const float* x_scale, const MatrixView& y) {
  const WeightShape& shape = weight.shape;
  return {.x = x.data,
          .x_stride = x_stride == 0 ? x.cols : x_stride,
          .x_scale = x_scale,
          .y = y.data,
          .y_type = y.dtype,
          .n = shape.n,
          .blocks = static_cast<int>(shape.k / kVectorBlock),
          .split = SplitOf(shape, weight.device->info())};
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const int tokens = TokensOf(args.x.rows);
  ProductParams p = ParamsOf(weight, args.x, args.x_stride, args.x_scale, args.y);
  p.whole = {.records = weight.codes(),
             .outer = weight.outer(),
             .bias = args.bias,
             .end_token = static_cast<int32_t>(args.x.rows)};
  p.count = static_cast<int>(CeilDiv(args.x.rows, int64_t{tokens}));
  return LaunchProduct(p, weight.shape, args.x.dtype, tokens, "sm80/vectors_matmul", stream);
}

int TokensOf(const GroupedArgs& args) { return TokensOf(CeilDiv(args.rows(), args.active())); }

std::string Table(const GroupedArgs& args) { return GroupedTiles(args, TokensOf(args)); }

absl::Status Grouped(const GroupedArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.experts.front();
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const int tokens = TokensOf(args);
  ProductParams p = ParamsOf(weight, args.x, args.x_stride, args.x_scale, args.y);
  p.tiles = static_cast<const GroupedTile*>(args.table);
  p.count = static_cast<int>(GroupedTileCount(args, tokens));
  return LaunchProduct(p, weight.shape, args.x.dtype, tokens, "sm80/vectors_grouped", stream);
}

}  // namespace

const KernelRow& VectorsDequantizeRow() {
  static const KernelRow row = {.name = "sm80/vectors_dequantize",
                                .op = Op::kDequantize,
                                .device = DeviceKind::kCuda,
                                .claims = kVectorCodes,
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .priority = 10,
                                .dequantize = Dequantize};
  return row;
}

const KernelRow& VectorsMatmulRow() {
  static const KernelRow row = {
      .name = "sm80/vectors_matmul",
      .op = Op::kMatmul,
      .device = DeviceKind::kCuda,
      .claims = kVectorCodes,
      .input_form = InputForm::kTensorCore,
      .layout = &kPlainLayout,
      .min_arch = 75,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kMostFusedTokens + 1; },
      .batch_invariant = true,
      .priority = 10,
      .matmul = Matmul};
  return row;
}

const KernelRow& VectorsGroupedRow() {
  static const KernelRow row = {
      .name = "sm80/vectors_grouped",
      .op = Op::kGroupedMatmul,
      .device = DeviceKind::kCuda,
      .claims = kVectorCodes,
      .input_form = InputForm::kTensorCore,
      .layout = &kPlainLayout,
      .min_arch = 75,
      .max_m = kMostFusedTokens,
      .batch_invariant = true,
      .priority = 10,
      .grouped_table = Table,
      .grouped_tile = [](const GroupedArgs& args) -> int64_t { return TokensOf(args); },
      .grouped = Grouped};
  return row;
}

}  // namespace awqd::cuda
