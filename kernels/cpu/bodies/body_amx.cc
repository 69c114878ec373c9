// The bodies of AMX, which multiplies many tokens; few are left to AVX-512 VNNI.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/byte_dot.h"
#include "kernels/cpu/bodies/register_tile.h"
// Over the two above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
// Over the above.
#include "kernels/cpu/bodies/integers/byte_panel_product.h"
// Over the above.
#include "kernels/cpu/bodies/integers/amx_product.h"
#include "kernels/cpu/bodies/integers/amx_registers.h"

namespace awqd::cpu {

// From how many tokens on AMX is faster, on one core and on 16 (README.md).
const StandInBodies kAmxDigits = {MakeDigits, AmxDigitProduct<AmxRegisters>, /*least_tokens=*/6,
                                  /*least_tokens_of_bytes=*/8};
constexpr AmxLeast kLeast = {.tokens = 7, .tokens_of_short_groups = 16, .tokens_of_bytes = 24};
const QuadBodies kAmxQuads = {OrderQuads, AmxQuadProduct<AmxRegisters, kLeast>,
                              /*any_groups=*/true};

}  // namespace awqd::cpu
