// Row sm80/dequantize_w4: out[k][n] = (q - z) * s, any block of the weight, to fp16, bf16 or fp32.
//
// Layout: mma16, one record (128 k x 64 n) per block; neighbouring blocks take neighbouring n, so
// that what is in flight covers whole rows of the output.
// Work split: each warp decodes its unit to exact q - z, transposes fragments in registers and puts
// them into shared memory as [k][n]; then eight threads write one 64-wide row, multiplying by the
// scales of their own eight columns. One rounding, in that product.
// Limits: none; unaligned blocks are stored element by element.
#include <algorithm>

#include "kernels/base/status.h"
#include "kernels/cuda/common/attributes.h"
#include "kernels/cuda/common/dequant.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowBytes = mma16::kTileN * 2;

struct DequantizeParams {
  const uint8_t* records;
  void* out;
  int64_t row_begin, rows;  // of K
  int64_t col_begin, cols;  // of N
  int64_t first_tile, first_block;
  int64_t k_blocks;
  int metas;
  bool wide;    // eight elements of out may be stored at once
  bool stream;  // nobody will find out in L2: let it leave first
};

template <DType kOut>
using Element = std::conditional_t<kOut == DType::kFp32, float, uint16_t>;

// Eight consecutive outputs of one thread.
template <DType kOut>
struct alignas(16) Eight {
  static constexpr int kVectors = kOut == DType::kFp32 ? 2 : 1;
  uint4 v[kVectors];
};

__device__ __forceinline__ float LowFloat(uint32_t pair) { return Fp16ToFloat(pair & 0xffff); }
__device__ __forceinline__ float HighFloat(uint32_t pair) { return Fp16ToFloat(pair >> 16); }

// (q - z) * s for four pairs.
template <DType kOut>
__device__ __forceinline__ Eight<kOut> Scale(uint4 codes, const uint32_t (&scales)[4]) {
  const uint32_t d[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kOut == DType::kFp16) {
      w[i] = Mul2Fp16(d[i], scales[i]);
    } else {
      // 5 bits times 11 bits: exact in fp32.
      const float low = LowFloat(d[i]) * LowFloat(scales[i]);
      const float high = HighFloat(d[i]) * HighFloat(scales[i]);
      if constexpr (kOut == DType::kBf16) {
        w[i] = ToBf16x2(low, high);
      } else {
        w[2 * i] = __float_as_uint(low);
        w[2 * i + 1] = __float_as_uint(high);
      }
    }
  }
  Eight<kOut> out;
#pragma unroll
  for (int i = 0; i < Eight<kOut>::kVectors; ++i) {
    out.v[i] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
  }
  return out;
}

// The scales of the eight columns `chunk` of a record, in order, as pairs.
__device__ __forceinline__ void ReadScales(const uint8_t* meta, int chunk, uint32_t (&scales)[4]) {
  const uint4* from = reinterpret_cast<const uint4*>(meta + chunk / 2 * 32);
  const uint4 a = __ldg(from), b = __ldg(from + 1);
  const uint32_t pick = chunk % 2 == 0 ? 0x5410 : 0x7632;
  scales[0] = Prmt(a.x, a.y, pick);
  scales[1] = Prmt(a.z, a.w, pick);
  scales[2] = Prmt(b.x, b.y, pick);
  scales[3] = Prmt(b.z, b.w, pick);
}

// Where the 16-byte chunk `chunk` of row k lies: XOR-ed with the row so that neither phase meets a
// bank twice.
__device__ __forceinline__ uint32_t ChunkAt(uint32_t tile, int k, int chunk) {
  return tile + k * kRowBytes + ((chunk ^ (k & 7)) * 16);
}

template <bool kFineGroups>
__device__ __forceinline__ void DecodeUnit(const uint8_t* record, int metas, uint32_t tile) {
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  const uint4 codes = LoadStreaming(record + threadIdx.x * 16);
  const uint8_t* zeros = record + mma16::kCodesBytes + mma16::kMetaScalesBytes + row_tile * 8;
  uint32_t zero[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int which = (half * 4 + step) * metas / 8;
    zero[step] =
        step == 0 || kFineGroups ? __ldg(zeros + which * mma16::kMetaBytes + lane / 4) : zero[0];
  }
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t both = Both(zero[step]);
    const uint32_t low = LowZeroFp16(both), high = HighZeroFp16(both);
    const Pairs pairs = Int4MinusZeroFp16(words[step], {low, high, low, high});
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = half * mma16::kUnitK + step * 16 + i / 2 * 8 + lane / 4;
      StoreShared4(ChunkAt(tile, k, row_tile * 2 + i % 2) + lane % 4 * 4,
                   TransposeMatrix(pairs.v[i]));
    }
  }
}

