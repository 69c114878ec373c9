// Which instruction set the CPU rows run with.
#pragma once

#include "kernels/types.h"

namespace awqd {

// The best level that this machine and this build have. The environment variable AWQD_CPU_ISA
// (portable, avx2 or avx512) lowers it, so that one machine can test every body; it never raises
// it, and another value is ignored.
CpuIsa DetectIsa();

}  // namespace awqd
