// The body for aarch64, whose NEON every such machine has.
#include "kernels/cpu/bodies/dequantize_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
#include "kernels/cpu/bodies/kv4_body.h"
#include "kernels/cpu/bodies/product_body.h"

namespace awqd::cpu {

const Bodies kNeonBodies = {Product,   Scratch::kFloats, Dequantize,  Columns,
                            ToFloat,   FromFloat,        LargestBits, ToInt8,
                            Kv4Ranges, Kv4Codes,         Kv4Elements, VectorBlock};
const IntegerProducts kNeonIntegers = {.int8_panels = kInt8Panels,
                                       .int32_product = Int32PanelProduct,
                                       .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
