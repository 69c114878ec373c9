// The rows of kernels/cuda/dense/.
#pragma once

#include "absl/types/span.h"
#include "kernels/registry.h"

namespace awqd {
absl::Span<const KernelRow* const> DenseKernels();
}  // namespace awqd
