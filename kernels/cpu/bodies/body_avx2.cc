// The bodies for AVX2, FMA and F16C.
#include "kernels/cpu/bodies/vec_avx2.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/bytes_pairs.h"
#include "kernels/cpu/bodies/product_body.h"
// Over the two above.
#include "kernels/cpu/bodies/dequantize_body.h"
#include "kernels/cpu/bodies/integers/integer_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
#include "kernels/cpu/bodies/kv4_load_body.h"
#include "kernels/cpu/bodies/kv4_store_body.h"
// Over the above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/pairs_body.h"
#include "kernels/cpu/bodies/integers/quads_body.h"

namespace awqd::cpu {

const Bodies kAvx2Bodies = {Product,
                            Scratch::kFloats,
                            Dequantize,
                            Columns,
                            ToFloat,
                            FromFloat,
                            {IntegerProduct, ScaledProduct, ScaledScratch::kBytes},
                            Kv4Ranges,
                            Kv4Codes,
                            Kv4Elements};
const StandInBodies kAvx2Digits = {MakeDigits, DigitProduct};
const StandInBodies kAvx2Pairs = {MakePairs, PairProduct, /*least_tokens=*/16,
                                  /*least_tokens_of_bytes=*/16};
const QuadBodies kAvx2Quads = {OrderQuads, FewByQuads, /*any_groups=*/false, QuadBodies::kEver,
                               /*most_tokens_of_bytes=*/64};

}  // namespace awqd::cpu
