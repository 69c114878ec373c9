// The rows of kernels/cuda/sm80/: for every GPU from compute capability 7.5.
#pragma once

#include "absl/types/span.h"
#include "kernels/registry.h"

namespace awqd {
absl::Span<const KernelRow* const> Sm80Kernels();
}  // namespace awqd
