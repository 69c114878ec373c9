// The bodies for aarch64, whose NEON every such machine has.
#include "kernels/cpu/bodies/vec_neon.h"
// Over the Vec above.
#include "kernels/cpu/bodies/product_body.h"
// Over the two above.
#include "kernels/cpu/bodies/dequantize_body.h"
#include "kernels/cpu/bodies/integers/integer_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
#include "kernels/cpu/bodies/kv4_load_body.h"
#include "kernels/cpu/bodies/kv4_store_body.h"

namespace awqd::cpu {

const Bodies kNeonBodies = {Product,
                            Scratch::kFloats,
                            Dequantize,
                            Columns,
                            ToFloat,
                            FromFloat,
                            {IntegerProduct, ScaledProduct, ScaledScratch::kBytes},
                            Kv4Ranges,
                            Kv4Codes,
                            Kv4Elements};

}  // namespace awqd::cpu
