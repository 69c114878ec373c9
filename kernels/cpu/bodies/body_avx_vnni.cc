// The body for AVX-VNNI, AVX2's form of AVX-512 VNNI: products of integers alone.
#include "kernels/cpu/bodies/integers/column_product.h"

namespace awqd::cpu {

const IntegerProducts kAvxVnniIntegers = {.int16_columns = kInt16Columns,
                                          .int16_panels = Int16Panels(16, 48),
                                          .int8_bytes = Int8Columns(),
                                          .int8_panels = kInt8Panels,
                                          .int32_product = Int32PanelProduct,
                                          .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
