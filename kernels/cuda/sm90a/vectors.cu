// Row sm90a/vectors_matmul: products of vector codes with more tokens than sm80/vectors.cu is made
// for.
//
// W is rounded to the type of x, as Dequantize rounds it. A round is half of a record of layout
// `vectors`, which lanes load themselves. See decoded_product.cuh.
// Limits: none.
#include "kernels/cuda/common/vector_tiles.cuh"
#include "kernels/cuda/sm90a/decoded_product.cuh"
#include "kernels/cuda/sm90a/rows.h"

namespace awqd::cuda {
namespace {

static_assert(kRoundK == kVectorBlock / 2 && kConsumerColumns == vectors::kRecordColumns);

constexpr absl::string_view kName = "sm90a/vectors_matmul";
constexpr int64_t kLeastTokens = 33;  // H200, 2026-12-01

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

struct VectorsWeight {
  const uint8_t* codes;
  int64_t n;
  int blocks;  // of 256 of K
};

template <VectorCode kCode, bool kDecodesToBf16>
class VectorsDecoder {
 public:
  using Weight = VectorsWeight;
  static constexpr bool kBf16 = kDecodesToBf16;

  static constexpr int TableBytes() { return kEntriesBytes<kCode>; }
  static __device__ __forceinline__ void FillTable(uint8_t* table) {
    FillEntries<kCode>(reinterpret_cast<uint32_t*>(table));
  }
  static __host__ __device__ __forceinline__ int StageBytes(const Weight&) { return 0; }
  static __device__ __forceinline__ int StepBytes(const Weight&, int) { return 0; }
  static __device__ __forceinline__ void BringStep(const Weight&, int, int, uint32_t, uint32_t) {}
  static __device__ __forceinline__ void Transform(float (&)[4]) {}

  __device__ __forceinline__ VectorsDecoder(const Weight& w, const uint8_t* table, int columns)
      : entries_(reinterpret_cast<const uint32_t*>(table)) {
    // Past the last record of N the last one is decoded again; its sums are never stored.
    const int64_t record =
        min(int64_t{columns} * kConsumers + threadIdx.x / 128, vectors::Records(w.n) - 1);
    tile_ = w.codes + (record * w.blocks * vectors::kRecordTiles + threadIdx.x / 32 % 4) *
                          vectors::TileBytes(kCode);
  }

  __device__ __forceinline__ void Load(int round) {
    const uint8_t* const tile =
        tile_ + int64_t{round / 2} * vectors::kRecordTiles * vectors::TileBytes(kCode);
    words_.Load(tile, round % 2);
    factors_ = LoadFactors<kCode>(tile);
  }

  template <class Step>
  __device__ __forceinline__ void Decode(uint32_t round_at, Step) {
    float units[2];
    UnitsOf<kCode>(factors_, units);
    DecodeItem<kCode, kBf16, 0>(words_, entries_, {factors_ & 0xffff, units[0]}, round_at);
    DecodeItem<kCode, kBf16, 1>(words_, entries_, {factors_ >> 16, units[1]}, round_at);
  }

 private:
  const uint32_t* const entries_;
  const uint8_t* tile_;  // of round 0
  LaneWords<kCode> words_;
  uint32_t factors_;
};

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const WeightShape& shape = weight.shape;
  return ForVectorCode(shape.scheme.vector, [&]<VectorCode kCode>() {
    const VectorsWeight w = {weight.codes(), shape.n, static_cast<int>(shape.k / kVectorBlock)};
    return RunDecoded<VectorsDecoder<kCode, false>, VectorsDecoder<kCode, true>>(args, w, kName,
                                                                                 stream);
  });
}

}  // namespace

const KernelRow& VectorsA16Row() {
  static const KernelRow row =
      DecodedRow(kName, kVectorCodes, kVectorsLayout, kLeastTokens, Matmul);
  return row;
}

}  // namespace awqd::cuda
