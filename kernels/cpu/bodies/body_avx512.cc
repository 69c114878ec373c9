// The bodies for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/bytes_pairs.h"
#include "kernels/cpu/bodies/product_body.h"
// Over the two above.
#include "kernels/cpu/bodies/dequantize_body.h"
// Over the three above.
#include "kernels/cpu/bodies/dequantize_avx512.h"
#include "kernels/cpu/bodies/integers/integer_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
#include "kernels/cpu/bodies/kv4_load_body.h"
#include "kernels/cpu/bodies/kv4_store_body.h"
// Over the above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/pairs_body.h"
#include "kernels/cpu/bodies/integers/quads_body.h"

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
const StandInBodies kAvx512Digits = {MakeDigits, DigitProduct};
const StandInBodies kAvx512Pairs = {MakePairs, PairProduct, /*least_tokens=*/10,
                                    /*least_tokens_of_bytes=*/12};
const QuadBodies kAvx512Quads = {OrderQuads, FewByQuads, /*any_groups=*/false,
                                 /*most_tokens=*/48, /*most_tokens_of_bytes=*/12};

}  // namespace awqd::cpu
