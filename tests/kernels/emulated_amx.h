// AMX's body (kernels/cpu/bodies/integers/amx_product.h) over registers in software, for machines with
// AVX-512 VNNI alone. Tiles are multiplied whatever the number of tokens.
#pragma once

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {

extern const StandInBodies kEmulatedAmxDigits;
extern const QuadBodies kEmulatedAmxQuads;

}  // namespace awqd::cpu
