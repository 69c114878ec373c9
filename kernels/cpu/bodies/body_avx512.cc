// The bodies for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/product_body.h"
// Over the two above.
#include "kernels/cpu/bodies/dequantize_body.h"
// Over the three above.
#include "kernels/cpu/bodies/dequantize_avx512.h"
#include "kernels/cpu/bodies/integer_body.h"
#include "kernels/cpu/bodies/kv4_load_body.h"
#include "kernels/cpu/bodies/kv4_store_body.h"
#include "kernels/cpu/bodies/scaled_body.h"

namespace awqd::cpu {

const Bodies kAvx512Bodies = {Product,
                              Scratch::kFloats,
                              DequantizeFast,
                              Columns,
                              ToFloat,
                              FromFloat,
                              {IntegerProduct, ScaledProduct, ScaledScratch::kBytes},
                              Kv4Ranges,
                              Kv4Codes,
                              Kv4Elements};

}  // namespace awqd::cpu
