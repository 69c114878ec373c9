// AMX's products (kernels/cpu/bodies/integers/amx_product.h) over registers in software, for
// machines with AVX-512 VNNI alone. Tiles are multiplied whatever the number of tokens.
#pragma once

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {

extern const IntegerProduct kEmulatedAmxInt16;
extern const IntegerProduct kEmulatedAmxInt8;

}  // namespace awqd::cpu
