// The bodies for AVX2, FMA and F16C.
#include "kernels/cpu/vec_avx2.h"
// Over the Vec above.
#include "kernels/cpu/product_body.h"
// Over the two above.
#include "kernels/cpu/dequantize_body.h"

namespace awqd::cpu {

const Bodies kAvx2Bodies = {Product, ScratchFloats, Dequantize, Columns, ToFloat, FromFloat};

}  // namespace awqd::cpu
