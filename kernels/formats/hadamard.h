// Transforms of activations by Hadamard matrices, as settings or tensors of several formats say
// them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

// The setting of formats whose transforms are Sylvester's matrix times 1 / sqrt(size), which
// Format::Decode reads for all of them: the size of a block, -1 for all of K.
inline constexpr absl::string_view kHadamardSize = "hadamard_size";

// Sets the transform of that setting, if it is there, in `out`, whose k is set. INVALID_ARGUMENT
// where it does not fit K.
absl::Status ReadHadamard(const Setting& object, HostWeight* out);

// Sets the transform of a tensor M [size, size], I8, F16, BF16 or F32, that blocks of activations
// are multiplied by:
//
//   M[i, j] = scale * sign[i] * (-1)^(number of ones in i & p[j])
//
// with signs, which go into the factor, and a permutation p, which goes into the order. That is
// every Hadamard matrix of Sylvester whose rows have any signs and whose columns have any order.
// Integers stand for scale = 1 / sqrt(size). INVALID_ARGUMENT for other matrices, naming an element
// that differs. `out` has its k, and no order.
absl::Status DecodeHadamard(absl::string_view name, const TensorView& matrix, HostWeight* out);

}  // namespace awqd
