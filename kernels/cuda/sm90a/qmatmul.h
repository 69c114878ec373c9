// What the fused product's launcher hands to the instantiations of its kernel.
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
  CUtensorMap x_last;      // the same for the last tile of tokens, boxes of last_rows
  const uint8_t* records;  // layout mma16
  const float* x_scale;    // [m], what each row of x is to be multiplied by; null: 1
  void* y;                 // [m, n] of y_dtype
  const float* bias;       // [n] or null
  float* sums;             // of cut tiles
  uint32_t* counters;      // of the stream, zero
  Schedule schedule;
  int slots;  // for sums, per cluster
  int chain;  // steps of a chain where the order of sums is kept
  int token_tiles;
  int last_rows;
  int64_t m;
  int64_t n;
  int tiles_n;  // records along N
  int metas;    // per record: 1, 2, 4 or 8
  DType y_dtype;
  bool y_wide;  // four elements of y may be stored at once
};

// For activations of FP16 or BF16; kChained: tiles that keep the order of sums of common/chains.h.
// The instantiations are spread over several files, so that they compile side by side
// (CMakeLists.txt).
template <bool kBf16, bool kChained>
absl::Status LaunchProduct(const PersistentParams& params, const PersistentTile& tile,
                           const DeviceInfo& device, StreamView stream);

}  // namespace awqd::cuda
