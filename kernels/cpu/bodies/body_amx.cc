// The bodies of AMX, which multiplies many tokens; few are left to AVX-512 VNNI.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/bytes_vnni.h"
#include "kernels/cpu/bodies/register_tile.h"
// Over the two above.
#include "kernels/cpu/bodies/integers/digits_body.h"
#include "kernels/cpu/bodies/integers/scaled_body.h"
// Over the above.
#include "kernels/cpu/bodies/integers/quad_panels_body.h"
// Over the above.
#include "kernels/cpu/bodies/integers/amx_body.h"
#include "kernels/cpu/bodies/integers/amx_registers.h"

namespace awqd::cpu {

// A tile of INT8 has 32 tokens. Where AMX begins to be faster has not been measured: it may be
// before.
const StandInBodies kAmxDigits = {MakeDigits, AmxDigitProduct<AmxRegisters>, /*least_tokens=*/32,
                                  /*least_tokens_of_bytes=*/32};
const QuadBodies kAmxQuads = {
    OrderQuads, AmxQuadProduct<AmxRegisters, AmxLeast{.tokens = 32, .tokens_of_bytes = 32}>,
    /*any_groups=*/true};

}  // namespace awqd::cpu
