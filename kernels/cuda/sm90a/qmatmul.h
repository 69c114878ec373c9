// The parameters of the fused product's kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::cuda {

struct PersistentParams {
  CUtensorMap x;           // [m, k] of 16-bit elements, boxes of 64 k x a block's tokens
  CUtensorMap x_last;      // the same for the last tile of tokens, boxes of 64 k x last_rows
  const uint8_t* records;  // layout mma16
  const float* x_scale;    // [m], a factor for each row of sums; null: 1
  const float* outer;      // [n], a factor for each column of sums; null: 1
  float unit;              // a factor for all sums beside `outer`: kBareUnitBf16, or 1
  void* y;                 // [m, n] of y_dtype
  const float* bias;       // [n] or null
  float* sums;             // room for the sums of cut tiles
  uint32_t* counters;      // those of the stream, zero
  Schedule schedule;
  int slots;  // sets of sums for each consumer in `sums`
  int chain;  // steps of a chain where the order of sums is kept
  int token_tiles;
  int last_rows;  // tokens that a block copies for the last tile of tokens
  int64_t m;
  int64_t n;
  int tiles_n;  // records along N
  int bits;     // of codes
  int metas;    // of each record: 0, 1, 2, 4 or 8
  int zero;     // of bare records
  DType y_dtype;
  bool y_wide;  // four elements of y may be stored at once
};

// kBf16: activations are BF16, otherwise FP16. kChained: keeps the order of sums of
// common/chains.h. kKinds: the kinds of records that this instantiation serves. Each instantiation
// has a file of its own, so that they compile side by side (CMakeLists.txt).
template <bool kBf16, bool kChained, RecordKind... kKinds>
absl::Status LaunchProduct(const PersistentParams& params, const PersistentTile& tile,
                           const DeviceInfo& device, StreamView stream);

}  // namespace awqd::cuda
