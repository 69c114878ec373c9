// Asks whether this binary holds machine code for a GPU, without launching anything.
#pragma once

#include "absl/status/status.h"

namespace awqd::cuda {

// UNIMPLEMENTED when no kernel was built for the thread's device. Every folder is compiled for the
// same architectures, so that one kernel speaks for all.
absl::Status ProbeKernelImage();

}  // namespace awqd::cuda
