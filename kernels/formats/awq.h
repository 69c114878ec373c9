// Declares the format AutoAWQ "gemm".
#pragma once

#include "kernels/formats/format.h"

namespace awqd {
extern const Format kAwqFormat;
}  // namespace awqd
