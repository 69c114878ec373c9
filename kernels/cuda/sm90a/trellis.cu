// Row sm90a/trellis_matmul: products of a trellis with more tokens than sm80/trellis.cu is made for.
//
// Entries are rounded to the type of x. The copy engine brings tiles beside the tokens; the sums of
// 128 columns are transformed as they are stored. See decoded_product.cuh.
// Limits: none.
#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/trellis_tiles.cuh"
#include "kernels/cuda/sm90a/decoded_product.cuh"
#include "kernels/cuda/sm90a/rows.h"

namespace awqd::cuda {
namespace {

static_assert(kTileColumns == kTrellisColumns);

constexpr int kRowsOfStep = kStepK / kTrellisTile;  // of tiles
constexpr int kTilesOfRow = kTileColumns / kTrellisTile;

template <TrellisCode kCode, bool kDecodesToBf16>
class TrellisDecoder {
 public:
  struct Weight {
    const uint8_t* codes;
    int bits;
    int rows;           // of tiles, K / 16
    int64_t row_bytes;  // of a row of tiles
  };
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

// Fewer tokens take less time by sm80/trellis.cu, more by Dequantize and cuBLASLt.
constexpr int64_t kLeastTokens = 17, kDenseFrom = 2049;
constexpr TileCosts kCosts = {{64, 1.2, 1.86}, {128, 1.25, 1.25}, {256, 1.72, 1.72}};

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  constexpr absl::string_view kName = "sm90a/trellis_matmul";
  const DeviceWeight& weight = *args.weight;
  const WeightShape& shape = weight.shape;
  const DeviceInfo& device = weight.device->info();
  AWQD_RETURN_IF_ERROR(UseDevice(device.index));
  AWQD_RETURN_IF_ERROR(CheckCounters(stream, kName));
  const DecodedPlan plan = PlanOf(kCosts, shape, device, args.x.rows);
  const int bits = shape.scheme.bits;
  return ForTrellisCode(shape.scheme.trellis, [&]<TrellisCode kCode>() {
    const auto launch = [&]<bool kBf16>() {
      return LaunchDecoded<TrellisDecoder<kCode, kBf16>>(
          args,
          {weight.codes(), bits, static_cast<int>(shape.k / kTrellisTile),
           shape.n / kTrellisTile * 32 * bits},
          plan, kName, stream);
    };
    return args.x.dtype == DType::kBf16 ? launch.template operator()<true>()
                                        : launch.template operator()<false>();
  });
}

}  // namespace

const KernelRow& TrellisA16Row() {
  static const KernelRow row = {
      .name = "sm90a/trellis_matmul",
      .op = Op::kMatmul,
      .device = DeviceKind::kCuda,
      .claims = kTrellis,
      .input_form = InputForm::kTensorCore,
      .layout = &kPlainLayout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      .dense_from = [](const WeightShape&, const DeviceInfo&) { return kDenseFrom; },
      .priority = 20,
      .tile =
          [](const WeightShape& shape, const DeviceInfo& device, int64_t m) {
            const DecodedPlan plan = PlanOf(kCosts, shape, device, m);
            return absl::StrCat(plan.tokens, "x", kTileColumns, " in ", plan.splits, " splits");
          },
      .workspace_bytes = DecodedWorkspace,
      .matmul = Matmul};
  return row;
}

}  // namespace awqd::cuda
