// The parameters of the fused product's kernel.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd {

// kernels/registry.h, which the kernels themselves need not see.
struct MatmulArgs;
struct GroupedArgs;

namespace cuda {

inline constexpr int kMapColumns = 64;  // columns of 16 bits in a box of PersistentParams::x

struct PersistentParams {
  CUtensorMap x;       // [m, k], boxes of 128 bytes of k x a block's tokens
  CUtensorMap x_last;  // the same for the last tile of tokens, boxes of as many bytes x last_rows
  const uint8_t* records;       // layout mma16
  const float* x_scale;         // [m], a factor for each row of sums; null: 1
  const float* token_scales;    // [steps, token_scales_stride] of ProductKind::kTokenScales
  int64_t token_scales_stride;  // a multiple of 4
  const float* outer;           // [n], a factor for each column of sums; null: 1
  float unit;          // a factor for all sums beside `outer`: what decodes are short of, or 1
  void* y;             // [m, n] of y_dtype
  const float* bias;   // [n] or null
  float* sums;         // room for the sums of cut tiles
  uint32_t* counters;  // those of the stream, zero
  StreamKSchedule schedule;
  int slots;    // sets of sums for each consumer in `sums`
  int k_range;  // steps of a k-range where the order of sums is kept
  int token_tiles;
  int last_rows;    // tokens that a block copies for the last tile of tokens
  int last_stride;  // from the first of them to that of the cluster's next block
  int64_t m;
  int64_t n;
  int tiles_n;  // records along N
  RecordKind kind;
  const float* table;  // [16] of codes that index it
  int metas;           // of each record: 0, 1, 2, 4 or 8
  int zero;            // of bare records
  bool zero_first;     // real zeros are taken off before the scale (mma16::TakesZeroFirst)
  DType y_dtype;
  const GroupedTile* tiles;  // of a grouped product, instead of records, outer, bias, x_last and m
  bool y_wide;               // four elements of y may be stored at once
};

enum class ProductKind {
  kFree,
  kFixedOrder,   // keeps the order of sums of common/fixed_order.h
  kGrouped,      // of a stack of experts
  kIntegers,     // of INT8 activations: sums stay INT32 (SumsStayIntegers)
  kTokenScales,  // of E4M3 activations: each token has a scale for every 128 of K
  kGroupedTokenScales,
};

// kX: the type of activations, FP16, BF16, INT8 or E4M3. kList: the tiles, a list of tile_list.h. kKinds:
// the kinds of records that this instantiation serves. Each instantiation has a file of its own, so
// that they compile side by side (CMakeLists.txt).
template <DType kX, ProductKind kProduct, const auto& kList, RecordKind... kKinds>
absl::Status LaunchProduct(const PersistentParams& params, const PersistentTile& tile,
                           const DeviceInfo& device, StreamView stream);

// The rows' matmuls: of args.x as the prologue left it, with the fastest tile. RunFixedOrderProduct
// keeps the order of sums and takes no INT8.
absl::Status RunProduct(const MatmulArgs& args, StreamView stream);
absl::Status RunFixedOrderProduct(const MatmulArgs& args, StreamView stream);

// The same for GroupedArgs, what it wants at GroupedArgs::table, and the tokens of a tile there.
absl::Status RunGroupedProduct(const GroupedArgs& args, StreamView stream);
std::string GroupedProductTable(const GroupedArgs& args);
std::string GroupedFloat8Table(const GroupedArgs& args);
int64_t GroupedProductTile(const GroupedArgs& args);
int64_t GroupedFloat8Tile(const GroupedArgs& args);

// The chosen tile in words: "128x256 on 66 pairs of blocks".
std::string DescribeTile(const WeightShape& shape, const DeviceInfo& device, int64_t m, DType x);
std::string DescribeFixedOrderTile(const WeightShape& shape, const DeviceInfo& device, int64_t m);

}  // namespace cuda
}  // namespace awqd
