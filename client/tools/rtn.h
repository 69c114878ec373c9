// Rtn: codes of a dense weight by rounding to nearest.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd::tools {

struct RtnOptions {
  int bits = 4;              // 2 to 8
  int64_t group_size = 128;  // -1: all of K; a divisor of K
  bool symmetric = false;
  bool search = false;  // for the range of a group that gives the least squared error
};

// The scale and the zero of a group, and the codes of its `values`.
//
//   symmetric    s = max(max / (2^(b-1) - 1), -min / 2^(b-1)), z = 2^(b-1)
//   asymmetric   s = (max - min) / (2^b - 1) with 0 in the range, z = round(-min / s)
//   q = round(w / s) + z, within 0 and 2^b - 1
//
// s is rounded to the type of scales first, and what else is computed uses the rounded one. A
// search multiplies the range by 1, 0.98, ..., 0.5 and keeps the first of the least squared errors.
// A group of zeros gets the scale 1. False where s is past the range of the type.
struct RtnGroup {
  float scale = 1;
  int zero = 0;
};
bool QuantizeGroup(absl::Span<const float> values, const RtnOptions& options, DType scale_dtype,
                   RtnGroup* group, uint8_t* codes);

// A weight [N, K] of which `read` fills rows of K: in-features of an out-feature.
using ReadDenseRows = absl::FunctionRef<absl::Status(int64_t begin, int64_t end, float* to)>;

// Scales of FP16 or BF16. INVALID_ARGUMENT naming the element that is no number or past the range.
absl::StatusOr<HostWeight> Rtn(int64_t k, int64_t n, const RtnOptions& options, DType scale_dtype,
                               ReadDenseRows read);

}  // namespace awqd::tools
