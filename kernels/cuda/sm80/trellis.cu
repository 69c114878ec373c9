// Rows sm80/trellis_dequantize and sm80/trellis_matmul: a trellis.
//
// Computes: any block of W; y = x @ W + bias with FP32 sums.
// Weight layout: plain, tiles [K / 16, N / 16] as a file has them. A lane of a warp decodes eight
// codes of a tile, which lie together, to four rows of two columns.
// Work split: Dequantize has a warp for each of eight tiles, which are transformed in shared memory.
// A product has the same, with a part of K for each thread block; sums of parts go to memory, and a
// second kernel adds them in order, transforms 128 columns of a token and stores them. The parts
// depend on the shape alone, so a token's bits do not depend on the others.
// Limits: none. More tokens than kTokens decode W again, so many tokens take the dense path.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/trellis.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/layout.h"

namespace awqd::cuda {
namespace {

constexpr int kTiles = kTrellisColumns / kTrellisTile;  // a warp for each
constexpr int kTrellisThreads = 32 * kTiles;
constexpr int kTrellisTokens = 8;  // of a thread block
// Tokens of a pass, whose sums are in memory at a time.
constexpr int64_t kTokensOfPass = 64;
// Tokens from which the weight is decoded once for all of them. Not measured.
constexpr int64_t kTrellisDenseFrom = kTrellisTokens + 1;
// Thread blocks of a product for each multiprocessor, and rows of tiles that are worth one.
constexpr int64_t kBlocksPerMultiprocessor = 4;
constexpr int64_t kLeastTileRows = 8;

struct TrellisParams {
  const uint8_t* codes;
  TrellisCode code;
  int bits;
  int64_t n;
};

TrellisParams ParamsOf(const DeviceWeight& weight) {
  const QuantizationScheme& d = weight.shape.scheme;
  return {weight.codes(), d.trellis, d.bits, weight.shape.n};
}

// ---- codes --------------------------------------------------------------------------------------

__device__ __forceinline__ float Entry(TrellisCode code, uint32_t state) {
  const float sum = static_cast<float>(TrellisSum(code, state)) * TrellisUnit(code);
  return Fp16ToFloat(static_cast<uint16_t>(ToFp16x2(sum, sum)));
}

// The entries of the lane's codes 8 * lane .. 8 * lane + 7 of tile (tile_row, tile_column).
__device__ __forceinline__ void DecodeLane(const TrellisParams& p, int64_t tile_row,
                                           int64_t tile_column, float (&out)[8]) {
  const int words = 8 * p.bits, lane = threadIdx.x % 32;
  const auto* const tile = reinterpret_cast<const uint32_t*>(p.codes) +
                           (tile_row * (p.n / kTrellisTile) + tile_column) * words;
  // Bits from the begin of the first state on, at most 31 + 16 + 7 * 8; the ring has 32 * words.
  const int first = (8 * lane + 1) * p.bits - 16 + 32 * words;
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = tile[(first / 32 + i) % words];
#pragma unroll
  for (int i = 0; i < 3; ++i) word[i] = __funnelshift_l(word[i + 1], word[i], first % 32);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    out[i] = Entry(p.code, word[0] >> 16);
    word[0] = __funnelshift_l(word[1], word[0], p.bits);
    word[1] = __funnelshift_l(word[2], word[1], p.bits);
    word[2] <<= p.bits;
  }
}

// Butterflies of distance 1, 2, 4, ..., 64 over v[i] of lane l as element 32 * i + l, and the scale:
// the operations of TransformBlock (exact.h).
__device__ __forceinline__ void TransformWarp(float (&v)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
#pragma unroll
    for (float& own : v) {
      const float other = __shfl_xor_sync(0xffffffffu, own, apart);
      own = (lane & apart) != 0 ? __fsub_rn(other, own) : __fadd_rn(own, other);
    }
  }
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & apart) != 0) continue;
      const float a = v[i], b = v[i + apart];
      v[i] = __fadd_rn(a, b);
      v[i + apart] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (float& own : v) own = __fmul_rn(own, kTrellisScale);
}

__device__ __forceinline__ void StoreElementAs(DType type, void* data, int64_t at, float value) {
  if (type == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(
        type == DType::kFp16 ? ToFp16x2(value, value) : ToBf16x2(value, value));
  }
}

