// Row sm90a/trellis_matmul: products of a trellis with more tokens than sm80/trellis.cu is made for.
//
// Entries are rounded to the type of x. The copy engine brings tiles beside the tokens; the sums of
// 128 columns are transformed as they are stored. See decoded_product.cuh.
// Limits: none.
#include "kernels/cuda/common/trellis_tiles.cuh"
#include "kernels/cuda/sm90a/decoded_product.cuh"
#include "kernels/cuda/sm90a/rows.h"

namespace awqd::cuda {
namespace {

static_assert(kTileColumns == kTrellisColumns);

constexpr int kRowsOfStep = kStepK / kTrellisTile;  // of tiles
constexpr int kTilesOfRow = kTileColumns / kTrellisTile;

constexpr absl::string_view kName = "sm90a/trellis_matmul";
constexpr int64_t kLeastTokens = 17;  // H200, 2026-12-01

struct TrellisWeight {
  const uint8_t* codes;
  int bits;
  int rows;           // of tiles, K / 16
  int64_t row_bytes;  // of a row of tiles
};

template <TrellisCode kCode, bool kDecodesToBf16>
class TrellisDecoder {
 public:
  using Weight = TrellisWeight;
  static constexpr bool kBf16 = kDecodesToBf16;

  static constexpr int TableBytes() { return 0; }
  static __device__ __forceinline__ void FillTable(uint8_t*) {}
  static __host__ __device__ __forceinline__ int StageBytes(const Weight& w) {
    return kRowsOfStep * RowBytes(w);
  }
  static __device__ __forceinline__ int StepBytes(const Weight& w, int step) {
    return RowsOf(w, step) * RowBytes(w);
  }
  static __device__ __forceinline__ void BringStep(const Weight& w, int columns, int step,
                                                   uint32_t to, uint32_t barrier) {
    const uint8_t* from =
        w.codes + int64_t{step} * kRowsOfStep * w.row_bytes + int64_t{columns} * RowBytes(w);
    for (int row = RowsOf(w, step); row > 0; --row, from += w.row_bytes, to += RowBytes(w)) {
      BulkCopy(to, from, RowBytes(w), barrier);
    }
  }
  static __device__ __forceinline__ void Transform(float (&v)[4]) { TransformWarp(v); }

  __device__ __forceinline__ TrellisDecoder(const Weight& w, const uint8_t*, int)
      : window_(w.bits), row_words_(RowBytes(w) / 4) {}

  __device__ __forceinline__ void Load(int) {}

  // A warp has 16 columns: a tile of each row of tiles.
  template <class Step>
  __device__ __forceinline__ void Decode(uint32_t round_at, Step step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = warp % 4 * kTrellisTile + lane / 4;
#pragma unroll
    for (int half = 0; half < kRoundK / kStepK; ++half) {
      const auto* tile =
          reinterpret_cast<const uint32_t*>(step(half)) + warp * (row_words_ / kTilesOfRow);
      // All tiles are decoded before the first store, which the compiler does not move.
      uint32_t pairs[kRowsOfStep][4];
#pragma unroll
      for (int row = 0; row < kRowsOfStep; ++row, tile += row_words_) {
        window_.template Decode<kCode>(tile, pairs[row]);
      }
#pragma unroll
      for (int row = 0; row < kRowsOfStep; ++row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = pairs[row][i];
          const uint32_t to =
              ChunkAt(round_at, column + i / 2 * 8, (half * kRowsOfStep + row) * 2 + i % 2) +
              lane % 4 * 4;
          StoreShared4(to, kBf16 ? ToBf16x2(Fp16ToFloat(static_cast<uint16_t>(pair)),
                                            Fp16ToFloat(static_cast<uint16_t>(pair >> 16)))
                                 : pair);
        }
      }
    }
  }

 private:
  static __host__ __device__ __forceinline__ int RowBytes(const Weight& w) {
    return kTilesOfRow * 32 * w.bits;
  }
  // Past K there are none. What shared memory holds in their place are codes of some numbers, too.
  static __device__ __forceinline__ int RowsOf(const Weight& w, int step) {
    return min(max(w.rows - step * kRowsOfStep, 0), kRowsOfStep);
  }

  const LaneWindow window_;
  const int row_words_;  // of a step's row of tiles
};

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const WeightShape& shape = weight.shape;
  return ForTrellisCode(shape.scheme.trellis, [&]<TrellisCode kCode>() {
    const TrellisWeight w = {.codes = weight.codes(),
                             .bits = shape.scheme.bits,
                             .rows = static_cast<int>(shape.k / kTrellisTile),
                             .row_bytes = shape.n / kTrellisTile * 32 * shape.scheme.bits};
    return RunDecoded<TrellisDecoder<kCode, false>, TrellisDecoder<kCode, true>>(args, w, kName,
                                                                                 stream);
  });
}

}  // namespace

const KernelRow& TrellisA16Row() {
  static const KernelRow row = DecodedRow(kName, kTrellis, kPlainLayout, kLeastTokens, Matmul);
  return row;
}

}  // namespace awqd::cuda
