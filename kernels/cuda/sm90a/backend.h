// The rows of kernels/cuda/sm90a/.
#pragma once

#include "absl/types/span.h"
#include "kernels/registry.h"

namespace awqd {

absl::Span<const KernelRow* const> Sm90aKernels();

}  // namespace awqd