// ---- dequantize ---------------------------------------------------------------------------------

struct TrellisBlock {
  const float* outer;  // null: 1
  void* out;
  DType type;
  int64_t rows, cols, row_begin, col_begin;
};

__global__ __launch_bounds__(kTrellisThreads) void DequantizeTrellisKernel(TrellisParams p,
                                                                           TrellisBlock b) {
  // The padding keeps the rows of a lane's codes in other banks than its neighbours'.
  __shared__ float tiles[kTrellisTile][kTrellisColumns + 4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t block = b.col_begin / kTrellisColumns + blockIdx.x;
  const int64_t row_end = b.row_begin + b.rows, col_end = b.col_begin + b.cols;
  int64_t tile_row = b.row_begin / kTrellisTile + blockIdx.y;
  for (; tile_row * kTrellisTile < row_end; tile_row += gridDim.y) {
    float entries[8];
    DecodeLane(p, tile_row, block * kTiles + warp, entries);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int code = 8 * lane + i;
      tiles[TrellisRow(code)][warp * kTrellisTile + TrellisColumn(code)] = entries[i];
    }
    __syncthreads();
    for (int r = warp; r < kTrellisTile; r += kTiles) {
      const int64_t row = tile_row * kTrellisTile + r;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = tiles[r][32 * i + lane];
      TransformWarp(v);
      if (row < b.row_begin || row >= row_end) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t col = block * kTrellisColumns + 32 * i + lane;
        if (col < b.col_begin || col >= col_end) continue;
        const float value = b.outer == nullptr ? v[i] : __fmul_rn(v[i], b.outer[col]);
        StoreElementAs(b.type, b.out, (row - b.row_begin) * b.cols + col - b.col_begin, value);
      }
    }
    __syncthreads();
  }
}

absl::Status DequantizeTrellis(const DequantizeArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const MatrixView& out = args.out;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const TrellisBlock block = {weight.outer(), out.data,       out.dtype,     out.rows,
                              out.cols,       args.row_begin, args.col_begin};
  const auto blocks = [](int64_t begin, int64_t count, int64_t size) {
    return CeilDiv(begin + count, size) - begin / size;
  };
  const LaunchConfig config{.grid = GridOfRows(blocks(args.col_begin, out.cols, kTrellisColumns),
                                               blocks(args.row_begin, out.rows, kTrellisTile), 1),
                            .block = kTrellisThreads,
                            .stream = stream};
  return Launch<DequantizeTrellisKernel>("sm80/trellis_dequantize", config, ParamsOf(weight),
                                         block);
}

// ---- products -----------------------------------------------------------------------------------

struct TrellisProduct {
  const void* x;
  DType x_type;
  int64_t x_stride, tokens, tile_rows;
  int parts;
  float* sums;  // [parts, tokens, n]
};

