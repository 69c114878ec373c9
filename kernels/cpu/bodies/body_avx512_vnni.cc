// The bodies whose sums AVX-512 VNNI adds up in one instruction instead of two: products of
// integers.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/register_tile.h"
// Over the two above.
#include "kernels/cpu/bodies/integer_body.h"
#include "kernels/cpu/bodies/scaled_body.h"

namespace awqd::cpu {

const IntegerBodies kAvx512VnniBodies = {IntegerProduct, ScaledProduct, ScaledScratch::kBytes};

}  // namespace awqd::cpu
