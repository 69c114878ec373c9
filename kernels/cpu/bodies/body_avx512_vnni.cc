// The body for AVX-512 VNNI, which multiplies bytes and adds up sums in one instruction: products
// of integers alone.
#include "kernels/cpu/bodies/integers/lane_product.h"

namespace awqd::cpu {

const IntegerProducts kAvx512VnniIntegers = {.int16_columns = kInt16Columns,
                                             .int16_lanes = {.prologue = MakeInt16Planes,
                                                             .product = LaneProduct<2>,
                                                             .interleave = InterleaveTokens,
                                                             .int16 = true,
                                                             .token_bytes = kInt16BlockBytes,
                                                             .min_tokens = 12,
                                                             .min_tokens_8bit = 14,
                                                             .max_tokens = 47,
                                                             .max_tokens_8bit = 47},
                                             .int16_panels = Int16Panels(48, 48),
                                             .int8_bytes = {.prologue = OrderInt8,
                                                            .product = Int8ByteProduct,
                                                            .token_bytes = kBlockRows,
                                                            .max_tokens = 5,
                                                            .max_tokens_8bit = 14,
                                                            .group_rows = kRunRows},
                                             .int8_lanes = {.prologue = OrderInt8,
                                                            .product = LaneProduct<1>,
                                                            .interleave = InterleaveTokens,
                                                            .token_bytes = kBlockRows,
                                                            .group_rows = kRunRows},
                                             .int8_panels = kInt8Panels,
                                             .int32_product = Int32PanelProduct,
                                             .panel_scratch_bytes = PanelScratch::kBytes};

}  // namespace awqd::cpu
