// Row sm80/dequantize: out[k][n] = (q - z) * s, any block of the weight, to fp16, bf16 or fp32.
//
// Layout: mma16, one record (128 k x 64 n) per block; neighbouring blocks take neighbouring n, so
// that what is in flight covers whole rows of the output.
// Work split: each warp decodes its unit to exact q - z, transposes fragments in registers and puts
// them into shared memory as [k][n]; then eight threads write one 64-wide row, multiplying by the
// scales of their own eight columns. One rounding, in that product.
// Limits: none; unaligned blocks are stored element by element.
#include <algorithm>

#include "kernels/base/status.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/dequantize.cuh"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

// (q - z) * s for four pairs: 9 bits times 11 are exact in fp32.
template <DType kOut>
__device__ __forceinline__ Eight<kOut> Scale(uint4 codes, const uint32_t (&scales)[4]) {
  const uint32_t d[4] = {codes.x, codes.y, codes.z, codes.w};
  if constexpr (kOut == DType::kFp16) {
    return {{{Mul2Fp16(d[0], scales[0]), Mul2Fp16(d[1], scales[1]), Mul2Fp16(d[2], scales[2]),
              Mul2Fp16(d[3], scales[3])}}};
  } else {
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = LowFloat(d[i]) * LowFloat(scales[i]);
      v[2 * i + 1] = HighFloat(d[i]) * HighFloat(scales[i]);
    }
    return Round<kOut>(v);
  }
}

// (q - z) * s * outer, each product rounded to fp32.
template <DType kOut, bool kBare>
__device__ __forceinline__ Eight<kOut> ScaleTwice(uint4 codes, const uint32_t (&scales)[4],
                                                  const Outer& outer) {
  const uint32_t d[4] = {codes.x, codes.y, codes.z, codes.w};
  float v[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = kBare ? LowFloat(d[i]) : LowFloat(d[i]) * LowFloat(scales[i]);
    const float high = kBare ? HighFloat(d[i]) : HighFloat(d[i]) * HighFloat(scales[i]);
    v[2 * i] = low * outer.v[2 * i];
    v[2 * i + 1] = high * outer.v[2 * i + 1];
  }
  return Round<kOut>(v);
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

template <class Record>
__device__ __forceinline__ void DecodeUnit(const DequantizeParams& p, const uint8_t* record,
                                           uint32_t tile) {
  constexpr int kZeroBytes = mma16::ZeroBits(Record::kBits) / 4;  // of a lane
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  using Codes = LaneCodes<Record::kBits>;
  Codes codes;
  codes.LoadGlobal(record + threadIdx.x / 32 * Record::kUnitBytes + Codes::LaneOffset(lane));
  const uint8_t* zeros = record + Record::kCodesBytes + mma16::kMetaScalesBytes +
                         (row_tile * 8 + lane / 4) * kZeroBytes;
  const auto zero_of = [&](int step) -> uint32_t {
    if (Record::kBare) return BareMeta(p.zero).zeros;
    const uint8_t* at = zeros + (half * 4 + step) * p.metas / 8 * Record::kMetaBytes;
    if (kZeroBytes == 1) return __ldg(at);
    return __ldg(reinterpret_cast<const uint16_t*>(at));
  };
  uint32_t zero[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    zero[step] = step == 0 || Record::kFine ? zero_of(step) : zero[0];
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t forms[4];
    ExpandZeros<Record::kBits, false>(zero[step], forms);
    StorePairs(tile, step, MinusZero<Record::kBits, false>(codes, step, forms));
  }
}

// Blocks of a multiprocessor, which on sm_75 has 1024 threads and 64 KB of shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 6;
#endif

template <DType kOut, class Record>
__global__ __launch_bounds__(kThreads, kBlocks) void DequantizeKernel(
    const __grid_constant__ DequantizeParams p) {
  __shared__ __align__(128) uint8_t shared[mma16::kBlockK * kRowBytes];
  LaunchDependents();
  const uint32_t tile = SharedAddress(shared);
  const int64_t tile_n = p.first_tile + blockIdx.x, block_k = p.first_block + blockIdx.y;
  const int record_bytes = Record::kCodesBytes + p.metas * Record::kMetaBytes;
  const uint8_t* record = p.records + (tile_n * p.k_blocks + block_k) * record_bytes;
  const int chunk = threadIdx.x % 8;
  uint32_t scales[4] = {};
  if (!Record::kBare) ReadScales(record + Record::kCodesBytes, chunk, scales);
  DecodeUnit<Record>(p, record, tile);
  const int64_t n = tile_n * mma16::kTileN + chunk * 8;
  const bool twice = Record::kBare || p.outer != nullptr;
  Outer outer;
  if (twice) outer = ReadOuter(p, n);
  __syncthreads();
  WaitForEarlierKernels();
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int k = pass * 32 + threadIdx.x / 8;
    if (Record::kMetas > 1 && p.metas > 1) {
      const int which = k * p.metas / mma16::kBlockK;
      ReadScales(record + Record::kCodesBytes + which * Record::kMetaBytes, chunk, scales);
    }
    const int64_t row = block_k * mma16::kBlockK + k - p.row_begin;
    const uint4 codes = LoadShared16(ChunkAt(tile, k, chunk));
    Store<kOut>(
        p, row, n - p.col_begin,
        twice ? ScaleTwice<kOut, Record::kBare>(codes, scales, outer) : Scale<kOut>(codes, scales));
  }
}