template <DType kOut>
__device__ __forceinline__ void Store(const DequantizeParams& p, int64_t row, int64_t col,
                                      const Eight<kOut>& values) {
  if (row < 0 || row >= p.rows || col <= -8 || col >= p.cols) return;
  Element<kOut>* out = static_cast<Element<kOut>*>(p.out) + row * p.cols + col;
  if (p.wide) {
#pragma unroll
    for (int i = 0; i < Eight<kOut>::kVectors; ++i) {
      uint4* at = reinterpret_cast<uint4*>(out) + i;
      if (p.stream) {
        __stcs(at, values.v[i]);
      } else {
        *at = values.v[i];
      }
    }
    return;
  }
  const Element<kOut>* from = reinterpret_cast<const Element<kOut>*>(&values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i >= 0 && col + i < p.cols) out[i] = from[i];
  }
}

template <DType kOut, bool kFineGroups>
__global__ __launch_bounds__(kThreads,
                             6) void DequantizeKernel(const __grid_constant__ DequantizeParams p) {
  __shared__ __align__(128) uint8_t shared[mma16::kBlockK * kRowBytes];
  LaunchDependents();
  const uint32_t tile = SharedAddress(shared);
  const int64_t tile_n = p.first_tile + blockIdx.x, block_k = p.first_block + blockIdx.y;
  const int record_bytes = mma16::kCodesBytes + p.metas * mma16::kMetaBytes;
  const uint8_t* record = p.records + (tile_n * p.k_blocks + block_k) * record_bytes;
  const int chunk = threadIdx.x % 8;
  uint32_t scales[4];
  ReadScales(record + mma16::kCodesBytes, chunk, scales);
  DecodeUnit<kFineGroups>(record, p.metas, tile);
  __syncthreads();
  const int64_t col = tile_n * mma16::kTileN + chunk * 8 - p.col_begin;
  WaitForEarlierKernels();
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int k = pass * 32 + threadIdx.x / 8;
    if (p.metas > 1) {
      const int which = k * p.metas / mma16::kBlockK;
      ReadScales(record + mma16::kCodesBytes + which * mma16::kMetaBytes, chunk, scales);
    }
    const int64_t row = block_k * mma16::kBlockK + k - p.row_begin;
    Store<kOut>(p, row, col, Scale<kOut>(LoadShared16(ChunkAt(tile, k, chunk)), scales));
  }
}

template <DType kOut>
absl::Status LaunchTo(const DequantizeParams& p, int64_t tiles, int64_t blocks,
                      const DeviceInfo& device, StreamView stream) {
  const Attributes attributes = OverlappedLaunch(device);
  const LaunchConfig config{.grid = {static_cast<unsigned>(tiles), static_cast<unsigned>(blocks)},
                            .block = kThreads,
                            .stream = stream,
                            .attributes = attributes.list,
                            .attribute_count = attributes.count};
  return p.metas > 2 ? Launch<DequantizeKernel<kOut, true>>("sm80/dequantize_w4", config, p)
                     : Launch<DequantizeKernel<kOut, false>>("sm80/dequantize_w4", config, p);
}

bool CanStoreWide(const DequantizeArgs& args) {
  return args.out.cols % 8 == 0 && args.col_begin % 8 == 0 &&
         reinterpret_cast<uintptr_t>(args.out.data) % 16 == 0;
}

absl::Status Run(const DequantizeArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  const WeightShape& shape = args.weight->shape;
  DequantizeParams p{};
  p.records = args.weight->codes();
  p.out = args.out.data;
  p.row_begin = args.row_begin, p.rows = args.out.rows;
  p.col_begin = args.col_begin, p.cols = args.out.cols;
  p.first_tile = args.col_begin / mma16::kTileN;
  p.first_block = args.row_begin / mma16::kBlockK;
  p.k_blocks = mma16::BlocksK(shape.k);
  p.metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  p.wide = CanStoreWide(args);
  // H100, 2026-11-21: 4096 x 28672 takes 107.2 us this way and 111.0 with ordinary stores. What
  // fits half of L2 stays there for a product that follows.
  p.stream = p.rows * p.cols * SizeOf(args.out.dtype) > device.l2_bytes / 2;
  const int64_t tiles = CeilDiv(p.col_begin + p.cols, mma16::kTileN) - p.first_tile;
  const int64_t blocks = CeilDiv(p.row_begin + p.rows, mma16::kBlockK) - p.first_block;
  switch (args.out.dtype) {
    case DType::kFp16:
      return LaunchTo<DType::kFp16>(p, tiles, blocks, device, stream);
    case DType::kBf16:
      return LaunchTo<DType::kBf16>(p, tiles, blocks, device, stream);
    default:
      return LaunchTo<DType::kFp32>(p, tiles, blocks, device, stream);
  }
}

}  // namespace

const KernelRow& DequantizeW4() {
  static const KernelRow row = {
      .name = "sm80/dequantize_w4",
      .op = Op::kDequantize,
      .device = DeviceKind::kCuda,
      .bits_mask = 1u << 3 | 1u << 4,
      .group_multiple = mma16::kRowTile,
      .scales = MaskOf(DType::kFp16),
      .layout = &kMma16Layout,
      .min_arch = 80,
      .priority = 10,
      .dequantize = Run,
  };
  return row;
}

}  // namespace awqd::cuda
