// The body for AMX, which multiplies many tokens; fewer are left to AVX-512 VNNI.
#include "kernels/cpu/bodies/integers/amx_product.h"
#include "kernels/cpu/bodies/integers/amx_registers.h"

namespace awqd::cpu {

// The least tokens are those from which on AMX is faster, on one core and on 16 (README.md).
const IntegerProduct kAmxInt16 = {.prologue = MakeInt16Planes,
                                  .product = AmxInt16Product<AmxRegisters>,
                                  .int16 = true,
                                  .token_bytes = kInt16BlockBytes,
                                  .min_tokens = 6,
                                  .min_tokens_8bit = 8,
                                  .any_groups = false};
constexpr AmxMinTokens kMin = {.tokens = 7, .tokens_of_short_groups = 16, .tokens_of_bytes = 24};
const IntegerProduct kAmxInt8 = {.prologue = OrderInt8,
                                 .product = AmxInt8Product<AmxRegisters, kMin>,
                                 .token_bytes = kBlockRows};

}  // namespace awqd::cpu
