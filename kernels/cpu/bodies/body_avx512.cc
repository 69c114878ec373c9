// The body for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/bodies/dequantize_avx512.h"
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/kv4_body.h"
#include "kernels/cpu/bodies/product_body.h"

namespace awqd::cpu {

const Bodies kAvx512Bodies = {Product,   Scratch::kFloats, DequantizeFast, Columns,
                              ToFloat,   FromFloat,        LargestBits,    ToInt8,
                              Kv4Ranges, Kv4Codes,         Kv4Elements,    VectorBlock};
const IntegerProducts kAvx512Integers = {.int16_columns = kInt16Columns,
                                         .int16_panels = Int16Panels(10, 12),
                                         .int8_bytes = Int8Columns(48, 12),
                                         .int8_panels = kInt8Panels,
                                         .int32_product = Int32PanelProduct,
                                         .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
