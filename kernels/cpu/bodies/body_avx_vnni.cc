// The bodies of AVX-VNNI, AVX2's form of AVX-512 VNNI: products of integers.
#include "kernels/cpu/bodies/vec_avx2.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/byte_dot.h"
// Over the two above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/integer_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
// Over the above.
#include "kernels/cpu/bodies/integers/pairs_body.h"
#include "kernels/cpu/bodies/integers/quads_body.h"

namespace awqd::cpu {

const IntegerBodies kAvxVnniBodies = {IntegerProduct, ScaledProduct, ScaledScratch::kBytes};
const StandInBodies kAvxVnniDigits = {MakeDigits, DigitProduct};
const StandInBodies kAvxVnniPairs = {MakePairs, PairProduct, /*least_tokens=*/16,
                                     /*least_tokens_of_bytes=*/48};
const QuadBodies kAvxVnniQuads = {OrderQuads, FewByQuads, /*any_groups=*/false};

}  // namespace awqd::cpu
