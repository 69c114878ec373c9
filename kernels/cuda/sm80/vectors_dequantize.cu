// Row sm80/vectors_dequantize: any block of W of vector codes, as FP16, BF16 or FP32.
//
// Weight layout: vectors. Work split: a thread block has some rounds, each 128 rows of 64 columns. A
// warp decodes two of the four vectors of a tile's groups; elements go through shared memory, from
// which the block writes whole lines.
// Limits: none.
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/common/vector_tiles.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = vectors::kRecordColumns;
constexpr int kRows = kVectorBlock / 2;  // of a round
// Rounds of a thread block: filling shared memory with the codebook takes time.
constexpr int64_t kRoundsOfBlock = 8;

struct DequantizeParams {
  const uint8_t* codes;
  const float* outer;  // null: 1
  void* out;
  int64_t n, blocks;  // of the weight; blocks of a column
  int64_t rows, cols, row_begin, col_begin;
  bool wide;  // rows of `out` and its first whole record begin on 16 bytes
};

template <DType kType>
struct Element {
  using Bits = uint16_t;
};
template <>
struct Element<DType::kFp32> {
  using Bits = float;
};

template <DType kType>
__device__ __forceinline__ typename Element<kType>::Bits Rounded(float value) {
  if constexpr (kType == DType::kFp32) {
    return value;
  } else {
    return static_cast<uint16_t>(kType == DType::kFp16 ? ToFp16x2(value, value)
                                                       : ToBf16x2(value, value));
  }
}

// A round. 16 bytes of a row are turned with its group of 32 rows, so that the lanes of a quad, whose
// rows are 32 apart, store to banks of their own.
template <DType kType>
class Block {
 public:
  using Bits = typename Element<kType>::Bits;
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(Bits));
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;  // of a row

  __device__ __forceinline__ explicit Block(uint8_t* shared) : shared_(shared) {}

  __device__ __forceinline__ uint4* Chunk(int row, int chunk) {
    constexpr int kPer = kChunks / 8;  // neighbours stay together
    return reinterpret_cast<uint4*>(shared_ + row * kRowBytes) + (chunk ^ row / 32 % 8 * kPer);
  }
  __device__ __forceinline__ Bits* At(int row, int column) {
    constexpr int kOfChunk = 16 / static_cast<int>(sizeof(Bits));
    return reinterpret_cast<Bits*>(Chunk(row, column / kOfChunk)) + column % kOfChunk;
  }

 private:
  uint8_t* const shared_;
};

// Vectors 2 kHalf and the next of columns lane / 4 and 8 further of a tile.
template <VectorCode kCode, DType kType, bool kOuter, int kHalf>
__device__ __forceinline__ void DecodeHalf(const LaneWords<kCode>& words, const uint32_t* entries,
                                           int tile, const float (&units)[2],
                                           const float (&outer)[2], Block<kType> block) {
  const LaneGroup<kCode, 0> first(words);
  const LaneGroup<kCode, 1> second(words);
  const int lane = threadIdx.x % 32;
  const auto store = [&]<int kVector>() {
    uint32_t pairs[2][4];
    first.template Decode<kVector>(entries, pairs[0]);
    second.template Decode<kVector>(entries, pairs[1]);
    const int row = 32 * (lane % 4) + 8 * kVector;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      auto* const to = block.At(row, tile * vectors::kTileColumns + lane / 4 + 8 * c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<uint16_t>(pairs[c][i / 2] >> (i % 2 * 16));
        // Two roundings, as in exact.h; the first is none.
        const float value = __fmul_rn(Fp16ToFloat(bits), units[c]);
        // All eight rows are turned alike.
        to[i * kColumns] = Rounded<kType>(kOuter ? __fmul_rn(value, outer[c]) : value);
      }
    }
  };
  store.template operator()<2 * kHalf>();
  store.template operator()<2 * kHalf + 1>();
}

// Writes those of the rows from `row` of W on, and of 64 columns from `column` on, that are wanted.
template <DType kType>
__device__ __forceinline__ void StoreBlock(const DequantizeParams& p, Block<kType> block,
                                           int64_t row, int64_t column) {
  using Bits = typename Element<kType>::Bits;
  constexpr int kChunks = Block<kType>::kChunks, kOfChunk = kColumns / kChunks;
  const int64_t row_end = p.row_begin + p.rows, col_end = p.col_begin + p.cols;
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int64_t r = row + i / kChunks, c = column + i % kChunks * int64_t{kOfChunk};
    if (r < p.row_begin || r >= row_end) continue;
    const uint4 chunk = *block.Chunk(i / kChunks, i % kChunks);
    Bits* const out = static_cast<Bits*>(p.out) + (r - p.row_begin) * p.cols;
    if (p.wide && c >= p.col_begin && c + kOfChunk <= col_end) {
      *reinterpret_cast<uint4*>(out + (c - p.col_begin)) = chunk;
      continue;
    }
    const auto* const elements = reinterpret_cast<const Bits*>(&chunk);
#pragma unroll
    for (int e = 0; e < kOfChunk; ++e) {
      if (c + e >= p.col_begin && c + e < col_end) out[c + e - p.col_begin] = elements[e];
    }
  }
}

