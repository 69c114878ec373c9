// Linears that hold all experts of a projection in tensors of one more dimension, cut into one
// linear for each expert.
#pragma once

#include <deque>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/checkpoint.h"

namespace awqd::model {

// Whether the linear's path is one of all experts ("a.experts.up_proj") and its tensor of codes,
// which it has, is of one rank more than that of one linear.
bool HoldsAllExperts(const LinearLocation& linear);

// Expert i ("a.experts.i.up_proj") of E, the first dimension of every tensor, has slice i of each,
// and all of the tensors that the format says are not cut.
// The slices' facts are added to `slices`, which the result points into. INVALID_ARGUMENT naming
// the tensor when E is 0, too large, or not the same everywhere, or when the slices of the whole
// checkpoint are more than the tensors that a file may have.
absl::StatusOr<std::vector<LinearLocation>> SliceExperts(const LinearLocation& linear,
                                                         std::deque<TensorInfo>* slices);

}  // namespace awqd::model
