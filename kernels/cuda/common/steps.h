// Stage and finish on CUDA devices (kernels/steps.h).
#pragma once

#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"
#include "kernels/steps.h"

namespace awqd::cuda {

bool TokensAreReady(Staged want, const ConstMatrixView& x);
int64_t PrologueBytes(Staged want, int64_t m, int64_t k);
absl::Status Stage(const PrologueArgs& args, PrologueResult* out, Device& device,
                   StreamView stream);
absl::Status Finish(const EpilogueArgs& args, Device& device, StreamView stream);
absl::Status Reorder(const ReorderArgs& args, Device& device, StreamView stream);
absl::Status Gather(const GatherArgs& args, Device& device, StreamView stream);
absl::Status Gate(const GateArgs& args, Device& device, StreamView stream);
absl::Status Combine(const CombineArgs& args, Device& device, StreamView stream);

}  // namespace awqd::cuda
