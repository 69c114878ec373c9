// The body for NEON with dot products of bytes: products of integers alone.
#include "kernels/cpu/bodies/integers/column_product.h"

namespace awqd::cpu {

const IntegerProduct kNeonDotInt16 = kInt16Columns;
const IntegerProduct kNeonDotInt8 = Int8Columns();

}  // namespace awqd::cpu
