// AMX's body (kernels/cpu/bodies/integers/amx_body.h) over registers in software, for machines with
// AVX-512 VNNI only. It uses tiles for any number of tokens.
#pragma once

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {

extern const StandInBodies kEmulatedAmxDigits;
extern const QuadBodies kEmulatedAmxQuads;

}  // namespace awqd::cpu
