// Declares the dense rows, and the product with a chosen slab width for benches and tests.
#pragma once

#include <cstdint>

#include "kernels/registry.h"

namespace awqd {

extern const KernelRow kDenseMatmulA16;
extern const KernelRow kDenseMatmulFp16;

namespace dense {
// What kDenseMatmulA16 is.
KernelRow MatmulRow();
// The row's work with `columns` (a multiple of 8) per slab, at most what PlanWorkspace has room
// for.
absl::Status MatmulInSlabs(const MatmulArgs& args, int64_t columns, StreamView stream);
}  // namespace dense

}  // namespace awqd
