// The dense path's rows: a weight is decoded slab by slab, and cuBLASLt multiplies each slab. The
// slabs and the workspace are host arithmetic, so that they are tested with invented devices.
#pragma once

#include <cstdint>

#include "kernels/registry.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::dense {

const KernelRow& MatmulA16Row();
const KernelRow& MatmulFp16Row();

// The work of these rows with `columns` (a multiple of 8) per slab, at most what PlanWorkspace has
// room for. For benches and tests.
absl::Status MatmulInSlabs(const MatmulArgs& args, int64_t columns, StreamView stream);

// Bytes and offsets of the workspace's sections, each 256-byte aligned. The same for every m, since
// a workspace sized for many tokens also serves few.
struct Workspace {
  int64_t slab_bytes = 0;     // the decoded weight, in the dtype of the activations
  int64_t scratch_bytes = 0;  // FP32 sums, for outputs that cuBLASLt does not round as we do
  int64_t blas_bytes = 0;     // cuBLASLt's own

  int64_t scratch_offset() const { return slab_bytes; }
  int64_t blas_offset() const { return slab_bytes + scratch_bytes; }
  int64_t total() const { return slab_bytes + scratch_bytes + blas_bytes; }
};

// Bytes that one decoded weight takes in the workspace while activations are `x`.
constexpr int64_t SlabBytesPerWeight(DType x) { return SizeOf(x); }

// Columns per slab (a multiple of 8; the last slab may be narrower) for m tokens of dtype `x`: wide
// for few tokens, so that products fill the GPU; narrow enough to stay in L2 for many.
int64_t SlabColumns(int64_t m, const WeightShape& shape, DType x, const DeviceInfo& device);

// Tokens per pass, 1 to m, when slabs of `columns` go through the FP32 scratch.
int64_t ScratchRows(int64_t m, int64_t columns);

Workspace PlanWorkspace(const WeightShape& shape, const DeviceInfo& device);

}  // namespace awqd::dense
