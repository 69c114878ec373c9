// The bodies of AVX-512 VNNI, which multiplies bytes and adds up sums in one instruction: products
// of integers, and of activations that are made integers.
#include "kernels/cpu/bodies/vec_avx512.h"
// Over the Vec above.
#include "kernels/cpu/bodies/integers/byte_dot.h"
#include "kernels/cpu/bodies/register_tile.h"
// Over the two above.
#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/integer_body.h"
#include "kernels/cpu/bodies/integers/panel_product.h"
// Over the above.
#include "kernels/cpu/bodies/integers/pairs_body.h"
#include "kernels/cpu/bodies/integers/byte_panel_product.h"

namespace awqd::cpu {

const IntegerBodies kAvx512VnniBodies = {IntegerProduct, ScaledProduct, ScaledScratch::kBytes};
const StandInBodies kAvx512VnniDigits = {MakeDigits, DigitProduct};
const StandInBodies kAvx512VnniPairs = {MakePairs, PairProduct, /*least_tokens=*/16,
                                        /*least_tokens_of_bytes=*/48};
const QuadBodies kAvx512VnniQuads = {OrderQuads, QuadProduct, /*any_groups=*/true};

}  // namespace awqd::cpu
