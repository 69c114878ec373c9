// Asks what code this binary holds for a GPU, without launching anything.
#pragma once

#include "absl/status/statusor.h"

namespace awqd::cuda {

// Compute capability x 10 (80, 90) that the code which runs on the thread's device was compiled
// for: less than the device's own where the driver translates portable code. UNIMPLEMENTED when
// there is no code for it. All folders but sm90a, whose rows ask for 9.0 itself, are compiled for
// the same architectures, so that one kernel speaks for all.
absl::StatusOr<int> ProbeKernelImage();

}  // namespace awqd::cuda
