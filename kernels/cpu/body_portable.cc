// The bodies for any machine.
#include "kernels/cpu/vec_portable.h"
// Over the Vec above.
#include "kernels/cpu/product_body.h"
// Over the two above.
#include "kernels/cpu/dequantize_body.h"

namespace awqd::cpu {

const Bodies kPortableBodies = {Product, ScratchFloats, Dequantize, Columns, ToFloat, FromFloat};

}  // namespace awqd::cpu
