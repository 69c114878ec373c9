// The parameters of the fused product's kernel, and its launchers.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/sm80/tiles.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd {

// kernels/registry.h, which the kernels themselves need not see.
struct MatmulArgs;
struct GroupedArgs;

namespace cuda {

struct QMatmulParams {
  const uint8_t* records;  // layout mma16
  const void* x;           // [m, k], rows and base 16-byte aligned
  int64_t x_stride;        // elements between rows, 16 bytes or a multiple
  const float* x_scale;    // [m], what each row of sums is to be multiplied by; null: 1
  // E4M3 x has these instead: [k_blocks, token_scales_stride], what the sums of each row and block
  // are to be multiplied by; 16-byte aligned. A stride of 0: the same for all blocks.
  const float* token_scales;
  int64_t token_scales_stride;
  const float* outer;  // [n], the same for each column
  float unit;          // what comes with it: kBareUnitBf16, or 1
  void* y;             // [m, n] of y_dtype
  DType y_dtype;
  const float* bias;  // [n] or null
  int64_t m;
  int64_t n;
  int64_t k;
  int k_blocks;
  int k_range_blocks;  // of each k-range
  int metas;           // per record: 0, 1, 2, 4 or 8
  int zero;            // of bare records
  bool zero_first;     // real zeros are taken off before the scale (ZeroKind::kRealBefore)
  const float* table;  // [16] of codes that index it
  int splits;          // blocks of a cluster that the k-ranges are dealt out to
  int prefetch;        // records of each k-range that are brought into L2 before x is known
  bool y_wide;         // four elements of y may be stored at once
  // The tiles of a grouped product, one for each row of blocks; instead of records, outer, bias and
  // m.
  const GroupedTile* tiles;
  int tile_count;
  // Where every block has as many records (sm80/stream_k.cuh).
  StreamKSchedule schedule;
  float* sums;         // room for those of a tile for each block
  uint32_t* counters;  // those of the stream, zero
};

// For activations of dtype kX, FP16, BF16, of integer codes INT8, or of E4M3 and E2M1 with scales of
// E8M0 E4M3, and codes of kBits bits.
// kSum: FP32, or of INT8 activations INT32, which is y then, exact. kReal: of real zeros. kGrouped:
// the products of a stack of experts. The instantiations are spread over several files, so that
// they compile side by side (CMakeLists.txt).
template <DType kX, CodeKind kCode, int kBits, DType kSum, bool kReal = false,
          bool kGrouped = false>
absl::Status LaunchQMatmul(const QMatmulParams& params, const MatmulTile& tile,
                           const DeviceInfo& device, StreamView stream);

// The product of sm80/qmatmul_a16_scaled_sums: up to kMostTokensOfScaledSums tokens of FP16 or BF16
// and integer codes in groups of 64 or a multiple of 128. The scale of a group multiplies the FP32
// sums of the group, where LaunchQMatmul multiplies each weight by it and rounds.
template <DType kX, int kBits>
absl::Status LaunchScaledSums(const QMatmulParams& params, const MatmulTile& tile,
                              const DeviceInfo& device, StreamView stream);
// The same by sm80/stream_k.cuh.
template <DType kX, int kBits>
absl::Status LaunchStreamKScaledSums(const QMatmulParams& params, const DeviceInfo& device,
                                     StreamView stream);

// A row's matmul. args.x is FP16, BF16, INT8 or E4M3, as the prologue left it. INT32 y are sums.
absl::Status RunQMatmul(const MatmulArgs& args, StreamView stream);
// The same of FP16 and BF16 for sm80/qmatmul_a16_scaled_sums.
absl::Status RunScaledSums(const MatmulArgs& args, StreamView stream);

// The parameters that depend on the weight's shape and on y alone.
QMatmulParams ParamsOf(const WeightShape& shape, const MatrixView& y, const MatmulTile& tile);

// "8x64 in 4 k-ranges of K over 2 blocks".
std::string DescribeMatmulTile(const MatmulTile& tile);

}  // namespace cuda
}  // namespace awqd
