// Rows sm90a/qmatmul_a16 and sm90a/qmatmul_a16_chained: the fused product on Hopper's tensor cores,
// 17 tokens and more, of large layers 9 and more.
#include <cstdint>
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// From 17 tokens on it takes less time than the rows of sm80 on nearly every layer: H100,
// 2026-11-23, 24 tokens of 4096 x 4096 take 6.6 us here and 6.8 there, of 14336 x 4096 15.5 and
// 14.2, all layers of an 8B model in turn 61.6 and 61.7.
constexpr int64_t kFromTokens = 17;
// Where memory is so fast that it is not the limit, layers that give each multiprocessor
// kManyRecords and more take less time here from 9 tokens on, with tiles of 16 tokens, which
// records of one meta have. H200, 2026-11-27, 16 tokens here and by sm80/qmatmul_a16_scaled_sums
// without sm80/stream_k.cuh: 8192 x 57344, 434 records, 67.7 us and 87.7; 28672 x 8192, 217, 38.3
// and 41.3; 18432 x 7168, 122, 25.5 and 27.3; 4096 x 28672, 109, 21.6 and 21.8; 8192 x 8192, 62,
// 14.1 and 13.1. An H100 takes longer here: 8192 x 57344 95.9 and with sm80/stream_k.cuh 91.6,
// 28672 x 8192 49.9 and 46.2.
constexpr int64_t kFromTokensOfLarge = 9;
constexpr int64_t kManyRecords = 115;
constexpr int64_t kFastBytes = 4'000'000'000'000;  // a second

int64_t PreferredFrom(const WeightShape& shape, const DeviceInfo& device) {
  const bool one_meta = KindOf(shape) == Integers(4, 1);
  const int64_t records = mma16::TilesN(shape.n) * mma16::BlocksK(shape.k);
  const bool large = one_meta && records >= kManyRecords * device.sm_count;
  return large && device.memory_bytes_per_s >= kFastBytes ? kFromTokensOfLarge : kFromTokens;
}

// Decoding first by this row's time at 2048, 4096 and 8192 tokens, H200, 2026-11-29, FP16, 14336 x
// 4096 and 4096 x 28672. Real zeros: of 3 and 6 bits 1.01 to 1.08, 0.88 to 0.97, 0.74 to 0.89; of 4
// and 5 bits 1.05 to 1.14, 1.04 to 1.12 and (more columns than rows) 0.91 to 0.94, 0.80 to 0.95; of
// 2 bits 1.11, 0.99 to 1.02, 0.92. E4M3 in blocks: 1.04 to 1.07, 0.90 to 0.95, 0.86. Tables: 1.10
// to 1.14, 1.03 to 1.08, 0.94 to 0.97. The others: 1.13 to 1.29, 1.04 to 1.26, 0.98 to 1.13.
int64_t DenseFrom(const WeightShape& shape, const DeviceInfo&) {
  constexpr int64_t kMany = 4096, kVeryMany = 8192;
  const RecordKind kind = KindOf(shape);
  if (kind.code == CodeKind::kTable) return kVeryMany;
  if (kind.code == CodeKind::kE4m3 && kind.metas > 0) return kMany;
  if (!kind.real_zeros) return kNeverDense;
  const bool wide = shape.n > shape.k && kind.bits != 2;
  return wide || kind.bits == 3 || kind.bits == 6 ? kMany : kVeryMany;
}

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kFp16);
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  if (IsCompiled(KindOf(shape))) return RefusesCodes(shape);
  return absl::StrCat("has no kernel for ", ToString(shape.scheme));
}

std::string RefusesFixedOrder(const WeightShape& shape, const DeviceInfo& device) {
  std::string why = RefusesRealZeros(shape);
  return why.empty() ? Refuses(shape, device) : why;
}

int64_t FixedOrderWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t) {
  return FixedOrderSumsBytes(shape, device);
}

}  // namespace

const KernelRow& PersistentA16Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_a16",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfAnyCode(),
      .input_form = InputForm::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kFromTokensOfLarge,
      .preferred_from = PreferredFrom,
      .dense_from = DenseFrom,
      .priority = 20,
      .refuses = Refuses,
      .tile = Tile,
      .workspace_bytes = WorkspaceOfSums,
      .matmul = RunProduct,
  };
  return row;
}

const KernelRow& FixedOrderA16Row() {
  static const KernelRow row = [] {
    KernelRow out = PersistentA16Row();
    out.name = "sm90a/qmatmul_a16_chained";
    out.batch_invariant = true;
    out.claims = Mma16ClaimsOfBits(kFourBits);
    out.min_m = kFromTokens;
    out.preferred_from = nullptr;
    // Above sm80/qmatmul_a16, whose sums have the same order, and below the row that keeps none.
    out.priority = 15;
    out.refuses = RefusesFixedOrder;
    out.tile = DescribeFixedOrderTile;
    out.workspace_bytes = FixedOrderWorkspace;
    out.matmul = RunFixedOrderProduct;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
