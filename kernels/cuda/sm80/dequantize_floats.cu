// Dequantize of codes that are no integers, and of integers with real zeros, for row
// sm80/dequantize: decode(code) * scale * outer, the zero taken off before the scale or after it,
// each step one rounding in fp32 (exact.h).
//
// As dequantize.cu does it, but that a table's codes pass through shared memory as they are: its
// numbers are fp32, and 16 bits would not hold them.
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/dequantize.cuh"

namespace awqd::cuda {
namespace {

// ---- codes -------------------------------------------------------------------------------------

// A lane's step as 16-bit numbers that ToFloat understands.
template <CodeKind kCode, int kBits>
__device__ __forceinline__ Pairs Halves(const LaneCodes<kBits>& codes, int step) {
  Pairs out;
  if constexpr (kCode == CodeKind::kUnsigned) {
    uint32_t none[4];
    ExpandZeros<kBits, false>(0, none);
    out = MinusZero<kBits, false>(codes, step, none);
  } else if constexpr (kCode == CodeKind::kE2m1) {
    out = E2m1ToFp16(codes.Word(step));
  } else if constexpr (kCode == CodeKind::kE4m3) {
    out = E4m3ToPairs<false>(codes.Word(step, 0), codes.Word(step, 1));
  } else {
#pragma unroll
    for (int p = 0; p < 4; ++p) out.v[p] = codes.Word(step) >> 4 * p & kLowCodes;
  }
  return out;
}

template <CodeKind kCode>
__device__ __forceinline__ float ToFloat(uint32_t half, const float* table) {
  if constexpr (kCode == CodeKind::kTable) return table[half];
  const float value = Fp16ToFloat(half);
  return kCode == CodeKind::kE4m3 ? value * kE4m3UnitFp16 : value;
}

// ---- scales ------------------------------------------------------------------------------------

// The scales and zeros of a record, by columns, as fp32: 64 for each meta.
template <class Record>
struct RecordMetas {
  static constexpr int kMost = Record::kBare ? 1 : 8;
  float scales[kMost][mma16::kTileN];
  float zeros[Record::kReal ? kMost : 1][mma16::kTileN];
};

// Loads them into shared memory. A thread that read its own eight for each row would read 2 or 4
// bytes at a time.
template <class Record>
__device__ __forceinline__ void LoadMetas(const uint8_t* metas, int count,
                                          RecordMetas<Record>& to) {
  constexpr int kBytes = mma16::HasFloatScales(Record::kMetaKind) ? 4 : 2;
  for (int i = threadIdx.x; i < count * mma16::kTileN; i += kThreads) {
    const int meta = i / mma16::kTileN, at = i % mma16::kTileN;
    const uint8_t* const from = metas + meta * Record::kMetaBytes + at * kBytes;
    const int tile = at / mma16::kRowTile, row = at % mma16::kRowTile / 2, upper = at % 2;
    const int column = tile * mma16::kRowTile + upper * 8 + row;
    to.scales[meta][column] = kBytes == 4
                                  ? __ldg(reinterpret_cast<const float*>(from))
                                  : Fp16ToFloat(__ldg(reinterpret_cast<const uint16_t*>(from)));
    if constexpr (Record::kReal) {
      to.zeros[meta][column] =
          __ldg(reinterpret_cast<const float*>(from + 2 * mma16::kMetaScalesBytes));
    }
  }
}

// The value of code `code` of column `column`, without the outer.
template <class Record>
__device__ __forceinline__ float Scaled(float code, const RecordMetas<Record>& metas, int meta,
                                        int column, bool zero_first) {
  if constexpr (Record::kBare) return code;
  const float scale = metas.scales[meta][column];
  if constexpr (Record::kReal) {
    const float zero = metas.zeros[meta][column];
    return zero_first ? __fmul_rn(__fsub_rn(code, zero), scale)
                      : __fsub_rn(__fmul_rn(code, scale), zero);
  }
  return code * scale;
}

// ---- the kernel --------------------------------------------------------------------------------

template <class Record>
__device__ __forceinline__ void DecodeHalves(const uint8_t* record, uint32_t tile) {
  using Codes = LaneCodes<Record::kBits>;
  Codes codes;
  codes.LoadGlobal(record + threadIdx.x / 32 * Record::kUnitBytes +
                   Codes::LaneOffset(threadIdx.x % 32));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    StorePairs(tile, step, Halves<Record::kCode, Record::kBits>(codes, step));
  }
}

template <DType kOut, class Record>
__global__ __launch_bounds__(kThreads) void DequantizeFloatsKernel(
    const __grid_constant__ DequantizeParams p) {
  __shared__ __align__(128) uint8_t shared[mma16::kBlockK * kRowBytes];
  __shared__ float table[16];
  __shared__ __align__(16) RecordMetas<Record> metas;
  LaunchDependents();
  const uint32_t tile = SharedAddress(shared);
  const int64_t tile_n = p.first_tile + blockIdx.x, block_k = p.first_block + blockIdx.y;
  const int record_bytes = Record::kCodesBytes + p.metas * Record::kMetaBytes;
  const uint8_t* record = p.records + (tile_n * p.k_blocks + block_k) * record_bytes;
  const int chunk = threadIdx.x % 8;
  const int64_t n = tile_n * mma16::kTileN + chunk * 8;
  if (Record::kCode == CodeKind::kTable && threadIdx.x < 16) {
    table[threadIdx.x] = __ldg(p.table + threadIdx.x);
  }
  if (!Record::kBare) LoadMetas(record + Record::kCodesBytes, p.metas, metas);
  DecodeHalves<Record>(record, tile);
  Outer outer;
  if (p.outer != nullptr) outer = ReadOuter(p, n);
  __syncthreads();
  WaitForEarlierKernels();
#pragma unroll 1
  for (int pass = 0; pass < 4; ++pass) {
    const int k = pass * 32 + threadIdx.x / 8;
    const uint4 halves = LoadShared16(ChunkAt(tile, k, chunk));
    const uint32_t pairs[4] = {halves.x, halves.y, halves.z, halves.w};
    const int which = k * p.metas / mma16::kBlockK;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float code = ToFloat<Record::kCode>(pairs[i / 2] >> i % 2 * 16 & 0xffff, table);
      v[i] = Scaled(code, metas, which, chunk * 8 + i, p.zero_first);
      if (p.outer != nullptr) v[i] *= outer.v[i];
    }
    Store<kOut>(p, block_k * mma16::kBlockK + k - p.row_begin, n - p.col_begin, Round<kOut>(v));
  }
}

