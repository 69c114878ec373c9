// The bodies for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/product_body.h"
// Over the two above.
#include "kernels/cpu/dequantize_body.h"
// Over the three above.
#include "kernels/cpu/dequantize_avx512.h"

namespace awqd::cpu {

const Bodies kAvx512Bodies = {Product, ScratchFloats, DequantizeFast, Columns, ToFloat, FromFloat};

}  // namespace awqd::cpu
