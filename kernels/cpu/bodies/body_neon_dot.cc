// The bodies of NEON with dot products of bytes: products of integers.
#include "kernels/cpu/bodies/vec_neon.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/bytes_neon.h"
// Over the two above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/quads_body.h"

namespace awqd::cpu {

const StandInBodies kNeonDotDigits = {MakeDigits, DigitProduct};
const QuadBodies kNeonDotQuads = {OrderQuads, FewByQuads, /*any_groups=*/false};

}  // namespace awqd::cpu