template <class Record>
absl::Status LaunchTo(const DequantizeParams& p, DType out, const LaunchConfig& config) {
  return ForFloatingType(out, [&]<DType kOut>() {
    return Launch<DequantizeFloatsKernel<kOut, Record>>("sm80/dequantize", config, p);
  });
}

}  // namespace

absl::Status DequantizeFloats(const DequantizeParams& p, const QuantizationScheme& d, DType out,
                              const LaunchConfig& config) {
  switch (d.code) {
    case CodeKind::kE2m1:
      return LaunchTo<Record<4, 8, CodeKind::kE2m1>>(p, out, config);
    case CodeKind::kTable:
      return LaunchTo<Record<4, 8, CodeKind::kTable>>(p, out, config);
    case CodeKind::kE4m3:
      return p.metas == 0 ? LaunchTo<Record<8, 0, CodeKind::kE4m3>>(p, out, config)
                          : LaunchTo<Record<8, 8, CodeKind::kE4m3>>(p, out, config);
    case CodeKind::kUnsigned:
    case CodeKind::kVector:  // never in records, as the next
    case CodeKind::kTrellis:
      break;
  }
  return ForBits(d.bits, [&]<int kBits>() {
    return LaunchTo<Record<kBits, 8, CodeKind::kUnsigned, true>>(p, out, config);
  });
}

}  // namespace awqd::cuda
