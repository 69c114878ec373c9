// The body for AVX-512 VNNI, which multiplies bytes and adds up sums in one instruction: products
// of integers alone.
#include "kernels/cpu/bodies/integers/byte_panel_product.h"

namespace awqd::cpu {

const IntegerProducts kAvx512VnniIntegers = {.int16_columns = kInt16Columns,
                                             .int16_panels = Int16Panels(16, 48),
                                             .int8_bytes = kInt8ByteProduct,
                                             .int8_panels = kInt8Panels,
                                             .int32_product = Int32PanelProduct,
                                             .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
