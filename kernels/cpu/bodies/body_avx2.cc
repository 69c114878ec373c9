// The body for AVX2, FMA and F16C.
#include "kernels/cpu/bodies/dequantize_body.h"
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/kv4_body.h"
#include "kernels/cpu/bodies/product_body.h"

namespace awqd::cpu {

const Bodies kAvx2Bodies = {Product,   Scratch::kFloats, Dequantize,  Columns,
                            ToFloat,   FromFloat,        LargestBits, ToInt8,
                            Kv4Ranges, Kv4Codes,         Kv4Elements, VectorBlock};
const IntegerProducts kAvx2Integers = {.int16_columns = kInt16Columns,
                                       .int16_panels = Int16Panels(16, 16),
                                       .int8_bytes = Int8Columns(IntegerProduct::kNoLimit, 64),
                                       .int8_panels = kInt8Panels,
                                       .int32_product = Int32PanelProduct,
                                       .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