template <VectorCode kCode, DType kType, bool kOuter>
__global__ __launch_bounds__(kThreads,
                             3) void DequantizeKernel(const __grid_constant__ DequantizeParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto* const entries = reinterpret_cast<uint32_t*>(shared);
  Block<kType> block(shared + kEntriesBytes<kCode>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % 4;
  const int64_t record = p.col_begin / kColumns + blockIdx.x;
  const int64_t end = (p.row_begin + p.rows + kRows - 1) / kRows;
  int64_t round = p.row_begin / kRows + blockIdx.y;
  if (round >= end) return;
  LaneWords<kCode> next;
  uint32_t factors;
  const auto load = [&](int64_t round) {
    const uint8_t* const at =
        p.codes + ((record * p.blocks + round / 2) * vectors::kRecordTiles + tile) *
                      vectors::TileBytes(kCode);
    next.Load(at, static_cast<int>(round % 2));
    factors = LoadFactors<kCode>(at);
  };
  load(round);
  float outer[2] = {1, 1};
  for (int c = 0; c < 2 && kOuter; ++c) {
    const int64_t column = record * kColumns + tile * vectors::kTileColumns + lane / 4 + 8 * c;
    if (column < p.n) outer[c] = p.outer[column];
  }
  FillEntries<kCode>(entries);
  __syncthreads();
  while (round < end) {
    const LaneWords<kCode> words = next;
    float units[2];
    UnitsOf<kCode>(factors, units);
    const int64_t row = round * kRows;
    round += gridDim.y;
    if (round < end) load(round);
    if (warp < 4) {
      DecodeHalf<kCode, kType, kOuter, 0>(words, entries, tile, units, outer, block);
    } else {
      DecodeHalf<kCode, kType, kOuter, 1>(words, entries, tile, units, outer, block);
    }
    __syncthreads();
    StoreBlock(p, block, row, record * kColumns);
    __syncthreads();
  }
}

absl::Status Dequantize(const DequantizeArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const MatrixView& out = args.out;
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const int64_t size = SizeOf(out.dtype);
  // Chunks of 16 bytes begin at columns of W that are multiples of 16 / size.
  const auto begin = reinterpret_cast<uintptr_t>(out.data) - args.col_begin * size;
  const DequantizeParams p = {.codes = weight.codes(),
                              .outer = weight.outer(),
                              .out = out.data,
                              .n = weight.shape.n,
                              .blocks = weight.shape.code_rows(),
                              .rows = out.rows,
                              .cols = out.cols,
                              .row_begin = args.row_begin,
                              .col_begin = args.col_begin,
                              .wide = begin % 16 == 0 && out.cols * size % 16 == 0};
  const auto blocks = [](int64_t first, int64_t count, int64_t of) {
    return CeilDiv(first + count, of) - first / of;
  };
  return ForVectorCode(weight.shape.scheme.vector, [&]<VectorCode kCode>() {
    return ForFloatingType(out.dtype, [&]<DType kType>() {
      const LaunchConfig config{
          .grid = GridOfRows(blocks(args.col_begin, out.cols, kColumns),
                             CeilDiv(blocks(args.row_begin, out.rows, kRows), kRoundsOfBlock), 1),
          .block = kThreads,
          .shared_bytes = kEntriesBytes<kCode> + Block<kType>::kBytes,
          .stream = stream};
      constexpr absl::string_view kName = "sm80/vectors_dequantize";
      return p.outer == nullptr ? Launch<DequantizeKernel<kCode, kType, false>>(kName, config, p)
                                : Launch<DequantizeKernel<kCode, kType, true>>(kName, config, p);
    });
  });
}

}  // namespace

const KernelRow& VectorsDequantizeRow() {
  static const KernelRow row = {.name = "sm80/vectors_dequantize",
                                .op = Op::kDequantize,
                                .device = DeviceKind::kCuda,
                                .claims = kVectorCodes,
                                .layout = &kVectorsLayout,
                                .min_arch = 75,
                                .priority = 10,
                                .dequantize = Dequantize};
  return row;
}

}  // namespace awqd::cuda