template <DType kOut, class Record>
absl::Status LaunchKernel(const DequantizeParams& p, const LaunchConfig& config) {
  return Launch<DequantizeKernel<kOut, Record>>("sm80/dequantize", config, p);
}

// With 2 metas and fewer the zeros of a unit are all alike.
template <DType kOut, int kBits>
absl::Status LaunchBits(const DequantizeParams& p, const LaunchConfig& config) {
  if constexpr (kBits == 8) {
    if (p.metas == 0) return LaunchKernel<kOut, Record<8, 0>>(p, config);
  }
  return p.metas > 2 ? LaunchKernel<kOut, Record<kBits, 8>>(p, config)
                     : LaunchKernel<kOut, Record<kBits, 2>>(p, config);
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
  p.table = args.weight->table();
  p.outer = args.weight->outer();
  p.n = shape.n;
  p.zero = shape.scheme.zero;
  p.zero_first = mma16::TakesZeroFirst(shape);
  p.out = args.out.data;
  p.row_begin = args.row_begin, p.rows = args.out.rows;
  p.col_begin = args.col_begin, p.cols = args.out.cols;
  p.first_tile = args.col_begin / mma16::kTileN;
  p.first_block = args.row_begin / mma16::kBlockK;
  p.k_blocks = mma16::BlocksK(shape.k);
  p.metas = mma16::MetasPerRecord(shape);
  p.wide = CanStoreWide(args);
  // H100, 2026-11-21: 4096 x 28672 takes 107.2 us this way and 111.0 with ordinary stores. What
  // fits half of L2 stays there for a product that follows.
  p.stream = p.rows * p.cols * SizeOf(args.out.dtype) > device.l2_bytes / 2;
  const int64_t tiles = CeilDiv(p.col_begin + p.cols, mma16::kTileN) - p.first_tile;
  const int64_t blocks = CeilDiv(p.row_begin + p.rows, mma16::kBlockK) - p.first_block;
  const LaunchConfig config{.grid = {static_cast<unsigned>(tiles), static_cast<unsigned>(blocks)},
                            .block = kThreads,
                            .stream = stream,
                            .attributes = OverlappedLaunch(device)};
  if (!shape.scheme.is_integer() || mma16::HasRealZeros(shape)) {
    return DequantizeFloats(p, shape.scheme, args.out.dtype, config);
  }
  return ForFloatingType(args.out.dtype, [&]<DType kOut>() {
    return ForBits(shape.scheme.bits,
                   [&]<int kBits>() { return LaunchBits<kOut, kBits>(p, config); });
  });
}

}  // namespace

const KernelRow& DequantizeRow() {
  static const KernelRow row = {
      .name = "sm80/dequantize",
      .op = Op::kDequantize,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfAnyCode(),
      .layout = &kMma16Layout,
      .min_arch = 75,
      .priority = 10,
      .dequantize = Run,
  };
  return row;
}

}  // namespace awqd::cuda