__device__ __forceinline__ float LoadAs(DType type, const void* data, int64_t at) {
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return type == DType::kFp16 ? Fp16ToFloat(bits)
                              : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Tiles of 128 columns and of rows part, part + parts ... Rows of x beyond the last are the last
// one.
template <int kTokens>
__global__ __launch_bounds__(kTrellisThreads) void TrellisProductKernel(TrellisParams p,
                                                                        TrellisProduct product) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tile_column = blockIdx.x * int64_t{kTiles} + warp;
  const int part = blockIdx.z;
  const int64_t first = blockIdx.y * int64_t{kTokens};
  float sums[kTokens][2] = {};
  for (int64_t tile_row = part; tile_row < product.tile_rows; tile_row += product.parts) {
    float entries[8];
    DecodeLane(p, tile_row, tile_column, entries);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t token = min(first + t, product.tokens - 1);
      const int64_t at = token * product.x_stride + tile_row * kTrellisTile;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = LoadAs(product.x_type, product.x, at + TrellisRow(8 * lane + i));
        sums[t][0] = __fmaf_rn(x, entries[i], sums[t][0]);
        sums[t][1] = __fmaf_rn(x, entries[i + 4], sums[t][1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[t][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 != 0 || first + t >= product.tokens) continue;
      const int64_t col = tile_column * kTrellisTile + lane / 4 + 8 * half;
      product.sums[(part * product.tokens + first + t) * p.n + col] = sum;
    }
  }
}

struct TrellisResult {
  const float* outer;    // null: 1
  const float* x_scale;  // null: 1
  const float* bias;     // null: 0
  void* y;
  DType type;
};

// A warp has 128 columns of a token.
__global__ __launch_bounds__(32) void TrellisResultKernel(TrellisProduct product, int64_t n,
                                                          TrellisResult result) {
  const int lane = threadIdx.x;
  const int64_t token = blockIdx.y, first = blockIdx.x * int64_t{kTrellisColumns} + lane;
  float v[4] = {};
  for (int part = 0; part < product.parts; ++part) {
    const float* const sums = product.sums + (part * product.tokens + token) * n + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += sums[32 * i];
  }
  TransformWarp(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t col = first + 32 * i;
    float sum = v[i];
    if (result.outer != nullptr) sum *= result.outer[col];
    if (result.x_scale != nullptr) sum *= result.x_scale[token];
    if (result.bias != nullptr) sum += result.bias[col];
    StoreElementAs(result.type, result.y, token * n + col, sum);
  }
}

// Parts of K: more where columns alone do not fill the GPU.
int PartsOf(const WeightShape& shape, const DeviceInfo& device) {
  const int64_t columns = shape.n / kTrellisColumns;
  const int64_t wanted = CeilDiv(kBlocksPerMultiprocessor * device.sm_count, columns);
  const int64_t most = CeilDiv(shape.k / kTrellisTile, kLeastTileRows);
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, most)));
}

int64_t TrellisWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return PartsOf(shape, device) * std::min(m, kTokensOfPass) * shape.n *
         static_cast<int64_t>(sizeof(float));
}

absl::Status MultiplyTrellis(const TrellisParams& p, const TrellisProduct& product,
                             const TrellisResult& result, StreamView stream) {
  constexpr absl::string_view kName = "sm80/trellis_matmul";
  const auto columns = static_cast<unsigned>(p.n / kTrellisColumns);
  const auto tokens = static_cast<unsigned>(product.tokens);
  const bool one = tokens == 1;
  const LaunchConfig config{
      .grid = dim3(columns, one ? 1 : CeilDiv(tokens, unsigned{kTrellisTokens}), product.parts),
      .block = kTrellisThreads,
      .stream = stream};
  AWQD_RETURN_IF_ERROR(
      one ? Launch<TrellisProductKernel<1>>(kName, config, p, product)
          : Launch<TrellisProductKernel<kTrellisTokens>>(kName, config, p, product));
  const LaunchConfig last{.grid = dim3(columns, tokens), .block = 32, .stream = stream};
  return Launch<TrellisResultKernel>(kName, last, product, p.n, result);
}

absl::Status TrellisMatmul(const MatmulArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const ConstMatrixView& x = args.x;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const int64_t stride = args.x_stride == 0 ? x.cols : args.x_stride;
  for (int64_t first = 0; first < x.rows; first += kTokensOfPass) {
    const TrellisProduct product = {
        .x = static_cast<const char*>(x.data) + first * stride * SizeOf(x.dtype),
        .x_type = x.dtype,
        .x_stride = stride,
        .tokens = std::min(kTokensOfPass, x.rows - first),
        .tile_rows = weight.shape.k / kTrellisTile,
        .parts = PartsOf(weight.shape, weight.device->info()),
        .sums = static_cast<float*>(args.workspace)};
    const TrellisResult result = {
        .outer = weight.outer(),
        .x_scale = args.x_scale == nullptr ? nullptr : args.x_scale + first,
        .bias = args.bias,
        .y = static_cast<char*>(args.y.data) + first * args.y.cols * SizeOf(args.y.dtype),
        .type = args.y.dtype};
    AWQD_RETURN_IF_ERROR(MultiplyTrellis(ParamsOf(weight), product, result, stream));
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
      .min_arch = 75,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kTrellisDenseFrom; },
      .batch_invariant = true,
      .priority = 10,
      .workspace_bytes = TrellisWorkspace,
      .matmul = TrellisMatmul};
  return row;
}

}  // namespace awqd::cuda
